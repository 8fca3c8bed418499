"""The operations of sparse multi-head latent attention over paged caches."""

from . import layouts
from .checks import debug_checks
from .dispatch import report, target
from .kv_pack import kv_pack, kv_unpack
from .merge import merge
from .resolve_slots import resolve_slots

__all__ = ["debug_checks", "kv_pack", "kv_unpack", "layouts", "merge", "report", "resolve_slots", "target"]

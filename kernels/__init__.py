"""The operations of sparse multi-head latent attention over paged caches, and of the networks around it."""

from . import layouts
from .checks import ValueCheckError, debug_checks
from .compress import compress
from .dispatch import report, target
from .index_scores import index_scores
from .kv_pack import kv_pack, kv_unpack
from .layouts import KVLayout
from .merge import merge
from .resolve_slots import resolve_slots
from .sinkhorn import sinkhorn
from .sparse_mla import Epilogue, Quantised, sparse_mla
from .top_k import top_k

__all__ = [
    "Epilogue",
    "KVLayout",
    "Quantised",
    "ValueCheckError",
    "compress",
    "debug_checks",
    "index_scores",
    "kv_pack",
    "kv_unpack",
    "layouts",
    "merge",
    "report",
    "resolve_slots",
    "sinkhorn",
    "sparse_mla",
    "target",
    "top_k",
]

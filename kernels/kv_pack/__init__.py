"""Writing rows into a paged cache, and reading them back."""

from .api import kv_pack, kv_unpack

__all__ = ["kv_pack", "kv_unpack"]

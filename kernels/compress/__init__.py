"""Pooling of the key-value stream into compressed entries (DeepSeek-V4)."""

from .api import compress

__all__ = ["compress"]

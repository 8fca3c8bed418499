"""Mixing matrices of hyper-connections."""

from .api import sinkhorn

__all__ = ["sinkhorn"]

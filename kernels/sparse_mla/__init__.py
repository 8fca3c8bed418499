"""Attention of each query row over the cache slots that it names."""

from .api import sparse_mla
from .epilogue import Epilogue, Quantised

__all__ = ["Epilogue", "Quantised", "sparse_mla"]

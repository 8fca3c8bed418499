"""Exact selection of the best scores of each row."""

from .api import top_k

__all__ = ["top_k"]

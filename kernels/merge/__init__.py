"""Merging attention over parts of the keys."""

from .api import merge

__all__ = ["merge"]

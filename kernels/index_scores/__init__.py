"""Scores of an indexer's queries against its cached keys."""

from .api import index_scores

__all__ = ["index_scores"]

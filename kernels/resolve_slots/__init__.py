"""From request-local choices to physical slots."""

from .api import resolve_slots

__all__ = ["resolve_slots"]

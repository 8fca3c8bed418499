"""Single values from a caller, each kind checked and worded in one place."""

from collections.abc import Sequence
from typing import Any, SupportsFloat

import jax
import numpy as np

from jmla.models.config.common import FLOAT32_MAX, FLOAT32_TINY, INT32_MAX, shown
from jmla.models.options import as_integer


def _scalar(value: Any) -> Any:
    """What a NumPy scalar or an array without axes holds; anything else as it is."""
    return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0 else value


def check_integer(name: str, value: Any, low: int, high: int = INT32_MAX) -> int:
    """An integer in ``low..high``.

    Raises:
        ValueError: anything else.
    """
    number = as_integer(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"Expected {name}={shown(value)} to be an integer from {low} to {high}")
    return number


def check_number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """A number in ``low..high`` (above ``low`` if that is open) that stays finite, and what it is, in float32.

    Raises:
        ValueError: anything else.
    """
    try:
        scalar = _scalar(value)
        listed = isinstance(scalar, bool | np.ndarray | jax.Array)
        number = float(scalar) if isinstance(scalar, SupportsFloat) and not listed else np.nan
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    held = number == 0 or FLOAT32_TINY <= abs(number) <= FLOAT32_MAX
    if not (held and low <= number <= high) or (low_open and number == low):
        least = f"{low:g} <{'' if low_open else '='} " if np.isfinite(low) else ""
        most = f" <= {high:g}" if np.isfinite(high) else ""
        bounds = f" with {least}{name}{most}" if least or most else ""
        raise ValueError(f"Expected {name}={shown(value)} to be a finite float32 number{bounds}")
    return number


def check_text(name: str, text: str) -> str:
    """A string of whole characters.

    Raises:
        ValueError: lone surrogates: halves of a character, or what Python makes of bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise ValueError(
            f"Expected {name} to be valid Unicode, got the lone surrogate {text[at]!r} at position {at}"
        ) from None
    return text


def is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple, an array with axes or alike; not text, bytes, sets, dicts, generators."""
    if isinstance(value, np.ndarray | jax.Array):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def check_token_ids(name: str, ids: Any, vocab_size: int, *, least: int = 1) -> np.ndarray:
    """Token ids ``[n]`` as int32, checked on the host before anything is cut to int32 or used as an index.

    Raises:
        TypeError: no list or array of integers; ``True`` and ``False`` are none.
        ValueError: fewer than ``least``, more than one axis, or outside ``0..vocab_size - 1``.
    """
    if not is_list(ids):
        raise TypeError(f"Expected {name} to be a list of token ids, got {shown(ids)}")
    if isinstance(ids, np.ndarray | jax.Array):
        if ids.ndim != 1:
            raise ValueError(f"Expected {name} to hold token ids along one axis, got shape {ids.shape}")
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"Expected {name} to hold integer token ids, got {ids.dtype}")
        ids = ids.tolist()
    if len(ids) < least:
        raise ValueError(f"Expected {name} to hold at least one token, got none")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:  # a long prompt's milliseconds
        return np.array(ids, np.int32)
    numbers = [as_integer(value) for value in ids]
    for position, number in enumerate(numbers):
        if number is None:
            raise TypeError(
                f"Expected {name} to hold integer token ids, got {shown(ids[position])} at position {position}"
            )
        if not 0 <= number < vocab_size:
            raise ValueError(
                f"Expected {name} to hold token ids in 0..{vocab_size - 1}, got {shown(number)} at position {position}"
            )
    return np.array(numbers, np.int32)

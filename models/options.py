"""Options that several entry points take, each checked and worded in one place."""

import operator
from typing import Any

import numpy as np

from jmla.models.config.common import shown

DTYPES = ("bfloat16", "float32")


def check_dtype(dtype: Any) -> str:
    """The dtype of a model's weights.

    Raises:
        ValueError: anything but "bfloat16" and "float32".
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"Expected dtype={shown(dtype)} to be 'bfloat16' or 'float32'")
    return dtype


def check_flag(name: str, value: Any) -> bool:
    """An option that is on or off.

    Raises:
        TypeError: anything but a bool; 1, arrays and "yes" are none.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"Expected {name}={shown(value)} to be True or False")
    return bool(value)


def as_integer(value: Any) -> int | None:
    """The integer that a value is, of whatever type; None if it is none, as ``True``, ``1.0`` and ``[1]``."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: Any, high: int, limit: str, low: int = 1) -> int:
    """An integer of any type, by default a positive one.

    Args:
        name: of the option.
        value: any integer but a bool.
        high: the largest that is allowed.
        limit: what ``high`` is, for the message.
        low: the smallest that is allowed.

    Raises:
        ValueError: no integer, or not in ``low..high``.
    """
    number = as_integer(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"Expected {name}={shown(value)} to be an integer in {low}..{high}, {limit}")
    return number


def check_max_seq_len(max_seq_len: Any, longest: int) -> int:
    """The most tokens of a sequence, as an int; ``longest`` for None.

    Args:
        max_seq_len: any integer but a bool, or None.
        longest: the model's max_position_embeddings.

    Raises:
        ValueError: no integer, or not in ``1..longest``.
    """
    if max_seq_len is None:
        return longest
    return check_integer("max_seq_len", max_seq_len, longest, "the model's max_position_embeddings")

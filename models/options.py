"""Options that several entry points take, each checked and worded in one place."""

import operator
from typing import Any

DTYPES = ("bfloat16", "float32")


def check_dtype(dtype: Any) -> str:
    """The dtype of a model's weights.

    Raises:
        ValueError: anything but "bfloat16" and "float32".
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"Expected {dtype=} to be 'bfloat16' or 'float32'")
    return dtype


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
    try:
        number = operator.index(max_seq_len) if not isinstance(max_seq_len, bool) else 0
    except TypeError:
        number = 0
    if not 1 <= number <= longest:
        raise ValueError(
            f"Expected {max_seq_len=} to be an integer in 1..{longest}, the model's max_position_embeddings"
        )
    return number

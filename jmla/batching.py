"""Which prompts run together: groups of like length, within what a pass and a cache may cost."""

from collections.abc import Sequence

from jmla.models import bytes_per_row, bytes_per_token
from jmla.models.spec import PAGE_TOKENS, ModelSpec, pages_of

MAX_BATCH = 64  # prompts that run together; more run in groups
PASS_TOKENS = 8192  # of one pass of prefill over all rows, padding included; a power of two
FEW_TOKENS = 1024  # of a whole prefill: up to here padding costs less than another group would
CACHE_BYTES = 8 << 30  # of the cache of a group of several prompts
SMALLEST_CHUNK = 16
SMALLEST_CACHE = 256


def bucket(count: int, smallest: int = 1) -> int:
    """The next power of two, so that few shapes are compiled."""
    return max(smallest, 1 << (count - 1).bit_length())


def groups(spec: ModelSpec, lengths: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """Splits prompts into groups that run one after the other.

    Prompts of a group run as one rectangle, as wide as its longest; at most half of it is padding unless it is small.
    Its cache, with room for the longest completion in every row, stays below ``CACHE_BYTES``. A prompt that is dearer
    runs alone.

    Args:
        spec: of the model.
        lengths: tokens of each prompt.
        limits: tokens that each may become longer by.

    Returns:
        Indices of prompts, each once; within a group and from group to group the prompts become longer.
    """
    out: list[list[int]] = []
    held = room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], limits[i])):
        length = lengths[index]
        held, room = held + length, max(room, length + limits[index])
        size = len(out[-1]) + 1 if out else 0
        rectangle = size * length
        if (
            not 1 < size <= MAX_BATCH
            or rectangle > max(FEW_TOKENS, 2 * held)
            or cache_bytes(spec, bucket(size), room) > CACHE_BYTES
        ):
            out.append([])
            held, room = length, length + limits[index]
        out[-1].append(index)
    return out


def cache_bytes(spec: ModelSpec, batch: int, room: int) -> float:
    """Bytes of a cache of ``batch`` rows of ``room`` tokens, in whole pages."""
    tokens = pages_of(room) * PAGE_TOKENS
    return batch * (tokens * sum(bytes_per_token(spec).values()) + sum(bytes_per_row(spec).values()))


def cache_room(spec: ModelSpec, batch: int, room: int) -> int:
    """Tokens of each row to make a cache for: a power of two, or ``room`` itself where that would be too dear.

    Few shapes are compiled so; and a request that just fits is not refused for what rounding up adds.
    """
    rounded = min(bucket(room, SMALLEST_CACHE), spec.max_seq_len)
    return rounded if cache_bytes(spec, batch, rounded) <= CACHE_BYTES else room


def chunk_width(spec: ModelSpec, batch: int, left: int) -> int:
    """Tokens of each row in the next pass of prefill, of ``left`` that the longest row still has."""
    return min(spec.prefill_chunk, max(SMALLEST_CHUNK, PASS_TOKENS // batch), bucket(left, SMALLEST_CHUNK))

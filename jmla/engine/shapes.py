"""Shapes of an engine's steps: few, so that all of them can be compiled before the first request."""

from collections.abc import Callable, Iterator

import numpy as np

from jmla.batching import SMALLEST_CHUNK, bucket
from jmla.models.spec import PAGE_TOKENS


def width_of(count: int, chunk: int) -> int:
    """Tokens a row of a pass that holds ``count``: 16, 64, 256, ... or the chunk."""
    found = SMALLEST_CHUNK
    while found < count:
        found *= 4
    return min(found, max(chunk, SMALLEST_CHUNK))


def padded(ids: np.ndarray) -> np.ndarray:
    """Ids behind which zeros stand, so that few lengths are compiled."""
    out = np.zeros(bucket(max(len(ids), 1), PAGE_TOKENS), np.int32)
    out[: len(ids)] = ids
    return out


def doubling(first: int, last: int, factor: int = 2) -> Iterator[int]:
    """``first`` times powers of ``factor``, below ``last``, and ``last``."""
    while first < last:
        yield first
        first *= factor
    yield last


def shapes(rows: int, widest: int, budget: int) -> list[tuple[int, int]]:
    """Rows and widths of all rectangles that ``rectangles`` makes of chunks of at most ``budget`` tokens together."""
    widths = list(doubling(SMALLEST_CHUNK, widest, 4))
    sizes = list(doubling(1, bucket(rows)))
    return [(size, width) for width in widths for size in sizes if size == 1 or size * width <= _most(budget)]


def _most(held: int) -> int:
    """Tokens of a rectangle of several chunks that hold ``held``, padding included."""
    return max(2 * held, 8 * SMALLEST_CHUNK)


def rectangles[R](chunks: list[tuple[R, int]], width: Callable[[int], int]) -> list[list[tuple[R, int]]]:
    """Groups of chunks that run as one rectangle each, of which at most half is padding.

    A chunk is somebody's and has a length; ``width`` gives the width of the rectangle that holds it.
    """
    groups: list[list[tuple[R, int]]] = []
    for chunk in sorted(chunks, key=lambda c: c[1]):
        group = groups[-1] if groups else []
        held = sum(count for _, count in group) + chunk[1]
        if groups and bucket(len(group) + 1) * width(chunk[1]) <= _most(held):
            group.append(chunk)
        else:
            groups.append([chunk])
    return groups

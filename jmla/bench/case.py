"""What a measurement of an operation is made of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Work:
    """An operation with its inputs on the device.

    Attributes:
        run: takes the name of an implementation; gives the function to time, ``fn(*inputs, *shared)`` or, with
            ``state``, ``fn(*inputs, state) -> state``.
        sets: input tuples that calls take in turn.
        shared: inputs of all calls.
        state: what calls update in place (a pool), or None.
        without: as ``run``, for the operation without what the case is about (an epilogue), or None. It is timed on the
            same arrays: between processes, whose arrays lie elsewhere, times of one kernel differ by some percent.
    """

    run: Callable[[str], Callable[..., Any]]
    sets: Sequence[tuple[Any, ...]]
    shared: tuple[Any, ...] = ()
    state: Any = None
    without: Callable[[str], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at a named shape.

    Attributes:
        op: the operation.
        name: of the shape.
        build: allocates the inputs.
        flops: multiplications and additions of a call, 0 where they do not matter.
        bytes: that a call must move, 0 where they do not matter.
        peer: who else was measured on this shape ("FlashMLA"), or None.
        peer_us: their time in microseconds.
        implementations: to time, in order.
        calls: of a timed program, see ``timing.time_call``.
    """

    op: str
    name: str
    build: Callable[[], Work]
    flops: float = 0
    bytes: float = 0
    peer: str | None = None
    peer_us: float | None = None
    implementations: tuple[str, ...] = ("triton", "xla")
    calls: int = 40

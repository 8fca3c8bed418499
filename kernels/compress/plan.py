"""How the kernels of the compressor cut their work; needs no Triton."""

import dataclasses
from collections.abc import Mapping
from typing import Any

PROGRAM_VALUES = 2048  # slots times channels that a program pools at a time
PROGRAM_CHANNELS = 16  # at least, so that what it reads of a token fills sectors of memory
THREAD_VALUES = 16  # of a thread
POSITIONS = 1024  # that are counted at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for.

    What shapes the arithmetic of a window (``slots``, ``channels``, ``warps``) depends on neither the rows nor the
    steps of a call, so that its bits do not either.

    Attributes:
        steps: tokens of a row in the call, padding included.
        width: values of a token.
        ring: tokens of the state.
        ratio: tokens of a window.
        overlap: whether an entry also pools the previous window.
    """

    steps: int
    width: int
    ring: int
    ratio: int
    overlap: bool

    @property
    def halves(self) -> int:
        return 2 if self.overlap else 1

    @property
    def d(self) -> int:
        """Values of an entry."""
        return self.width // self.halves

    @property
    def slots(self) -> int:
        """Tokens of an entry."""
        return self.ratio * self.halves

    @property
    def windows(self) -> int:
        """Entries of a row."""
        return self.steps // self.ratio + 1

    @property
    def group(self) -> int:
        """Windows of a program: together the first ones hold all tokens that are older than the call."""
        return min(self.halves, self.windows)

    @property
    def groups(self) -> int:
        """Programs of a row."""
        return -(-self.windows // self.group)

    @property
    def channels(self) -> int:
        """Of a program."""
        return min(_power(self.d), max(PROGRAM_VALUES // self.slots, PROGRAM_CHANNELS))

    @property
    def warps(self) -> int:
        return max(self.slots * self.channels // (32 * THREAD_VALUES), 1)

    @property
    def tokens(self) -> int:
        """That a program writes into the ring at a time."""
        return min(_power(min(self.steps, self.ring)), PROGRAM_VALUES // self.channels)

    @property
    def block(self) -> int:
        """Positions that are counted at a time."""
        return min(_power(self.steps), POSITIONS)


def refuses_pallas(shapes: Mapping[str, Any]) -> str | None:
    """Why the Pallas kernel cannot serve, or None."""
    return "takes the state of one layer, not of all" if shapes["_stacked"] else None


def _power(count: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (count - 1).bit_length()

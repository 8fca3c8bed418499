"""How the packing kernels cut rows into pieces, and which rows it cannot cut; needs no Triton."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .. import launch_pallas
from ..layouts import MAX_SLOTS, KVLayout

LEAST_ROPE = 8  # values of a row's last part, for Pallas: with 2, XLA's compiler of jaxlib 0.11.2 crashes
CHUNK = 8  # neighbouring values that a thread of the CuTe kernel takes at a time, at most


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for.

    A row is cut in two: the head is its quantised values, or of plain rows what is not rotated; the rest follows. Their
    blocks are powers of two.

    Attributes:
        layout: of the pool.
        capacity: slots of the pool.
        normed: leading values under the norm; 0 without.
        eps: of the norm.
        turned: trailing values that are rotated; 0 without.
        rows: of a block.
        blocks: that a program takes.
    """

    layout: KVLayout
    capacity: int
    normed: int = 0
    eps: float = 0.0
    turned: int = 0
    rows: int = 1
    blocks: int = 1

    @classmethod
    def of(
        cls, layout: KVLayout, pool: jax.Array, norm_weight: jax.Array | None, cos_sin: jax.Array | None, eps: float
    ) -> "Plan":
        """The plan of a call, for programs of one row."""
        return cls(
            layout,
            min(pool.shape[0] * layout.page_size, MAX_SLOTS),
            normed=0 if norm_weight is None else norm_weight.size,
            eps=eps,
            turned=0 if cos_sin is None else cos_sin.shape[1],
        )

    @property
    def plain(self) -> bool:
        return self.layout.kind == "plain"

    @property
    def head(self) -> int:
        width = self.layout.width
        if not self.plain:
            return self.layout.nope
        return width - self.turned if 0 < self.turned < width else 1 << (width.bit_length() - 1)

    @property
    def rest(self) -> int:
        return self.layout.width - self.head

    @property
    def tile(self) -> int:
        return self.head if self.plain else self.layout.tile

    @property
    def tile_block(self) -> int:
        return max(_power(self.tile), 2)

    @property
    def tiles_block(self) -> int:
        return _power(-(-self.head // self.tile))

    @property
    def head_block(self) -> int:
        return self.tiles_block * self.tile_block

    @property
    def rest_block(self) -> int:
        return max(_power(self.rest), 2)

    @property
    def pad_block(self) -> int:
        return _power(self.layout.scale_bytes)

    @property
    def scale_start(self) -> int:
        """Byte of a page at which its scales start."""
        return self.layout.footer_offset if self.layout.has_footer else self.layout.nope

    @property
    def scale_step(self) -> int:
        """Bytes from the scales of a row to those of the next."""
        return self.layout.scale_bytes if self.layout.has_footer else self.layout.row_bytes

    @property
    def align(self) -> int:
        """Bytes that the address of every row is a multiple of."""
        return math.gcd(16, self.layout.page_stride, self.layout.row_bytes)

    @property
    def scale_align(self) -> int:
        """Bytes that the address of the scales of every row is a multiple of."""
        return math.gcd(16, self.layout.page_stride, self.scale_start, self.scale_step)

    @property
    def least(self) -> int:
        """Bits of the least amax."""
        return int(np.float32(self.layout.min_amax).view(np.int32))


def _power(count: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(count - 1, 0).bit_length()


def chunk(count: int, most: int) -> int:
    """The largest power of two that divides ``count``, at most ``most``."""
    return math.gcd(count, most)


def refuses(shapes: Mapping[str, Any]) -> str | None:
    """Why the kernel cannot serve, or None; see ``launch.register``."""
    layout, turned = shapes["_layout"], shapes["_turned"]
    plan = Plan(layout, layout.page_size, turned=turned)
    if plan.plain and plan.align % min(layout.row_bytes // layout.width, 16):
        return f"values must lie at multiples of their size, the page stride is {layout.page_stride}"
    if layout.rope and math.gcd(plan.align, layout.rope_offset) % 2:
        return f"bf16 values must lie at even bytes, got {layout.page_stride=}, {layout.row_bytes=}"
    if layout.kind in ("inline", "index") and plan.scale_align % 4:
        return f"scales must lie at multiples of 4 bytes, got {layout.page_stride=}, {layout.row_bytes=}"
    torn = turned > plan.rest and (plan.head % 2 or (plan.tiles_block > 1 and plan.tile % 2))
    if turned and (plan.rest % 2 or torn):
        return f"rotated pairs must lie within the parts of a row, got {layout.nope} + {layout.rope} values"
    return None


def refuses_pallas(shapes: Mapping[str, Any]) -> str | None:
    """Why the Pallas kernel cannot serve, or None."""
    pool, rope = shapes["_pool"], shapes["_layout"].rope
    if launch_pallas.offsets_overflow(pool):
        return f"pools of bytes must have at most 2 GiB or more than 4, got {pool.size / 2**30:.2f}"
    if 0 < rope < LEAST_ROPE and not launch_pallas.interpreting:
        return f"parts of fewer than {LEAST_ROPE} values end XLA's compiler, got {rope=}"
    return refuses(shapes)


def refuses_cute(shapes: Mapping[str, Any]) -> str | None:
    """Why the CuTe kernel cannot serve, or None."""
    layout = shapes["_layout"]
    tile = layout.tile // chunk(math.gcd(layout.nope, layout.tile), CHUNK)
    if layout.num_tiles > 1 and tile & (tile - 1):
        return f"several tiles must be of a power of two values, got {layout.tile} of {layout.nope}"
    return refuses(shapes)

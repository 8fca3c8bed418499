"""A pool and what is attended in it: the operand that all implementations share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..layouts import MAX_SLOTS, KVLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Source:
    """One pool, and what each row attends in it.

    Attributes:
        pool: uint8 or typed pool.
        indices: ``[R, K]`` int32 slots.
        lengths: ``[R]`` int32 columns that count, or None for all.
        kv_scale: scale of a plain e4m3 pool, or None.
        layout: the pool's layout (static).
    """

    pool: jax.Array
    indices: jax.Array
    lengths: jax.Array | None
    kv_scale: Any
    layout: KVLayout = dataclasses.field(metadata={"static": True})

    def counted(self) -> jax.Array:
        """``[R, K]``: whether a column lies before its row's length."""
        columns = jnp.arange(self.indices.shape[1], dtype=jnp.int32)
        if self.lengths is None:
            return jnp.broadcast_to(columns >= 0, self.indices.shape)
        return columns < self.lengths[:, None]

    def exists(self) -> jax.Array:
        """``[R, K]``: whether an index is a slot of the pool."""
        capacity = min(self.pool.shape[0] * self.layout.page_size, MAX_SLOTS)
        return (self.indices >= 0) & (self.indices < capacity)

    def slots(self) -> jax.Array:
        """``indices`` with -1 for whatever takes no part."""
        return jnp.where(self.counted() & self.exists(), self.indices, -1)

"""What every layer of one step shares: positions, tables, rotary tables, and the cache being threaded through."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmla import kernels
from jmla.kernels import dispatch
from jmla.kernels.layouts import KVLayout
from jmla.kernels.rowwise import rowwise
from jmla.models import rope
from jmla.models.config import Yarn
from jmla.models.spec import ModelSpec

Store = dict[str, dict[str, jax.Array]]  # {"pools": ..., "states": ...}, carried through the layers


@dataclasses.dataclass(frozen=True)
class StepContext:
    """One pass over ``T`` new tokens of each of ``B`` rows; R = B * T rows, request-major.

    Attributes:
        spec: the model's static facts.
        layouts: byte layout by stream.
        layers: layers that share each stream's pool.
        starts: ``[B]`` tokens in the cache before this pass.
        counts: ``[B]`` valid tokens of this pass.
        positions: ``[B, T]`` position of each token, -1 for padding.
        tokens: ``[R]`` token ids.
        table, window_table: page tables of the cache.
        capacity: most tokens a row can hold.
    """

    spec: ModelSpec
    layouts: dict[str, KVLayout]
    layers: dict[str, int]
    starts: jax.Array
    counts: jax.Array
    positions: jax.Array
    tokens: jax.Array
    table: jax.Array
    window_table: jax.Array | None
    capacity: int

    @property
    def flat_positions(self) -> jax.Array:
        """``[R]``, -1 for padding."""
        return self.positions.reshape(-1)

    @property
    def request(self) -> jax.Array:
        """``[R]`` row of the tables that a query row belongs to, -1 for padding."""
        batch, tokens = self.positions.shape
        owner = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tokens)
        return jnp.where(self.flat_positions >= 0, owner, -1)

    def rowwise(self, fn: Callable[..., Any], *rows: Any) -> Any:
        return rowwise(fn, *rows, deterministic=self.spec.deterministic)

    def rotary(
        self, positions: jax.Array, dims: int, theta: float, yarn: Yarn | None, magnitude: float = 1.0
    ) -> jax.Array:
        """``[R, dims]`` table rows of ``positions [R]``, row by row."""
        frequencies = rope.inverse_frequencies(dims, theta, yarn)
        return self.rowwise(lambda p: rope.cos_sin(p, frequencies, magnitude), jnp.maximum(positions, 0))

    def implementation(self, op: str) -> str | None:
        """The model's named implementation where the operation has it, else None: the best there is."""
        named = self.spec.implementation
        return named if named in dispatch.implementations(op) else None

    def without_padding(self, chosen: jax.Array) -> jax.Array:
        """Expert choices ``[R, k]`` with -1 in rows that hold no token, so that no expert runs for them."""
        return jnp.where(self.flat_positions[:, None] >= 0, chosen, -1)

    def visible(self, ratio: int) -> jax.Array:
        """``[R]`` compressed entries that a row sees: ``(position + 1) // ratio``; 0 for padding."""
        return (self.flat_positions + 1) // ratio

    def closing(self, ratio: int) -> jax.Array:
        """``[B, T // ratio + 1]`` ordinals of the compressed entries that this pass completes, -1 elsewhere."""
        entry = self.starts[:, None] // ratio + jnp.arange(self.positions.shape[1] // ratio + 1, dtype=jnp.int32)
        done = ((entry + 1) * ratio <= (self.starts + self.counts)[:, None]) & (self.counts > 0)[:, None]
        return jnp.where(done, entry, -1)

    def layer_pages(self, stream: str, pools: dict[str, jax.Array]) -> int:
        """Kernel pages that one layer has in a stream's pool."""
        return pools[stream].shape[0] // self.layers[stream]

    def slots(self, local: jax.Array, table: jax.Array, page_size: int, offset: jax.Array) -> jax.Array:
        """Physical slots ``[B, n]`` of request-local ordinals ``local [B, n]``; -1 stays -1."""
        rows = jnp.arange(local.shape[0], dtype=jnp.int32)
        slots, _ = kernels.resolve_slots(
            local,
            rows,
            table,
            page_size=page_size,
            layer_offset=offset,
            implementation=self.implementation("resolve_slots"),
        )
        return slots

    def page_table(self, table: jax.Array, kernel_pages: int, offset: jax.Array) -> jax.Array:
        """Kernel pages of ``table [B, W]``, ``kernel_pages`` to a page, shifted by ``offset``; -1 stays -1."""
        if kernel_pages > 1:
            parts = table[..., None] * kernel_pages + jnp.arange(kernel_pages, dtype=jnp.int32)
            table = jnp.where(table[..., None] >= 0, parts, -1).reshape(table.shape[0], -1)
        return jnp.where(table >= 0, table + offset, -1)

"""Compression as one Pallas kernel; programs are cut as in ``triton.py``."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..fallback import with_xla_rules
from ..launch_pallas import barrier, divide, launch, multiply, store
from . import xla
from .plan import Plan


def _sum(x: jax.Array) -> jax.Array:
    """Sums ``x [slots, channels]`` over slots by halves: the order does not depend on which thread holds what."""
    while x.shape[0] > 1:
        x = jnp.sum(x.reshape(2, x.shape[0] // 2, x.shape[1]), axis=0)
    return x.reshape(x.shape[1])


def _grid(rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (rows.size, columns.size)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def _compress(
    state: Any, values: Any, gates: Any, positions: Any, ape: Any, ring: Any, entries: Any, *, plan: Plan
) -> None:
    """Grid (rows, plan.groups, plan.d / plan.channels); ``ring`` is ``state``, updated in place."""
    ratio = plan.ratio
    row, group = pl.program_id(0), pl.program_id(1)
    channel = pl.program_id(2) * plan.channels + jnp.arange(plan.channels, dtype=jnp.int32)
    first = positions[row, 0]

    def load(ref: Any, index: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[index], mask=mask, other=0).astype(jnp.float32)

    def pool(start: jax.Array) -> jax.Array:
        slot = jnp.arange(plan.slots, dtype=jnp.int32)
        # The window's own tokens give their second halves where there are two.
        half = jnp.where(slot >= plan.slots - ratio, plan.width - plan.d, 0)
        token, column = _grid(start + ratio - plan.slots + slot, channel)
        inside = column < plan.d
        column = column + half[:, None]
        here, old = inside & (token >= first), inside & (token >= 0) & (token < first)
        at, before = (row, token - first, column), (row, jax.lax.rem(token, plan.ring), column)
        value = jnp.where(old, load(ring, before, old), load(values, at, here))
        before = (*before[:-1], column + plan.width)
        gate = jnp.where(old, load(ring, before, old), load(gates, at, here))
        bias = load(ape, (_grid(jax.lax.rem(slot, ratio), channel)[0], column), inside)
        score = jnp.where(token >= 0, gate + bias, -jnp.inf)  # before the first window there are no tokens
        weight = jnp.exp(score - jnp.max(score, axis=0)[None, :])
        return divide(_sum(multiply(weight, value)), _sum(weight))

    for i in range(plan.group):
        window = group * plan.group + i
        start = (jax.lax.div(first, ratio) + window) * ratio
        last = start + ratio - 1 - first  # of the call's tokens the one that closes the window
        step = plgpu.load(positions.at[row, last], mask=last < plan.steps, other=-1)
        entry = jax.lax.cond(step >= 0, pool, lambda _: jnp.zeros((plan.channels,), jnp.float32), start)
        store(entries, (row, window, channel), entry, (channel < plan.d) & (window < plan.windows))

    @pl.when(group == 0)
    def _() -> None:
        def counted(i: jax.Array, count: jax.Array) -> jax.Array:
            step = i * plan.block + jnp.arange(plan.block, dtype=jnp.int32)
            position = plgpu.load(positions.at[row, step], mask=step < plan.steps, other=-1)
            return count + jnp.sum((position >= 0).astype(jnp.int32))

        count = jax.lax.fori_loop(0, -(-plan.steps // plan.block), counted, jnp.int32(0))
        kept = jnp.minimum(count, plan.ring)
        barrier()  # all threads have read the ring

        def write(i: jax.Array, _: None) -> None:
            step, column = _grid(count - kept + i * plan.tokens + jnp.arange(plan.tokens, dtype=jnp.int32), channel)
            keep = (step < count) & (column < plan.d)
            place = jax.lax.rem(first + step, plan.ring)
            for half in range(0, plan.width, plan.d):
                for source, start in ((values, half), (gates, plan.width + half)):
                    taken = load(source, (row, step, column + half), keep)
                    store(ring, (row, place, column + start), taken, keep)

        jax.lax.fori_loop(0, -(-min(plan.steps, plan.ring) // plan.tokens), write, None)


def _compress_call(
    values: jax.Array,
    gates: jax.Array,
    state: jax.Array,
    positions: jax.Array,
    ape: jax.Array,
    layer: None = None,
    *,
    ratio: int,
    overlap: bool,
) -> tuple[jax.Array, jax.Array]:
    """See ``jmla.kernels.compress``."""
    if values.size == 0:
        return xla.compress(values, gates, state, positions, ape, ratio=ratio, overlap=overlap)
    batch, steps, width = values.shape
    plan = Plan(steps, width, state.shape[1], ratio, overlap)
    state, entries = launch(
        _compress,
        state,
        values,
        gates,
        positions,
        ape,
        out=(
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, plan.windows, plan.d), jnp.float32),
        ),
        grid=(batch, plan.groups, -(-plan.d // plan.channels)),
        aliases={0: 0},
        num_warps=plan.warps,
        plan=plan,
    )
    return entries, state


compress = with_xla_rules(_compress_call, xla.compress)

"""Sinkhorn iterations as one Triton kernel, whose matrices stay in registers: in XLA each sum is a kernel."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ..fallback import with_xla_rules
from ..launch import launch
from . import xla

PROGRAM_VALUES = 512


@triton.jit
def _row_sums(x, N: tl.constexpr):
    """``[BLOCK, N, 1]``, summed pair by pair: the order does not depend on which thread holds what."""
    for i in tl.static_range(N.bit_length() - 1):
        x = tl.sum(tl.reshape(x, [x.shape[0], N, N >> (i + 1), 2]), axis=3)
    return x


@triton.jit
def _column_sums(x, N: tl.constexpr):
    """``[BLOCK, 1, N]``, likewise."""
    for i in tl.static_range(N.bit_length() - 1):
        x = tl.sum(tl.reshape(x, [x.shape[0], N >> (i + 1), 2, N]), axis=2)
    return x


@triton.jit
def _sinkhorn(logits, out, N: tl.constexpr, ITERS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows / BLOCK,)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, N)
    at = row[:, None, None] * (N * N) + (stream[:, None] * N + stream[None, :])[None, :, :]
    x = tl.load(logits + at)
    x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
    mix = x / _row_sums(x, N) + EPS
    mix = mix / (_column_sums(mix, N) + EPS)
    for _ in tl.range(1, ITERS):
        mix = mix / (_row_sums(mix, N) + EPS)
        mix = mix / (_column_sums(mix, N) + EPS)
    tl.store(out + at, mix)


def _sinkhorn_call(logits: jax.Array, *, iters: int, eps: float) -> jax.Array:
    rows, streams, _ = logits.shape
    if rows == 0:
        return logits
    # Programs take a number of rows that divides their count, so that the count is not compiled in.
    block = math.gcd(rows, max(PROGRAM_VALUES // streams**2, 1))
    return launch(
        _sinkhorn,
        logits,
        out=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        grid=(rows // block,),
        num_warps=1,
        N=streams,
        ITERS=iters,
        EPS=eps,
        BLOCK=block,
    )


sinkhorn = with_xla_rules(_sinkhorn_call, xla.sinkhorn)

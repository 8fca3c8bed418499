"""Selection by Triton: each program searches its scores for the k-th largest and writes the columns of those above.

A row that one program can hold is chosen from at once. A longer one is first narrowed, maybe more than once: of each
chunk of columns a program keeps as many as could be chosen, in their order, and these make a shorter row.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.custom_batching import custom_vmap

from ..launch import keeping, launch
from .api import CHUNK  # whose counts fit halves of a word

LINE = tl.constexpr(128)  # columns that a warp holds side by side, four to a thread
INF = tl.constexpr(float("inf"))

SLACK = 0.25  # part of k that narrowing may keep beyond k: the coarser the cut, the sooner it is found
SCORES = 64  # of a thread
FEW_COLUMNS, FEW_SCORES = 8192, 32  # a program of up to so many columns has more warps, so that its steps are shorter


@triton.jit
def _ordered(bits):
    """Bits of a float32 to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(value):
    return _ordered((value + 0.0).to(tl.int32, bitcast=True))  # both zeros are one key


@triton.jit
def _value(key):
    return _ordered(key).to(tl.float32, bitcast=True)


@triton.jit
def _log_odds(count, among):
    """Of being one of ``count`` among so many, in some unit: nearly linear in the values of a bell curve."""
    chosen = tl.minimum(tl.maximum(tl.cast(count, tl.float32), 0.5), among - 0.5)
    # The bits of a float are a logarithm that is straight between powers of two.
    return ((among - chosen).to(tl.int32, bitcast=True) - chosen.to(tl.int32, bitcast=True)).to(tl.float32)


@triton.jit
def _above(x, bound):
    """How many of each column of ``x [R, T]`` are larger than ``bound``."""
    # The sign of a difference costs less than a comparison; it wants zeros without a sign and a finite bound.
    return tl.sum((bound - x).to(tl.uint32, bitcast=True) >> 31, 0)


@triton.jit
def _search(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """A bound that ``LEAST`` to ``MOST`` of ``x [R, T]`` reach; NaN and -0.0 are not in it, and -inf does not count.

    Returns the bound, how many reach it and how many are larger. The second number means something only where the
    first is above ``MOST``: then the bound is the LEAST-th largest element, and some of its equals must be left out.
    All that count reach the bound where they are fewer than ``LEAST``.
    """
    smallest, largest = tl.min(x), tl.max(x)
    at_low, at_high = x.numel, 0
    if smallest == -INF:
        at_low = tl.sum((x > -INF).to(tl.int32))
        smallest = tl.min(tl.where(x > -INF, x, INF))
    low, high = _key(smallest), _key(largest) + 1
    among = tl.cast(at_low, tl.float32)
    aim = _log_odds((LEAST + MOST) // 2, among)
    while (at_low > MOST) & (high > low + 1):
        # One cut where the count would be met if the values lay on a bell curve, one in the middle of the keys.
        smallest, largest = _value(low), _value(high)
        odds = _log_odds(at_low, among)
        share = (aim - odds) / (_log_odds(at_high, among) - odds)
        guess = _key(smallest + (largest - smallest) * share)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        middle = (low & high) + ((low ^ high) >> 1)
        first, second = tl.minimum(guess, middle), tl.maximum(guess, middle)
        counts = tl.sum(_above(x, _value(first - 1)) | (_above(x, _value(second - 1)) << 16))
        at_first, at_second = (counts & 0xFFFF).to(tl.int32), (counts >> 16).to(tl.int32)
        over, between = at_second >= LEAST, at_first >= LEAST
        low = tl.where(over, second, tl.where(between, first, low))
        high = tl.where(over, high, tl.where(between, second, first))
        now_low = tl.where(over, at_second, tl.where(between, at_first, at_low))
        now_high = tl.where(over, at_high, tl.where(between, at_second, at_first))
        if (now_low == at_low) & (now_high == at_high):
            # The bounds moved over nothing: draw them in to the elements between them.
            low = _key(tl.min(tl.where(x >= _value(low), x, INF)))
            high = _key(tl.max(tl.where(x >= _value(high), -INF, x))) + 1
        at_low, at_high = now_low, now_high
    return _value(low), at_low, at_high


@triton.jit
def _select(
    scores,
    limit,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    WARPS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """The scores of a chunk ``[lines, LINE]``, a bound that those chosen reach and no others, and their number."""
    line, column = tl.arange(0, COLUMNS // LINE)[:, None] * LINE, tl.arange(0, LINE)[None, :]
    # A mask that is even in each vector lets it be loaded at once; the row is made of whole vectors.
    whole = (limit + VECTOR - 1) // VECTOR * VECTOR
    x = tl.load(scores + line + column, mask=column < whole - line).to(tl.float32)
    x = tl.where(x > -INF, x, -INF) + 0.0  # NaN becomes -inf, and -0.0 0.0
    x = tl.where(column < limit - line, x, -INF)
    # In this form the first axis lies within a thread.
    bound, count, larger = _search(tl.reshape(x, [COLUMNS // (LINE * WARPS), LINE * WARPS]), LEAST, MOST)
    if count > MOST:
        # Of the elements that equal the bound take the first: those of whole lines, then some of one.
        take = MOST - larger
        ends = tl.cumsum(tl.sum((x == bound).to(tl.int32), 1), 0)
        last = tl.sum((ends <= take).to(tl.int32)) * LINE
        take -= tl.max(tl.where(ends <= take, ends, 0))
        place = last + tl.arange(0, LINE)
        ends = tl.cumsum((tl.load(scores + place, mask=place < limit, other=-INF) == bound).to(tl.int32), 0)
        end = last + tl.sum((ends <= take).to(tl.int32))
        x = tl.where((x == bound) & (column >= end - line), -INF, x)
        count = MOST
    return x, bound, count


@triton.jit
def _write_fourth(x, bound, at, start, columns, out_scores, out_columns, FOURTH: tl.constexpr):
    chosen = x >= bound
    column = tl.arange(0, x.numel) * 4 + FOURTH
    if columns is None:
        column += start
    else:
        column = tl.load(columns + column, mask=chosen)
    tl.store(out_columns + at, column, mask=chosen)
    if out_scores is not None:
        tl.store(out_scores + at, x, mask=chosen)
    return at + chosen.to(tl.int32)


@triton.jit
def _write(x, bound, start, columns, out_scores, out_columns):
    """Writes what reaches the bound, in order of column."""
    # Four neighbours lie in one thread; from here on each of the four tensors holds one of them.
    even, odd = tl.split(tl.reshape(x, [x.numel // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    low = (x0 >= bound).to(tl.int32) + (x1 >= bound).to(tl.int32)
    ones = tl.reshape(low + (x2 >= bound).to(tl.int32) + (x3 >= bound).to(tl.int32), [x.numel // LINE, LINE // 4])
    lines = tl.sum(ones, 1)
    at = tl.reshape((tl.cumsum(lines, 0) - lines)[:, None] + tl.cumsum(ones, 1) - ones, [x.numel // 4])
    at = _write_fourth(x0, bound, at, start, columns, out_scores, out_columns, 0)
    at = _write_fourth(x1, bound, at, start, columns, out_scores, out_columns, 1)
    at = _write_fourth(x2, bound, at, start, columns, out_scores, out_columns, 2)
    _write_fourth(x3, bound, at, start, columns, out_scores, out_columns, 3)


@triton.jit
def _fill(out, count, WIDTH: tl.constexpr, value):
    """Writes ``value`` behind the first ``count`` of ``WIDTH``."""
    fours: tl.constexpr = triton.next_power_of_2((WIDTH + 3) // 4)
    place = tl.arange(0, fours)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + place, tl.full([fours, 4], value, out.dtype.element_ty), mask=(place >= count) & (place < WIDTH))


@triton.jit
def _length(lengths, row, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    return tl.minimum(tl.maximum(tl.load(lengths + row), 0), WIDTH) if RAGGED else WIDTH


@triton.jit
def _narrow(
    scores,
    columns,
    lengths,
    out_scores,
    out_columns,
    out_lengths,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    WARPS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Of each chunk of a row at least the best ``LEAST`` and at most ``MOST``, in order of column, -inf behind them."""
    chunks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row, chunk = (program // chunks).to(tl.int64), program % chunks
    length = _length(lengths, row, WIDTH, RAGGED)
    if chunk == 0:
        tl.store(out_lengths + row, (length + COLUMNS - 1) // COLUMNS * MOST)
    start = chunk * COLUMNS
    if start < length:
        begin, place = row * WIDTH + start, (row * chunks + chunk) * MOST
        x, bound, count = _select(scores + begin, length - start, COLUMNS, VECTOR, WARPS, LEAST, MOST)
        _write(x, bound, start, None if FIRST else columns + begin, out_scores + place, out_columns + place)
        _fill(out_scores + place, count, MOST, -INF)


@triton.jit
def _choose(
    scores,
    columns,
    lengths,
    out,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    WARPS: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """The best ``K`` of a row that is one chunk, in order of column, -1 behind them."""
    row = tl.program_id(0).to(tl.int64)
    length = _length(lengths, row, WIDTH, RAGGED)
    begin, place = row * WIDTH, row * K
    x, bound, count = _select(scores + begin, length, COLUMNS, VECTOR, WARPS, K, K)
    _write(x, bound, 0, None if FIRST else columns + begin, None, out + place)
    _fill(out + place, count, K, -1)


def top_k(scores: jax.Array, lengths: jax.Array | None, *, k: int) -> jax.Array:
    """See ``jmla.kernels.top_k``."""
    if scores.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        scores = scores.astype(jnp.float32)
    rows, n = scores.shape
    most = min(k, n)
    if rows == 0 or most == 0:
        return jnp.full((rows, k), -1, jnp.int32)

    @custom_vmap
    def choose(scores: jax.Array, lengths: jax.Array | None) -> jax.Array:
        return _choose_all(scores, lengths, most)

    @choose.def_vmap
    def _(size: int, batched: Any, scores: jax.Array, lengths: jax.Array | None) -> tuple[jax.Array, bool]:
        # The new axis becomes part of the rows.
        def flat(x: jax.Array, has_axis: bool) -> jax.Array:
            return (x if has_axis else jnp.broadcast_to(x, (size, *x.shape))).reshape(
                size * rows, *x.shape[1 + has_axis :]
            )

        lengths = None if lengths is None else flat(lengths, batched[1])
        return top_k(flat(scores, batched[0]), lengths, k=most).reshape(size, rows, most), True

    select = functools.partial(_choose_all, k=most) if keeping() else choose
    chosen = select(jax.lax.stop_gradient(scores), lengths)  # columns have no derivative
    return jnp.pad(chosen, ((0, 0), (0, k - most)), constant_values=-1)


def _choose_all(scores: jax.Array, lengths: jax.Array | None, k: int) -> jax.Array:
    rows = scores.shape[0]
    columns: jax.Array | None = None
    while (n := scores.shape[1]) > CHUNK:
        chunks = -(-n // CHUNK)
        most = -(-int(k * (1 + SLACK)) // 8) * 8  # whole vectors for the next pass
        most = min(most, CHUNK // 2)  # every pass at least halves the row
        kept = [jax.ShapeDtypeStruct((rows, chunks * most), dtype) for dtype in (jnp.float32, jnp.int32)]
        scores, columns, lengths = _launch(
            _narrow,
            (scores, columns, lengths),
            CHUNK,
            out=(*kept, jax.ShapeDtypeStruct((rows,), jnp.int32)),
            grid=(rows * chunks,),
            LEAST=k,
            MOST=most,
        )
    chunk = max(triton.next_power_of_2(n), LINE.value)
    out = jax.ShapeDtypeStruct((rows, k), jnp.int32)
    return _launch(_choose, (scores, columns, lengths), chunk, out=out, grid=(rows,), K=k)


def _launch(kernel: Any, operands: tuple[jax.Array, Any, Any], chunk: int, **how: Any) -> Any:
    scores, columns, lengths = operands
    warps = min(max(chunk // (32 * (FEW_SCORES if chunk <= FEW_COLUMNS else SCORES)), 1), 32)
    return launch(
        kernel,
        scores,
        scores if columns is None else columns,
        scores if lengths is None else lengths,
        num_warps=warps,
        # Twice the registers that hold the scores: so as many programs run as can hold theirs.
        options={"maxnreg": max(2 * chunk // (32 * warps), 64)},
        WIDTH=scores.shape[1],
        COLUMNS=chunk,
        VECTOR=math.gcd(scores.shape[1], 8),
        WARPS=warps,
        FIRST=columns is None,
        RAGGED=lengths is not None,
        **how,
    )

"""Index scores in Triton: key tiles meet the heads of a few rows in one product, and are summed in registers.

Keys lie along the first axis of a product and (row, head) pairs along the second, so that a thread holds many heads of
a key: the rectified, weighted sum over heads is additions in a thread and two exchanges between four threads. A program
takes a block of rows of one request, whose queries stay in shared memory, and every ``parts``-th key tile, so that any
length is spread evenly over the programs of the block. The same code serves decode, with few rows and as many programs
as fill the device, and prefill, with wide blocks and long loops. Queries of quantised keys are rotated and quantised on
the way in while the first keys are on theirs, or by a kernel of their own where blocks are wide.

The bits of a score never depend on the rows beside it. On compute capability 9.0 they do not depend on how the work was
cut either: blocks of any width take the dot product of a head from the same matrix instructions, add up heads in the
same order of registers and threads, and quantise queries by the same product. Elsewhere the order may change with the
number of rows of a request, which sets the width of blocks.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .. import launch as launcher
from ..fallback import with_xla_rules
from ..launch import launch
from ..layouts import KVLayout, is_raw
from . import xla

TILE = 64  # keys; twice as many on sm_90 where blocks are DOUBLED (row, head) pairs wide and keys are many
DOUBLED, MANY = 128, 16  # MANY tiles in a row of the table, and for each program
WIDEST = 256  # (row, head) pairs of a block
FUSED = 128  # widest blocks that quantise their own queries
QUANTISED = 64  # (row, head) pairs, the fewest that are rotated in one product
PROGRAMS = 264  # two for each of an H200's processors: each program has queries to prepare first
LONGEST = {64: 32, 128: 32, 256: 128}  # block width -> most tiles of a program
LONGEST_DOUBLED, AHEAD_DOUBLED = 256, 2  # the same two for tiles of twice the keys
EARLY = 2  # most tiles that are fetched before the queries are ready
AHEAD = {64: 3, 128: 3, 256: 2}  # block width -> key tiles that the loop over tiles fetches ahead
REGISTERS = {
    64: 96,
    128: 168,
    256: None,
}  # block width -> of a thread, at most: five, three and two programs a processor

NAN = tl.constexpr(tl.PropagateNan.ALL)
ROOT = tl.constexpr(128**-0.5)
MIN_AMAX = tl.constexpr(xla.MIN_AMAX)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for.

    Attributes:
        heads: Hi.
        slots: heads of a row in a product; those past ``heads`` are zeros.
        rows: of a block.
        missing: rows that the last block of a request lacks.
        width: values of a key.
        span: of a key in a product; those past ``width`` are zeros.
        dtype: of the keys' values.
        scaled: whether keys are codes with scales, which meet quantised queries.
        fused: whether queries are quantised here.
        page_size: keys of a page.
        stride: values from page to page.
        scale_stride: scales from page to page.
        scale_start: first scale of a page.
        pages: of the pool.
        table: pages of a request; 0: column n is slot n.
        columns: of the scores.
        starts: whether rows have a first column.
        tile: keys of a product.
        tiles: of a program, at most.
        early: tiles of a program that are fetched before the queries are ready.
        ahead: tiles that the loop over the other tiles fetches ahead.
    """

    heads: int
    slots: int
    rows: int
    missing: int
    width: int
    span: int
    dtype: Any
    scaled: bool
    fused: bool
    page_size: int
    stride: int
    scale_stride: int
    scale_start: int
    pages: int
    table: int
    columns: int
    starts: bool
    tile: int
    tiles: int
    early: int
    ahead: int

    @property
    def pairs(self) -> int:
        return self.rows * self.slots

    @property
    def stages(self) -> int:
        """Of the loop over tiles: fetching their keys, behind looking up their pages."""
        return self.ahead * (2 if self.table else 1) + 1

    @property
    def chunk(self) -> int:
        return min(self.tile * self.tiles, 1024)


@triton.jit
def _rotated_codes(parts, PAIRS: tl.constexpr):
    """e4m3 codes ``[PAIRS, 128]`` of rotated rows, and their scales.

    Row ``p * PAIRS + n`` of ``parts [4 * PAIRS, 32]``, bf16, is the p-th quarter of row n. Quarters are rotated by a
    product with the signs that all of them share, and then across.
    """
    value = tl.arange(0, 32)
    common = value[:, None] & value[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    parts = tl.dot(parts, (1.0 - 2.0 * (common & 1)).to(tl.bfloat16))
    even, odd = tl.split(tl.permute(tl.reshape(parts, [2, 2, PAIRS, 32]), (2, 3, 0, 1)))
    even, odd = even + odd, even - odd
    a, c = tl.split(even)
    b, d = tl.split(odd)
    a, b, c, d = a + c, b + d, a - c, b - d
    top = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    amax = tl.maximum(tl.max(top, 1) * ROOT, MIN_AMAX, propagate_nan=NAN)
    scale = tl.div_rn(amax, tl.full([PAIRS], 448.0, tl.float32))
    inverse = tl.div_rn(tl.full([PAIRS], ROOT, tl.float32), scale)[:, None]
    left = tl.join((a * inverse).to(tl.float8e4nv), (b * inverse).to(tl.float8e4nv))
    right = tl.join((c * inverse).to(tl.float8e4nv), (d * inverse).to(tl.float8e4nv))
    return tl.reshape(tl.permute(tl.join(left, right), (0, 3, 2, 1)), [PAIRS, 128]), scale


@triton.jit
def _quantise_queries(q, weights, codes, folded, pairs: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0) * TILE
    pair = first + tl.arange(0, 4 * TILE) % TILE
    at = pair.to(tl.int64) * 128 + tl.arange(0, 4 * TILE) // TILE * 32
    parts = tl.load(q + at[:, None] + tl.arange(0, 32)[None, :], mask=(pair < pairs)[:, None], other=0.0)
    values, scale = _rotated_codes(parts, TILE)
    pair = first + tl.arange(0, TILE)
    at = pair.to(tl.int64) * 128
    tl.store(codes + at[:, None] + tl.arange(0, 128)[None, :], values, mask=(pair < pairs)[:, None])
    tl.store(folded + pair, tl.load(weights + pair, mask=pair < pairs, other=0.0).to(tl.float32) * scale, pair < pairs)


@triton.jit
def _page(ordinal, table, request, P: tl.constexpr):
    """The pages that hold pages ``ordinal`` of a request; -1 where there is none."""
    page = ordinal if P.table == 0 else tl.load(table + request * P.table + ordinal, mask=ordinal < P.table, other=-1)
    return tl.where(page < P.pages, page, -1)


@triton.jit
def _fetch(tile, last, pool, table, request, P: tl.constexpr):
    """Keys of a tile, their scales, and which exist; nothing from tile ``last`` on."""
    key = tl.arange(0, P.tile)
    value = tl.arange(0, P.span)[None, :]
    column = tile * P.tile
    if P.page_size % P.tile != 0 and P.tile != 2 * P.page_size:
        column += key
    ordinal = column // P.page_size
    page = _page(ordinal, table, request, P)
    if P.tile == 2 * P.page_size:
        page = tl.where(key < P.page_size, page, _page(ordinal + 1, table, request, P))
        column += key
    pages = page + tl.zeros_like(key)
    exists = (pages >= 0) & (column + tl.zeros_like(key) < tl.minimum(last * P.tile, P.columns))
    page = tl.maximum(page, 0).to(tl.int64)
    values = pool.to(tl.pointer_type(P.dtype)) + page * P.stride
    if P.page_size % P.tile == 0:
        offset = column % P.page_size + key
        values = values + offset[:, None] * P.width + value
    else:
        offset = column % P.page_size
        values = values[:, None] + offset[:, None] * P.width + value
    keys = tl.load(values, mask=exists[:, None] & (value < P.width), other=0.0)
    if P.scaled:
        scales = pool.to(tl.pointer_type(tl.float32)) + page * P.scale_stride + P.scale_start + offset
        return keys, tl.load(scales, mask=exists, other=0.0), exists
    else:
        return keys, tl.full([P.tile], 1.0, tl.float32), exists


@triton.jit
def _score(keys, scales, exists, tile, queries, weights, blank, first, last, live, out, P: tl.constexpr):
    """Scores of a tile, stored."""
    if P.dtype != queries.dtype:
        keys = keys.to(queries.dtype)
    dots = tl.dot(keys, queries)
    positive = tl.maximum(dots, 0.0, propagate_nan=NAN)
    scores = tl.sum(tl.reshape(positive, [P.tile, P.rows, P.slots]) * weights[None, :, :], axis=2)
    if P.scaled:  # codes under a zero scale are not trusted
        scores = tl.where(scales[:, None] == 0, blank[None, :], scores * scales[:, None])
    column = tile * P.tile + tl.arange(0, P.tile)
    counted = exists[:, None] & (column[:, None] < last[None, :])
    if P.starts:
        counted = counted & (column[:, None] >= first[None, :])
    mask = live[None, :] & (column < P.columns)[:, None]
    tl.store(out + column[:, None], tl.where(counted, scores, float("-inf")), mask=mask)


@triton.jit
def _index_scores(q, weights, pool, start, end, table, out, P: tl.constexpr):
    part, parts = tl.program_id(0), tl.num_programs(0)
    block = tl.program_id(1)
    request = tl.program_id(2)
    steps = tl.num_programs(1) * P.rows - P.missing
    row = tl.arange(0, P.rows)
    live = block * P.rows + row < steps
    first_row = (request * steps + block * P.rows).to(tl.int64)

    QUARTERS: tl.constexpr = 4 if P.fused else 1
    part_of = tl.arange(0, QUARTERS * P.pairs) // P.pairs
    pair = tl.arange(0, QUARTERS * P.pairs) % P.pairs
    head = pair % P.slots
    wanted = (block * P.rows + pair // P.slots < steps) & (head < P.heads)
    at = first_row * (P.heads * P.width) + (pair // P.slots * P.heads + head) * P.width + part_of * (P.span // QUARTERS)
    value = tl.arange(0, P.span // QUARTERS)[None, :]
    queries = tl.load(q + at[:, None] + value, mask=wanted[:, None] & (value < P.width), other=0.0)
    slot = tl.arange(0, P.slots)
    weight = tl.load(
        weights + first_row * P.heads + row[:, None] * P.heads + slot[None, :],
        mask=live[:, None] & (slot < P.heads)[None, :],
        other=0.0,
    ).to(tl.float32)

    last = tl.load(end + first_row + row, mask=live, other=0)
    last = tl.minimum(tl.maximum(last, 0), P.columns)
    if P.starts:
        first = tl.maximum(tl.load(start + first_row + row, mask=live, other=0), 0)
        first_tile = tl.min(tl.where(first < last, first, P.columns)) // P.tile
        last_tile = tl.cdiv(tl.max(tl.where(first < last, last, 0)), P.tile)
    else:
        first = tl.zeros_like(last)
        first_tile = 0
        last_tile = tl.cdiv(tl.max(last), P.tile)
    mine = first_tile + part

    EARLY: tl.constexpr = P.early
    early = ()
    for i in tl.static_range(EARLY):
        early += (_fetch(mine + i * parts, last_tile, pool, table, request, P),)  # type: ignore[assignment]

    if P.fused:
        queries, scale = _rotated_codes(queries, P.pairs)
        weight = weight * tl.reshape(scale, [P.rows, P.slots])
    queries = tl.trans(queries)
    blank = tl.sum(weight * 0.0, axis=1)  # what keys of zeros score: NaN where a query is not finite
    out += first_row * P.columns + row.to(tl.int64)[None, :] * P.columns

    for i in tl.static_range(EARLY):
        keys, scales, exists = early[i]  # type: ignore[var-annotated]
        _score(keys, scales, exists, mine + i * parts, queries, weight, blank, first, last, live, out, P)
    if P.tiles > P.early:
        for tile in tl.range(mine + P.early * parts, last_tile, parts, num_stages=P.stages):
            keys, scales, exists = _fetch(tile, last_tile, pool, table, request, P)
            _score(keys, scales, exists, tile, queries, weight, blank, first, last, live, out, P)

    # Columns outside of all tiles, in one piece for each program.
    begin = part * P.tile * P.tiles
    if (begin < first_tile * P.tile) | (begin + P.tile * P.tiles > last_tile * P.tile):
        for piece in range(P.tile * P.tiles // P.chunk):
            column = begin + piece * P.chunk + tl.arange(0, P.chunk)
            outside = (column < P.columns) & ((column < first_tile * P.tile) | (column >= last_tile * P.tile))
            nothing = tl.full([P.chunk, P.rows], float("-inf"), tl.float32)
            tl.store(out + column[:, None], nothing, mask=outside[:, None] & live[None, :])


def quantise_queries(q: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotated e4m3 codes of bf16 queries ``[R, Hi, 128]``, and weights that hold their scales."""
    pairs = q.shape[0] * q.shape[1]
    out = [jax.ShapeDtypeStruct(q.shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(weights.shape, jnp.float32)]
    grid = (-(-pairs // QUANTISED),)
    return launch(_quantise_queries, q, weights, out=out, grid=grid, pairs=pairs, TILE=QUANTISED)


def plan(
    q: jax.Array, pool: jax.Array, start: jax.Array | None, table: jax.Array | None, layout: KVLayout, **choices: Any
) -> tuple[Plan, tuple[int, int, int]]:
    """What a call is compiled for, and the grid: shares of key tiles, blocks of rows, requests.

    Args:
        q: as ``index_scores`` takes it.
        pool: likewise.
        start: likewise.
        table: likewise.
        layout: likewise.
        choices: attributes of the plan in place of those chosen here.
    """
    total, heads, width = q.shape
    requests = 1 if table is None else table.shape[0]
    table_width = 0 if table is None else table.shape[1]
    columns = (pool.shape[0] if table is None else table_width) * layout.page_size
    steps = total // requests
    slots = max(16, triton.next_power_of_2(heads))
    size = jnp.dtype(layout.value_dtype).itemsize
    rows = choices.get("rows", min(triton.next_power_of_2(steps), WIDEST // size // slots))
    rows = max(rows, QUANTISED // slots, 1)
    blocks = -(-steps // rows)
    fits = size == 1 and 2 * TILE in (2 * layout.page_size, math.gcd(2 * TILE, layout.page_size))
    many = columns >= MANY * TILE and requests * blocks * columns >= MANY * PROGRAMS * TILE
    # Elsewhere the two tiles lay heads out in different ways, and bits would depend on the rows beside a row.
    doubled = rows * slots == DOUBLED and fits and many and 90 <= launcher.capability() < 100
    tile = choices.get("tile", 2 * TILE if doubled else TILE)
    tiles = -(-columns // tile)
    share = max(1, -(-requests * blocks * tiles // PROGRAMS))
    share = min(triton.next_power_of_2(share), LONGEST_DOUBLED if tile > TILE else LONGEST[rows * slots])
    if layout.page_size % TILE:  # addresses of each key, which spill from the loop
        share = min(share, EARLY)
    dtype = tl.dtype(_VALUES[layout.value_dtype])
    chosen: dict[str, Any] = {
        "fused": _rotates(q, layout) and rows * slots <= FUSED,
        "tiles": share,
        "early": share if share <= EARLY and rows * slots <= FUSED else 0,
        "ahead": AHEAD[rows * slots] if size == 1 else 2 if rows * slots <= FUSED else 1,
    }
    if tile > TILE:
        chosen["ahead"] = AHEAD_DOUBLED
    chosen |= choices | {"rows": rows, "tile": tile}
    made = Plan(
        heads=heads,
        slots=slots,
        missing=blocks * rows - steps,
        width=width,
        span=max(32, triton.next_power_of_2(width)),
        dtype=dtype,
        scaled=layout.kind == "index",
        page_size=layout.page_size,
        stride=layout.page_stride // size if is_raw(pool) else pool.shape[1],
        scale_stride=layout.page_stride // 4,
        scale_start=layout.footer_offset // 4,
        pages=pool.shape[0],
        table=table_width,
        columns=columns,
        starts=start is not None,
        **chosen,
    )
    return made, (-(-tiles // made.tiles), blocks, requests)


_VALUES = {"float8_e4m3fn": "fp8e4nv", "bfloat16": "bf16"}


def _rotates(q: jax.Array, layout: KVLayout) -> bool:
    """Whether the kernels here can quantise the queries."""
    return layout.kind == "index" and layout.hadamard and layout.width == 128 and q.dtype == jnp.bfloat16


def scores(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    start: jax.Array | None,
    end: jax.Array,
    table: jax.Array | None,
    *,
    layout: KVLayout,
    registers: int | None = None,
    **choices: Any,
) -> jax.Array:
    """``index_scores`` without derivatives, with ``choices`` of the plan and at most so many registers of a thread.

    Queries of e4m3 are taken as ``quantise_queries`` gives them, beside weights that hold their scales.
    """
    made, grid = plan(q, pool, start, table, layout, **choices)
    out = jax.ShapeDtypeStruct((q.shape[0], made.columns), jnp.float32)
    if 0 in (q.shape[0], made.columns, made.pages):
        return jnp.full(out.shape, -jnp.inf, out.dtype)
    if made.scaled and not made.fused and q.dtype != jnp.float8_e4m3fn:
        q, weights = quantise_queries(q, weights) if _rotates(q, layout) else xla.quantise_query(q, weights, layout)
    operands = q, weights, pool, end if start is None else start, end, end if table is None else table
    if registers is None and not made.early and made.page_size % TILE == 0 and made.tile == TILE:
        registers = REGISTERS[made.pairs]
    options = {"maxnreg": registers} if registers else None
    return launch(
        _index_scores, *operands, out=out, grid=grid, num_stages=made.stages, options=options, pools=(2,), P=made
    )


index_scores = with_xla_rules(scores, xla.index_scores)

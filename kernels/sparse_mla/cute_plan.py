"""What the CuTe DSL kernel is compiled for, how it shares out the work, and what it leaves to others.

Needs no CuTe DSL.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..layouts import MAX_SLOTS, KVLayout

BLOCK = 64  # slots of a step
HEADS = 64  # of a CTA
FOUR = 4  # heads that are merged together
KNOWN = 16  # bytes that are sent of a head: what logits were taken from, the mass, and what undoes both lifts
DEPTH = 2  # blocks whose slots and scales are kept
SMS = 132
SHARED_BYTES = 232448  # of a CTA, at most
MOST_SPLITS = 10  # CTAs of a cluster that share a row; up to 16 can be asked for
MOST_GROUPS = 32
MOST_TILES = 65535  # of a grid's second axis
FIXED_BLOCKS = 8  # of a share of a deterministic row, which the number of rows must not change
# Clusters of so many CTAs that an H200 holds at a time, by cuOccupancyMaxActiveClusters; where GPUs of the kind may
# differ, since other SMs are switched off, a little less.
RESIDENT = {1: 132, 2: 64, 3: 39, 4: 28, 5: 21, 6: 17, 7: 14, 8: 14, 9: 9, 10: 7}


@dataclasses.dataclass(frozen=True)
class Form:
    """One pool and its index rows.

    Attributes:
        columns: of an index row.
        capacity: slots of the pool.
        page_size: rows of a page.
        page_stride: bytes of a page.
        footer: byte of a page where the scales start, or 0.
        lengths: whether rows have lengths.
    """

    columns: int
    capacity: int
    page_size: int
    page_stride: int
    footer: int
    lengths: bool


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the rows of all pools are.

    Attributes:
        kind: "footer": 448 codes and 64 more values, UE8M0 scales elsewhere; "inline": 512 codes, 4 float32 scales, 64
            more values; "plain": bf16 values.
        width: values of a row, 512 or 576.
        powers: whether scales are powers of two.
    """

    kind: str
    width: int
    powers: bool

    @property
    def codes(self) -> int:
        """Chunks of 64 bytes that are codes; others hold bf16 values."""
        return {"footer": 7, "inline": 8, "plain": 0}[self.kind]

    @property
    def chunks(self) -> int:
        """Chunks of 64 bytes, without scales."""
        return self.width // 32 if self.kind == "plain" else self.codes + 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with scales that stand in it."""
        return 64 * self.chunks + (16 if self.kind == "inline" else 0)

    @property
    def scale_bytes(self) -> int:
        return {"footer": 8, "inline": 16, "plain": 0}[self.kind]


@dataclasses.dataclass(frozen=True)
class Ending:
    """What ``Epilogue`` says of a call.

    Attributes:
        groups: of heads.
        block: values under one scale.
        powers: whether scales are powers of two.
        rope: values that are rotated back.
    """

    groups: int
    block: int
    powers: bool
    rope: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change no result.

    Attributes:
        stages: halves of blocks in the ring of dequantised keys, 3 or 4.
        units: in the ring of raw rows, see ``Profile.unit``.
        registers: of the threads of the first and second consumer, and of the producers; None for what they need.
    """

    stages: int = 4
    units: int = 2
    registers: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Profile:
    """All that the kernel is compiled for.

    Attributes:
        rows: R.
        heads: H.
        data: the form of cached rows.
        sources: one or two.
        scale: of the logits.
        sinks: whether there are sinks.
        q_codes: whether queries are e4m3.
        q_scale: whether logits have a factor for each row and head.
        out_scale: whether the output has a factor.
        ending: what follows, or None.
        splits: CTAs of a cluster, which share the blocks of a row.
        split_blocks: blocks of a share; 0 for an even share of what the row has.
        groups: clusters that share the blocks of a row, whose results a second kernel merges.
        value_parts: clusters that share the values of a row, 1, 2 or 4; with several groups 1 or 2.
        teams: CTAs that take all tiles in turn; with splits clusters, one for each tile.
        tuning: the rest.
    """

    rows: int
    heads: int
    data: Rows
    sources: tuple[Form, ...]
    scale: float
    sinks: bool
    q_codes: bool
    q_scale: bool
    out_scale: bool
    ending: Ending | None
    splits: int
    split_blocks: int
    groups: int
    value_parts: int
    teams: int
    tuning: Tuning

    @property
    def head_blocks(self) -> int:
        return -(-self.heads // HEADS)

    @property
    def tiles(self) -> int:
        """Rows, times blocks of heads, times groups, times parts of the values."""
        return self.rows * self.head_blocks * self.groups * self.value_parts

    @property
    def partial(self) -> bool:
        """Whether a second kernel completes the output, from lifted float16 values that have their own denominators."""
        return self.groups > 1 or (self.ending is not None and not self.fused)

    @property
    def marks(self) -> int:
        """Words of a head for the second kernel: its logarithm of the mass, and what undoes the lifts of its values."""
        return 1 + 512 // self.values

    @property
    def finish_threads(self) -> int:
        """Threads of the second kernel for a head: half as many, and instructions, where there are many whole heads."""
        return 64 if self.rows * self.heads >= 6 * SMS and self.value_parts == 1 else 128

    @property
    def finish_heads(self) -> int:
        """Heads of a CTA of the second kernel."""
        return 2 if self.rows * self.heads >= 3 * SMS and self.heads % 2 == 0 else 1

    @property
    def finish_values(self) -> int:
        """Values of a thread of the second kernel."""
        return 512 // self.finish_threads

    @property
    def finish_bytes(self) -> int:
        """Shared memory that a CTA of the second kernel asks for, of which it uses none.

        So that CTAs that start while the first kernel still runs do not crowd the SMs that it leaves idle: no more of
        them fit into an SM, which has 228 KiB and takes one for each, than there are for each SM.
        """
        ctas = -(-self.rows * self.heads // (self.finish_heads * SMS))
        return max(0, (228 // ctas - 1) * 1024)

    @property
    def fused(self) -> bool:
        """Whether the CTAs that complete a row make codes of it."""
        return self.ending is not None and fuses(self.ending, self.data, self.splits, self.value_parts, self.groups)

    @property
    def shares(self) -> int:
        """CTAs that share the blocks of a row."""
        return self.splits * self.groups

    @property
    def registers(self) -> tuple[int, int, int]:
        return self.tuning.registers or ((224, 176, 56) if self.value_parts == 1 else (184, 152, 88))

    @property
    def asks(self) -> bool:
        """Whether queries come by one bulk copy: sooner than by loads, but CTAs of whole rows were slower with it."""
        return self.shares > 1

    @property
    def behind(self) -> bool:
        """Whether the first consumer starts on the next block before its sums of values are complete.

        Where the ring has room for all of the next block; with three halves it was slower.
        """
        return self.tuning.stages > 3

    @property
    def plainly_scaled(self) -> bool:
        """Whether the logits of a head have one positive factor."""
        return self.scale > 0 and not self.q_scale

    # Producers: 256 threads, of which four own a row of a block. Each has a piece of 16 bytes of each chunk of the row.

    @property
    def unit(self) -> int:
        """Pieces of a unit of copies."""
        return 3 if self.data.kind == "footer" else 2

    @property
    def units(self) -> int:
        """Units of a block."""
        return self.data.chunks // self.unit

    @property
    def left(self) -> int:
        """Pieces of the left half of a block."""
        return 8 if self.data.kind == "plain" else 4

    @property
    def order(self) -> tuple[int, ...]:
        """Pieces in the order of their copies: those that need no room in the ring of keys behind the left half."""
        left, apart = self.left, 2 if self.data.width > 512 else 0
        count = self.data.chunks
        return (*range(left), *range(count - apart, count), *range(left, count - apart))

    # Outputs: a consumer accumulates half of a part of the values, in pieces of 8.

    @property
    def values(self) -> int:
        return 256 // self.value_parts

    @property
    def pieces(self) -> int:
        return self.values // 8

    @property
    def fours(self) -> int:
        """Groups of four heads of a CTA, without those that do not exist; CTAs of a cluster merge some each."""
        return -(-min(self.heads, HEADS) // FOUR)

    @property
    def most(self) -> int:
        """Groups of four heads that a CTA merges, at most."""
        return -(-self.fours // self.splits)

    def owned(self, share: int) -> tuple[int, int]:
        """The first group of four heads, and how many, that the CTA of a share merges."""
        return self.first_of(share), self.first_of(share + 1) - self.first_of(share)

    def first_of(self, share: Any) -> Any:
        """The first group of four heads of a share, which may be a number of the kernel's."""
        return (share * self.fours + (self.splits - 1)) // self.splits

    @property
    def part_bytes(self) -> int:
        """The values that a consumer sends of four heads."""
        return FOUR * self.values * 2

    @property
    def four_bytes(self) -> int:
        """All that a CTA sends of four heads."""
        return 2 * self.part_bytes + FOUR * KNOWN


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where everything is in shared memory: byte offsets.

    Parts that CTAs of the cluster merge, and what is known of their heads, lie over queries and what the producers
    need, which is free once the last logits are there.
    """

    keys: int
    rope: int
    weights: int
    queries: int
    raw: int
    scales: int
    slots: int
    bias: int
    holes: int
    decays: int
    full: int
    empty: int
    asked: int
    ready: int
    merged: int
    size: int

    @classmethod
    def of(cls, profile: Profile) -> "Memory":
        tuning = profile.tuning
        sizes = {
            "keys": tuning.stages * 64 * 256 * 2,
            "rope": 2 * 64 * 64 * 2 if profile.data.width > 512 else 0,
            "weights": 64 * 64 * 2,
            "queries": 64 * profile.data.width * 2,
            "raw": tuning.units * profile.unit * 4096,
            "scales": DEPTH * 64 * profile.data.scale_bytes,
            "slots": DEPTH * 64 * 4,
            "bias": 4 * 64 * 4,
            "holes": 4 * 8,
            "decays": 64 * 4,
            "full": tuning.stages * 8,
            "empty": tuning.stages * 8,
            "asked": 8,
            "ready": 8,
            "merged": 8,
        }
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name] = at
            at += size
        if at > SHARED_BYTES:
            raise ValueError(f"Expected the plan to fit in {SHARED_BYTES} bytes of shared memory, got {at}: {tuning}")
        if not 0 < tuning.units <= profile.units or tuning.stages not in (3, 4):
            raise ValueError(f"Expected 3 or 4 stages, and at most {profile.units} units: {tuning}")
        if profile.groups > 1 and (profile.groups > MOST_GROUPS or profile.values < 128):
            raise ValueError(f"Expected up to {MOST_GROUPS} groups of at most 2 parts of the values: {profile}")
        parts = profile.most * profile.splits * profile.four_bytes
        if profile.splits > 1 and parts > starts["bias"] - starts["queries"]:
            raise ValueError(f"Expected {profile.splits=} parts to fit over the queries, got {parts} bytes")
        return cls(**starts, size=at)


def fuses(ending: Ending, data: Rows, splits: int, value_parts: int, groups: int) -> bool:
    """Whether codes can be made without a second kernel: the rotated values must be in order as they are."""
    in_order = data.kind == "footer" and ending.rope <= 64 and ending.rope % 8 == 0
    return in_order and groups == 1 and (splits > 1 or value_parts == 1)


@functools.cache
def schedule(rows: int, head_blocks: int, blocks: int, data: Rows, ending: Ending | None) -> tuple[int, int, int]:
    """``(splits, value_parts, groups)`` for rows and blocks of heads, each of so many blocks of slots.

    Those that take the least time by a model that was fitted to 33 measurements on an H200: it meets them within 9 %
    (1.7 % in the mean).
    """
    wide = data.width > 512

    def microseconds(choice: tuple[int, int, int]) -> float:
        splits, parts, groups = choice
        tiles = rows * head_blocks * parts * groups
        waves = -(-tiles // RESIDENT[splits])
        busy = min(tiles * splits / SMS, 1.0)
        each = -(-blocks // (splits * groups))
        output = 4.32 / parts if groups == 1 else 0.7 + 3.6 / parts
        tile = 0.57 + 1.6 * busy + output + (2.22 if wide else 1.94) * each
        merge = (2.45 if parts == 1 else 1.8) + 0.15 * splits if splits > 1 else 0
        apart = groups > 1 or (ending is not None and not fuses(ending, data, splits, parts, groups))
        finish = (2.5 if wide else 1.7) + 0.025 * rows * head_blocks if apart else 0
        return waves * tile + merge + finish

    choices = [
        (splits, parts, groups)
        for groups in range(1, MOST_GROUPS + 1)
        for splits in range(1, MOST_SPLITS + 1)
        for parts in ((1, 2, 4) if groups == 1 else (1, 2) if splits == 1 else (1,))
        if splits * groups <= max(blocks, 1)
    ]
    return min(choices, key=microseconds)


def profile(
    layouts: Sequence[KVLayout],
    pages: Sequence[int],
    columns: Sequence[int],
    lengths: Sequence[bool],
    rows: int,
    heads: int,
    *,
    scale: float,
    sinks: bool,
    q_codes: bool,
    q_scale: bool,
    out_scale: bool,
    ending: Ending | None = None,
    deterministic: bool | None,
    tuning: Tuning | None = None,
    shares: tuple[int, ...] | None = None,
) -> Profile:
    """The profile of a call; ``shares`` sets splits, parts of the values and groups, to try others."""
    sources = tuple(
        Form(
            columns=width,
            capacity=min(count * layout.page_size, MAX_SLOTS),
            page_size=layout.page_size,
            page_stride=layout.page_stride,
            footer=layout.footer_offset if layout.has_footer else 0,
            lengths=bounded,
        )
        for layout, count, width, bounded in zip(layouts, pages, columns, lengths, strict=True)
    )
    blocks = sum(-(-source.columns // BLOCK) for source in sources)
    head_blocks = -(-heads // HEADS)
    powers = all(layout.scale_form == "power_of_two" for layout in layouts)
    data = Rows(layouts[0].kind, layouts[0].width, powers)
    split_blocks = 0
    groups = 1
    if shares is not None:
        splits, parts, *more = shares
        groups = more[0] if more else 1
    elif deterministic:  # depends on the width of index rows alone
        split_blocks = max(FIXED_BLOCKS, -(-blocks // 8))
        splits, parts = max(1, -(-blocks // split_blocks)), 1
    else:
        splits, parts, groups = schedule(rows, head_blocks, blocks, data, ending)
    tiles = rows * head_blocks * parts * groups
    teams = math.ceil(tiles / math.ceil(tiles / SMS)) if splits == 1 and tiles else tiles
    return Profile(
        rows=rows,
        heads=heads,
        data=data,
        sources=sources,
        scale=scale,
        sinks=sinks,
        q_codes=q_codes,
        q_scale=q_scale,
        out_scale=out_scale,
        ending=ending,
        splits=splits,
        split_blocks=split_blocks,
        groups=groups,
        value_parts=parts,
        teams=teams,
        tuning=tuning or tuned(data),
    )


def tuned(data: Rows) -> Tuning:
    """The choices for rows of a form."""
    return Tuning(stages=4 if data.width == 512 else 3, units=2 if data.kind == "footer" else 3)


def refuses(shapes: Mapping[str, Any]) -> str | None:
    """Why the kernel cannot serve, or None; see ``launch.register``."""
    layouts = shapes["_layouts"]
    for layout in layouts:
        form = (layout.kind, layout.nope, layout.rope, layout.tile)
        plain = layout.kind == "plain" and layout.value_dtype == "bfloat16" and layout.width in (512, 576)
        if not plain and form not in (("footer", 448, 64, 64), ("inline", 512, 64, 128)):
            served = "footer rows of 448 + 64 values, inline rows of 512 + 64, and bfloat16 rows of 512 or 576"
            return f"serves {served}; the layout is {layout.name} of {layout.nope} + {layout.rope}"
        if (layout.kind, layout.width) != (layouts[0].kind, layouts[0].width):
            return "two pools must hold rows of one form"
        if layout.page_stride % 16:
            return f"rows must lie at multiples of 16 bytes, the page stride is {layout.page_stride}"
    tiles = shapes["R"] * -(-shapes["H"] // HEADS)
    if tiles > MOST_TILES and (shapes["_deterministic"] or shapes["epilogue"]):
        return f"serves {MOST_TILES} rows times blocks of {HEADS} heads of this kind, they are {tiles}"
    if shapes["q"] not in ("bfloat16", "float8_e4m3fn"):
        return f"serves bfloat16 and e4m3 queries, they are {shapes['q']}"
    if shapes["v_dim"] != 512:
        return f"serves 512 values, they are {shapes['v_dim']}"
    return None

"""The paged cache as a value: pools, tables, lengths, and the compressors' running state."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla.kernels.layouts import KVLayout
from jmla.models.config import DsaConfig, V4Config
from jmla.models.config.common import INT32_MAX
from jmla.models.options import check_dtype, check_flag, check_integer
from jmla.models.params import layer_counts
from jmla.models.spec import LATENT_PAGE, PAGE_TOKENS, Model, ModelSpec, cache_layouts, check_model, pages_of

MOST_ROLLBACK = 64
RECORDED = ("csa", "index")  # streams whose running windows cross the ends of pages


class CacheConsumedError(RuntimeError):
    """A cache was used after a step had taken its buffers over."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The cache of a batch of sequences. A pytree: steps take one and return the next.

    A page covers 256 raw tokens in every stream. All streams but the window share ``table``; the window stream of V4
    has its own pool and table, since only its last pages stay in use.

    Attributes:
        pools: by stream ("window", "csa", "hca", "index" for V4; "latent", "index" for V3.2 and GLM), layer-major:
            uint8 ``[layers * pages, page_stride]``, or typed ``[layers * pages, page_size * width]`` for plain formats.
        states: V4's running compressor windows by stream, float32 ``[layers, B, ring, 2 * width]``.
        table: ``[B, pages of a row]`` int32 page ids, -1 for none.
        window_table: the same for the window stream (V4), else None. ``init_cache`` hands out just the pages that the
            window and one chunk need, and the table runs round them: the page of a position that has passed out of the
            window holds newer tokens, which the window's bounds keep from being read as old ones.
        lengths: ``[B]`` int32 tokens in the cache.
        draft_lengths: ``[B]`` int32 tokens that the draft block has seen.
        boundaries: states as they were at the ends of pages, by stream, float32 ``[layers, records, ring, 2 * width]``:
            where a sequence can be taken up again. Without the window's stream "hca": its windows end with pages.
        layouts: the byte layout of each stream (static).
        layers: how many layers write each stream (static).
        chunk: most tokens of a row that one pass may append, for the window's pages to suffice (static).
        max_seq_len: most tokens a row can hold (static).
        config: of the models whose cache this is (static).
    """

    pools: dict[str, jax.Array]
    states: dict[str, jax.Array]
    table: jax.Array
    window_table: jax.Array | None
    lengths: jax.Array
    draft_lengths: jax.Array
    layouts: tuple[tuple[str, KVLayout], ...] = dataclasses.field(metadata={"static": True})
    layers: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    chunk: int = dataclasses.field(metadata={"static": True})
    max_seq_len: int = dataclasses.field(metadata={"static": True})
    config: V4Config | DsaConfig = dataclasses.field(metadata={"static": True})
    boundaries: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.table.shape[0]

    def layout(self, stream: str) -> KVLayout:
        return dict(self.layouts)[stream]

    @property
    def kernel_pages(self) -> int:
        """Pages of the pools that one page of 256 tokens takes in a layer."""
        return _kernel_pages(self.config)

    def replace(self, **changes: Any) -> "PagedCache":
        """The same cache with some fields exchanged."""
        return dataclasses.replace(self, **changes)

    @property
    def drafting(self) -> bool:
        """Whether the draft block's layer has its place in the pools."""
        return dict(self.layers) != layer_counts(self.config, False)

    @property
    def rollback_room(self) -> int:
        """Tokens that ``jmla.rollback`` can take back."""
        if isinstance(self.config, V4Config):
            return self.states["hca"].shape[2] - self.config.hca_ratio
        return self.max_seq_len

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes allocated by stream and by compressor state."""
        held = {name: pool.nbytes for name, pool in self.pools.items()}
        held |= {f"{name} state": state.nbytes for name, state in self.states.items()}
        return held | {f"{name} boundaries": records.nbytes for name, records in self.boundaries.items()}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the cache to a directory, from which ``load`` takes it up in another process, bit for bit.

        The cache stays what it is. Pages without tokens take next to nothing on disk. A save that fails, or is killed,
        leaves what was there before; of several at a time to one path, one wins and the others may fail.

        Args:
            path: a directory that is empty or does not exist, on a local file system.
            overwrite: replace the saved cache in ``path``.

        Raises:
            CacheConsumedError: the cache was already consumed.
            FileExistsError: ``path`` holds a saved cache and ``overwrite`` is False, or holds something else.
            ImportError: orbax-checkpoint is not installed (the extra ``save``).
            NotADirectoryError: ``path`` is a file.
            TypeError: no path, a flag that is no bool, or a traced cache.
        """
        from jmla.models import saved  # which needs this module

        saved.save(self, path, overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Model) -> "PagedCache":
        """The cache that ``save`` wrote, on the devices of the model's weights.

        Args:
            path: the directory.
            model: one of the architecture and cache format that the cache was made for. Whether its weights are the
                same is not checked.

        Raises:
            FileNotFoundError: nothing there, or no cache whose saving has ended.
            ImportError: orbax-checkpoint is not installed (the extra ``save``).
            NotADirectoryError: ``path`` is a file.
            TypeError: no path or no model.
            ValueError: the cache is of another architecture, cache format or version of this format, is longer than
                the model's ``max_seq_len``, or does not take its chunks: the message names what differs, before
                anything is allocated. Or its files are damaged.
        """
        from jmla.models import saved

        return saved.load(path, model)


def bytes_per_token(spec: ModelSpec) -> dict[str, float]:
    """Bytes that each further token of a sequence takes in the streams that grow with it, over all layers."""
    layouts, counts = cache_layouts(spec), layer_counts(spec.config, spec.drafting)
    return {
        name: counts[name] * layout.page_stride * _kernel_pages(spec.config) / PAGE_TOKENS
        for name, layout in layouts.items()
        if name != "window"
    }


def bytes_per_row(spec: ModelSpec, rollback: int = 0) -> dict[str, int]:
    """Bytes that a sequence takes whatever its length: the live window and the compressors' running state.

    Args:
        spec: of the model.
        rollback: tokens that may be taken back, as for ``init_cache``; for drafts as many as are drafted at a time.
    """
    out: dict[str, int] = {}
    if isinstance(spec.config, V4Config):
        layout = cache_layouts(spec)["window"]
        out["window"] = layer_counts(spec.config, spec.drafting)["window"] * window_pages(spec) * layout.page_stride
        for name, shape in _state_shapes(spec, 1, rollback).items():
            out[f"{name} state"] = int(np.prod(shape)) * 4
    return out


def _kernel_pages(config: V4Config | DsaConfig) -> int:
    """Kernel pages of one 256-token page."""
    if isinstance(config, V4Config):
        return 1
    return PAGE_TOKENS // LATENT_PAGE


def window_pages(spec: ModelSpec) -> int:
    """Pages that hold the window before a chunk, and the chunk: the row's window table runs round them."""
    window = spec.config.sliding_window if isinstance(spec.config, V4Config) else 0
    return pages_of(window - 1 + spec.prefill_chunk) + 1


def first_window_page(window: int, length: int) -> int:
    """Ordinal of the first page of the window stream that tokens from ``length`` on see."""
    return max(length - (window - 1), 0) // PAGE_TOKENS


def _longest_chunk(spec: ModelSpec, window_pages: int) -> int:
    """Tokens that fit beside the window before them, wherever in a page they start."""
    window = spec.config.sliding_window if isinstance(spec.config, V4Config) else 1
    return (window_pages - 1) * PAGE_TOKENS - (window - 1)


def _state_shapes(spec: ModelSpec, batch: int, spare: int = 0) -> dict[str, tuple[int, ...]]:
    """Shapes of the compressors' states, with room for ``spare`` tokens that may be taken back."""
    config = spec.config
    if not isinstance(config, V4Config):
        return {}
    counts = layer_counts(config, spec.drafting)
    return {
        "csa": (counts["csa"], batch, 2 * config.csa_ratio + spare, 4 * config.head_dim),
        "index": (counts["csa"], batch, 2 * config.csa_ratio + spare, 4 * config.index_head_dim),
        "hca": (counts["hca"], batch, config.hca_ratio + spare, 2 * config.head_dim),
    }


def init_cache(
    model: Model,
    batch: int,
    max_seq_len: int,
    *,
    whole_window: bool = False,
    dtype: str | None = None,
    rollback: int = 0,
) -> PagedCache:
    """An empty cache for ``batch`` sequences of up to ``max_seq_len`` tokens each, all pages handed out.

    Args:
        model: the loaded model.
        batch: rows.
        max_seq_len: tokens a row can hold.
        whole_window: keep every window page (V4) instead of running round the last few.
        dtype: "bfloat16" or "float32", a plain format to use in place of the model's own; None keeps that.
        rollback: tokens that ``jmla.rollback`` may take back, 0 to 64: room that V4's compressors need.

    Raises:
        TypeError: no model, or a flag that is no bool.
        ValueError: ``batch``, ``max_seq_len``, ``dtype`` or ``rollback`` out of range, or more pages than int32 slot
            ids can address.
    """
    spec = check_model(model).spec
    batch = check_integer("batch", batch, INT32_MAX, "as slots are int32")
    max_seq_len = check_integer("max_seq_len", max_seq_len, spec.max_seq_len, "the model's max_seq_len")
    whole_window = check_flag("whole_window", whole_window)
    spare = check_integer("rollback", rollback, MOST_ROLLBACK, "tokens", low=0)
    if dtype is not None:
        spec = dataclasses.replace(spec, kv_layout=check_dtype(dtype))
    row_pages = pages_of(max_seq_len)
    live = row_pages if whole_window else min(row_pages, window_pages(spec))
    first = np.arange(batch, dtype=np.int32)[:, None]
    window_table = first * live + np.arange(row_pages, dtype=np.int32) % live
    return _cache(
        spec,
        max_seq_len,
        table=first * row_pages + np.arange(row_pages, dtype=np.int32),
        window_table=window_table if spec.is_v4 else None,
        pages=batch * row_pages,
        window_pages=batch * live,
        records=0,
        spare=spare,
        chunk=max_seq_len if live == row_pages else _longest_chunk(spec, live),
    )


def open_cache(
    model: Model,
    batch: int,
    max_seq_len: int,
    *,
    pages: int,
    window_pages: int = 0,
    records: int = 0,
    rollback: int = 0,
) -> PagedCache:
    """An empty cache whose pages are not handed out: tables hold -1 until the caller puts page ids there.

    Args:
        model: the loaded model.
        batch: rows.
        max_seq_len: tokens that a row's tables have room for.
        pages: of 256 tokens, of all rows together, in the streams that share ``table``.
        window_pages: likewise of V4's window stream.
        records: states at ends of pages that can be kept (V4).
        rollback: tokens that may be taken back.

    Raises:
        ValueError: more pages than int32 slot ids can address.
    """
    spec = model.spec
    table = np.full((batch, pages_of(max_seq_len)), -1, np.int32)
    return _cache(
        spec,
        max_seq_len,
        table=table,
        window_table=table.copy() if spec.is_v4 else None,
        pages=pages,
        window_pages=window_pages,
        records=records,
        spare=rollback,
        chunk=max_seq_len,
    )


def _cache(
    spec: ModelSpec,
    max_seq_len: int,
    *,
    table: np.ndarray,
    window_table: np.ndarray | None,
    pages: int,
    window_pages: int,
    records: int,
    spare: int,
    chunk: int,
) -> PagedCache:
    batch = len(table)
    layouts, counts = cache_layouts(spec), layer_counts(spec.config, spec.drafting)
    pools = {}
    for name, layout in layouts.items():
        rows = counts[name] * (window_pages if name == "window" else pages) * _kernel_pages(spec.config)
        check_slots(name, rows * layout.page_size, f"for {batch=}, {max_seq_len=}")
        typed = layout.kind == "plain"
        shape = (rows, layout.page_size * layout.width if typed else layout.page_stride)
        pools[name] = jnp.zeros(shape, layout.value_dtype if typed else jnp.uint8)
    boundaries = {}
    if records:
        shapes = _state_shapes(spec, records, spare)
        boundaries = {name: jnp.zeros(shapes[name], jnp.float32) for name in RECORDED if name in shapes}
    return PagedCache(
        pools=pools,
        states={name: jnp.zeros(shape, jnp.float32) for name, shape in _state_shapes(spec, batch, spare).items()},
        table=jnp.asarray(table),
        window_table=None if window_table is None else jnp.asarray(window_table),
        lengths=jnp.zeros((batch,), jnp.int32),
        draft_lengths=jnp.zeros((batch,), jnp.int32),
        layouts=tuple(layouts.items()),
        layers=tuple(counts.items()),
        chunk=chunk,
        max_seq_len=max_seq_len,
        config=spec.config,
        boundaries=boundaries,
    )


def check_slots(stream: str, slots: int, where: str) -> None:
    """Refuses a pool with more slots than int32 ids can address; ``where``: what asks for them."""
    if slots > np.iinfo(np.int32).max:
        raise ValueError(
            f"Expected the {stream} pool to have at most 2**31 - 1 slots over all layers, got {slots} {where}"
        )


def take_rows(cache: PagedCache, rows: jax.Array) -> PagedCache:
    """The cache of some of the rows, ``rows [b]``; a number past the last row gives an empty one."""
    there = rows < cache.batch
    at = jnp.minimum(rows, cache.batch - 1)

    def table(x: jax.Array) -> jax.Array:
        return jnp.where(there[:, None], x[at], -1)

    return cache.replace(
        states={name: state[:, at] for name, state in cache.states.items()},
        table=table(cache.table),
        window_table=None if cache.window_table is None else table(cache.window_table),
        lengths=jnp.where(there, cache.lengths[at], 0),
        draft_lengths=jnp.where(there, cache.draft_lengths[at], 0),
        boundaries={},
    )


def put_rows(cache: PagedCache, rows: jax.Array, part: PagedCache) -> PagedCache:
    """The cache after ``part``, made by ``take_rows``, has gone on."""
    return cache.replace(
        pools=part.pools,
        states={name: state.at[:, rows].set(part.states[name], mode="drop") for name, state in cache.states.items()},
        lengths=cache.lengths.at[rows].set(part.lengths, mode="drop"),
        draft_lengths=cache.draft_lengths.at[rows].set(part.draft_lengths, mode="drop"),
    )


def record_boundaries(cache: PagedCache, records: jax.Array, before: jax.Array) -> PagedCache:
    """Keeps the states of rows that have come to the end of a page, in ``records [B]``, -1 for those not to keep.

    ``before [B]`` are their lengths before. A row may have passed the end by as many tokens as may be taken back: its
    rings still hold what was there, and nobody reads the tokens behind it.
    """
    here = (records >= 0) & (cache.lengths // PAGE_TOKENS > before // PAGE_TOKENS)
    count = next(iter(cache.boundaries.values())).shape[1]
    target = jnp.where(here, records, count)  # dropped

    def keep(boundaries: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: kept.at[:, target].set(cache.states[name], mode="drop") for name, kept in boundaries.items()}

    return cache.replace(boundaries=jax.lax.cond(jnp.any(here), keep, lambda same: same, cache.boundaries))


def place_row(cache: PagedCache, row: jax.Array, length: jax.Array, record: jax.Array, source: jax.Array) -> PagedCache:
    """The cache whose ``row`` goes on behind ``length`` tokens, which its pages hold for the draft block too.

    Its states are those of the row ``source``, or those of ``record``, or none; -1 stands for no row and no record.
    """

    def restored(name: str, state: jax.Array) -> jax.Array:
        kept = jnp.zeros_like(state[:, 0])
        if name in cache.boundaries:
            kept = jnp.where(record >= 0, cache.boundaries[name][:, jnp.maximum(record, 0)], kept)
        kept = jnp.where(source >= 0, state[:, jnp.maximum(source, 0)], kept)
        return state.at[:, row].set(kept)

    return cache.replace(
        states={name: restored(name, state) for name, state in cache.states.items()},
        lengths=cache.lengths.at[row].set(length),
        draft_lengths=cache.draft_lengths.at[row].set(length if cache.drafting else 0),
    )


def copy_pages(cache: PagedCache, pages: jax.Array, window_pages: jax.Array) -> PagedCache:
    """The cache after pages were copied in all layers: ``[m, 2]`` from and to, -1 for none."""
    layers = dict(cache.layers)

    def copied(name: str, pool: jax.Array) -> jax.Array:
        pairs, parts = (window_pages, 1) if name == "window" else (pages, cache.kernel_pages)
        if not layers[name]:
            return pool
        first = jnp.arange(layers[name]) * (len(pool) // layers[name])
        part = jnp.arange(parts)

        def place(page: jax.Array) -> jax.Array:
            return (first[:, None, None] + page[None, :, None] * parts + part).ravel()

        there = jnp.all(pairs >= 0, axis=1)
        rows = pool[place(jnp.where(there, pairs[:, 0], 0))]
        target = jnp.where(
            jnp.broadcast_to(there[None, :, None], (layers[name], len(pairs), parts)).ravel(),
            place(pairs[:, 1]),
            len(pool),
        )
        return pool.at[target].set(rows, mode="drop")

    return cache.replace(pools={name: copied(name, pool) for name, pool in cache.pools.items()})


def copy(cache: PagedCache) -> PagedCache:
    """A second cache with buffers of its own, for instance to fork a sequence or to keep one across a donating step.

    Raises:
        CacheConsumedError: the cache was already consumed.
        TypeError: no cache.
    """
    check_alive(cache)
    return jax.tree.map(jnp.copy, cache)


def unshared(cache: PagedCache, *others: jax.Array) -> PagedCache:
    """The cache with a copy of each array that it has twice, or that is one of ``others``.

    A buffer can be donated once alone, and not while something else reads it: ``cache.replace(draft_lengths=
    cache.lengths)`` has one in two places. Costs no look at values.
    """
    seen = {id(other) for other in others}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, cache)


def check_arrays(cache: Any, doing: str) -> None:
    """Refuses, beside what ``check_alive`` does, a cache that is traced; ``doing``: what looks at its values."""
    check_alive(cache)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(cache)):
        raise TypeError(f"Expected a cache of arrays, got one that is traced: {doing} outside of jax.jit")


def check_alive(cache: Any) -> None:
    """Refuses what is no cache, and a cache whose buffers a step has taken over.

    Raises:
        CacheConsumedError: the latter.
        TypeError: the former.
    """
    if not isinstance(cache, PagedCache):
        raise TypeError(f"Expected cache to be a PagedCache (see jmla.init_cache), got {type(cache).__name__}")
    for leaf in jax.tree.leaves(cache):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            raise CacheConsumedError(
                "This cache was consumed by an earlier step, which donated its buffers. Use the cache that the step "
                "returned; or keep one with jmla.copy(cache) before the step, or pass donate=False to it."
            )

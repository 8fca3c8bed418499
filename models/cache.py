"""The paged cache as a value: pools, tables, lengths, and the compressors' running state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla.kernels.layouts import KVLayout
from jmla.models.config import V4Config
from jmla.models.config.common import INT32_MAX
from jmla.models.options import check_dtype, check_flag, check_integer
from jmla.models.params import layer_counts
from jmla.models.spec import LATENT_PAGE, PAGE_TOKENS, Model, ModelSpec, cache_layouts, check_model


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
        layouts: the byte layout of each stream (static).
        layers: how many layers write each stream (static).
        chunk: most tokens of a row that one pass may append, for the window's pages to suffice (static).
        max_seq_len: most tokens a row can hold (static).
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

    @property
    def batch(self) -> int:
        return self.table.shape[0]

    def layout(self, stream: str) -> KVLayout:
        return dict(self.layouts)[stream]

    def replace(self, **changes: Any) -> "PagedCache":
        """The same cache with some fields exchanged."""
        return dataclasses.replace(self, **changes)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes allocated by stream and by compressor state."""
        held = {name: pool.nbytes for name, pool in self.pools.items()}
        return held | {f"{name} state": state.nbytes for name, state in self.states.items()}


def bytes_per_token(spec: ModelSpec) -> dict[str, float]:
    """Bytes that each further token of a sequence takes in the streams that grow with it, over all layers."""
    layouts, counts = cache_layouts(spec), layer_counts(spec.config, spec.drafting)
    return {
        name: counts[name] * layout.page_stride * _kernel_pages(spec, name) / PAGE_TOKENS
        for name, layout in layouts.items()
        if name != "window"
    }


def bytes_per_row(spec: ModelSpec) -> dict[str, int]:
    """Bytes that a sequence takes whatever its length: the live window and the compressors' running state."""
    out: dict[str, int] = {}
    if isinstance(spec.config, V4Config):
        layout = cache_layouts(spec)["window"]
        out["window"] = layer_counts(spec.config, spec.drafting)["window"] * _window_pages(spec) * layout.page_stride
        for name, shape in _state_shapes(spec, 1).items():
            out[f"{name} state"] = int(np.prod(shape)) * 4
    return out


def _kernel_pages(spec: ModelSpec, stream: str) -> int:
    """Kernel pages of one 256-token page."""
    if isinstance(spec.config, V4Config):
        return 1
    return PAGE_TOKENS // LATENT_PAGE


def _window_pages(spec: ModelSpec) -> int:
    """Pages that hold the window before a chunk, and the chunk: the row's window table runs round them."""
    window = spec.config.sliding_window if isinstance(spec.config, V4Config) else 0
    return -(-(window - 1 + spec.prefill_chunk) // PAGE_TOKENS) + 1


def _longest_chunk(spec: ModelSpec, window_pages: int) -> int:
    """Tokens that fit beside the window before them, wherever in a page they start."""
    window = spec.config.sliding_window if isinstance(spec.config, V4Config) else 1
    return (window_pages - 1) * PAGE_TOKENS - (window - 1)


def _state_shapes(spec: ModelSpec, batch: int) -> dict[str, tuple[int, ...]]:
    config = spec.config
    if not isinstance(config, V4Config):
        return {}
    counts = layer_counts(config, spec.drafting)
    return {
        "csa": (counts["csa"], batch, 2 * config.csa_ratio, 4 * config.head_dim),
        "index": (counts["csa"], batch, 2 * config.csa_ratio, 4 * config.index_head_dim),
        "hca": (counts["hca"], batch, config.hca_ratio, 2 * config.head_dim),
    }


def init_cache(
    model: Model, batch: int, max_seq_len: int, *, whole_window: bool = False, dtype: str | None = None
) -> PagedCache:
    """An empty cache for ``batch`` sequences of up to ``max_seq_len`` tokens each, all pages handed out.

    Args:
        model: the loaded model.
        batch: rows.
        max_seq_len: tokens a row can hold.
        whole_window: keep every window page (V4) instead of running round the last few.
        dtype: "bfloat16" or "float32", a plain format to use in place of the model's own; None keeps that.

    Raises:
        TypeError: no model, or a flag that is no bool.
        ValueError: ``batch``, ``max_seq_len`` or ``dtype`` out of range, or more pages than int32 slot ids can address.
    """
    spec = check_model(model).spec
    batch = check_integer("batch", batch, INT32_MAX, "as slots are int32")
    max_seq_len = check_integer("max_seq_len", max_seq_len, spec.max_seq_len, "the model's max_seq_len")
    whole_window = check_flag("whole_window", whole_window)
    if dtype is not None:
        spec = dataclasses.replace(spec, kv_layout=check_dtype(dtype))
    row_pages = -(-max_seq_len // PAGE_TOKENS)
    layouts, counts = cache_layouts(spec), layer_counts(spec.config, spec.drafting)
    window_pages = row_pages if whole_window else min(row_pages, _window_pages(spec))
    pools = {}
    for name, layout in layouts.items():
        pages = batch * (window_pages if name == "window" else row_pages)
        rows = counts[name] * pages * _kernel_pages(spec, name)
        if rows * layout.page_size > np.iinfo(np.int32).max:
            raise ValueError(
                f"Expected the {name} pool to have at most 2**31 - 1 slots over all layers, got "
                f"{rows * layout.page_size} for {batch=}, {max_seq_len=}"
            )
        typed = layout.kind == "plain"
        shape = (rows, layout.page_size * layout.width if typed else layout.page_stride)
        pools[name] = jnp.zeros(shape, layout.value_dtype if typed else jnp.uint8)
    first = np.arange(batch, dtype=np.int32)[:, None]
    window_table = None
    if spec.is_v4:
        window_table = jnp.asarray(first * window_pages + np.arange(row_pages, dtype=np.int32) % window_pages)
    return PagedCache(
        pools=pools,
        states={name: jnp.zeros(shape, jnp.float32) for name, shape in _state_shapes(spec, batch).items()},
        table=jnp.asarray(first * row_pages + np.arange(row_pages, dtype=np.int32)),
        window_table=window_table,
        lengths=jnp.zeros((batch,), jnp.int32),
        draft_lengths=jnp.zeros((batch,), jnp.int32),
        layouts=tuple(layouts.items()),
        layers=tuple(counts.items()),
        chunk=max_seq_len if window_pages == row_pages else _longest_chunk(spec, window_pages),
        max_seq_len=max_seq_len,
    )


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

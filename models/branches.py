"""Forks of a sequence: branches that read its full pages where they are, and have the rest to themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla.models.cache import PagedCache, check_arrays, check_slots, copy_pages
from jmla.models.config import V4Config
from jmla.models.config.common import shown
from jmla.models.options import as_integer, check_integer
from jmla.models.spec import PAGE_TOKENS

MOST = 2**16  # branches


def fork(cache: PagedCache, row: int, n: int = 1) -> PagedCache:
    """The cache with ``n`` more rows behind the others, each of which goes on where ``row`` stands now.

    The branches share the full pages of ``row`` by reference and have copies of what goes on being written: the page
    that is not full, V4's window and compressor states. None of the rows notices what another does, as long as each
    only goes on; full pages must not be written again. The cache that was given stays what it was.

    Args:
        cache: not inside ``jax.jit``: its tables and lengths are looked at.
        row: 0 or above, below the batch.
        n: branches. Each takes as many new pages as ``row`` has behind its full ones.

    Returns:
        A cache with buffers of its own, rows ``[B + n]``.

    Raises:
        CacheConsumedError: the cache was already consumed.
        TypeError: no cache, or one that is traced.
        ValueError: ``row`` or ``n`` out of range, or more pages than int32 slot ids can address.
    """
    check_arrays(cache, "fork")
    at = as_integer(row)
    if at is None or not 0 <= at < cache.batch:
        raise ValueError(f"Expected row={shown(row)} to be an integer in 0..{cache.batch - 1}, the rows of the cache")
    row, n = at, check_integer("n", n, MOST, "branches")
    # What the draft block writes for a token depends on the next one, which a branch chooses for itself.
    # Nor may a page be shared that tokens taken back would open again.
    spare = cache.rollback_room if isinstance(cache.config, V4Config) else 0
    full = max(int(cache.lengths[row]) - max(cache.drafting, spare), 0) // PAGE_TOKENS
    grown: dict[str, jax.Array] = {}
    changes: dict[str, Any] = {"window_table": None}
    copies = {}
    for name, streams in (("table", [s for s in cache.pools if s != "window"]), ("window_table", ["window"])):
        table = getattr(cache, name)
        if table is None:
            copies[name] = np.full((1, 2), -1, np.int32)
            continue
        held = max(_pages(cache, stream) for stream in streams)
        branches, copies[name], count = _branches(np.asarray(table), row, n, full, held)
        changes[name] = jnp.concatenate([table, jnp.asarray(branches)])
        grown |= {stream: _room(cache, stream, count) for stream in streams}
    ahead = jnp.full(n, row, jnp.int32)
    wide = cache.replace(
        pools=grown,
        states={name: jnp.concatenate([x, x[:, ahead]], axis=1) for name, x in cache.states.items()},
        boundaries={name: jnp.copy(x) for name, x in cache.boundaries.items()},
        lengths=jnp.concatenate([cache.lengths, cache.lengths[ahead]]),
        draft_lengths=jnp.concatenate([cache.draft_lengths, cache.draft_lengths[ahead]]),
        **changes,
    )
    return _filled(wide, jnp.asarray(copies["table"]), jnp.asarray(copies["window_table"]))


def _branches(table: np.ndarray, row: int, n: int, full: int, held: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Tables of the branches ``[n, pages of a row]``, page copies ``[m, 2]`` (from, to), and new pages in all.

    Pages that stand once in the table, before its ``full``-th entry, are never written again: they are shared. A table
    that runs round a few pages has none of those.
    """
    parent = table[row]
    pages, places, times = np.unique(parent, return_index=True, return_counts=True)
    shared = {int(p) for p, at, count in zip(pages, places, times, strict=True) if count == 1 and at < full}
    own = [int(p) for p in pages if p >= 0 and int(p) not in shared]
    branches, copies = [], []
    for i in range(n):
        new = {page: held + i * len(own) + k for k, page in enumerate(own)}
        branches.append([new.get(int(page), int(page)) for page in parent])
        copies += [[page, new[page]] for page in own if page in parent[: full + 1]]
    padded = np.full((1 << max(len(copies) - 1, 0).bit_length(), 2), -1, np.int32)  # so that few lengths are compiled
    padded[: len(copies)] = np.array(copies, np.int32).reshape(-1, 2)
    return np.array(branches, np.int32), padded, n * len(own)


def _pages(cache: PagedCache, stream: str) -> int:
    """Pages of a stream's pool in each layer; 0 where no layer writes it."""
    layers = dict(cache.layers)[stream]
    return len(cache.pools[stream]) // (layers * cache.kernel_pages) if layers else 0


def _room(cache: PagedCache, stream: str, count: int) -> jax.Array:
    """The pool of a stream with ``count`` more pages in each layer."""
    pool, layers = cache.pools[stream], dict(cache.layers)[stream]
    more = count * cache.kernel_pages
    slots = (len(pool) + layers * more) * cache.layout(stream).page_size
    check_slots(stream, slots, f"with the {count} pages of the branches")
    by_layer = pool.reshape(layers, -1, pool.shape[1]) if layers else pool[None]
    return jnp.pad(by_layer, ((0, 0), (0, more if layers else 0), (0, 0))).reshape(-1, pool.shape[1])


_filled = jax.jit(copy_pages, donate_argnums=0)

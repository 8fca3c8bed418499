"""Taking tokens back: a sequence goes on as if its last tokens had never been there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla.models.cache import PagedCache, check_alive
from jmla.models.config.common import shown
from jmla.models.inputs import as_array, is_host, on_device


def rollback(cache: PagedCache, tokens: Any, *, draft_tokens: Any = 0) -> PagedCache:
    """The cache without the last tokens of its rows.

    What stands behind a row's length is never read: its entries are written again as the sequence goes on, and V4's
    compressors keep their windows in rings with room for the tokens taken back. So nothing is copied, and the cache
    that was given shares its buffers with the one returned. A row may be taken back several times, but not further
    than the room behind the furthest token that it ever held. Rows that share pages (``jmla.fork``) must stay behind
    the full pages that they share: V4's forks leave room for a rollback, with V3.2 and GLM the caller sees to it.

    Args:
        cache: may be traced.
        tokens: an integer, or ``[B]`` integers: tokens to take back of each row; no further than its start. At most
            ``cache.rollback_room`` (see ``jmla.init_cache``); arrays on the device are taken into that range.
        draft_tokens: likewise, positions that the draft block is to read again. In rows that lose tokens it is taken
            back behind the last one left in any case, for its row of that depends on the next token.

    Raises:
        CacheConsumedError: the cache was already consumed.
        TypeError: no cache, or no integers.
        ValueError: a shape that does not fit, a negative number, or more than there is room for.
    """
    check_alive(cache)
    room = cache.rollback_room
    back = _counts("tokens", tokens, cache.batch, room, "the rollback that the cache was made for")
    again = _counts("draft_tokens", draft_tokens, cache.batch, cache.max_seq_len, "the cache's max_seq_len")
    lengths, read = jnp.maximum(cache.lengths - back, 0), jnp.maximum(cache.draft_lengths - again, 0)
    return cache.replace(
        lengths=lengths, draft_lengths=jnp.where(back > 0, jnp.minimum(read, jnp.maximum(lengths - 1, 0)), read)
    )


def _counts(name: str, values: Any, batch: int, high: int, limit: str) -> jax.Array:
    counts = as_array(name, values)
    if not counts.size or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"Expected {name}={shown(values)} to be an integer, or one for each of the {batch} rows")
    if counts.shape not in ((), (batch,)):
        raise ValueError(f"Expected {name} to have shape ({batch},) or to be one integer, got shape {counts.shape}")
    if is_host(values) and not np.all((np.asarray(counts) >= 0) & (np.asarray(counts) <= high)):
        raise ValueError(f"Expected {name}={shown(values)} to be in 0..{high}, {limit}")
    return jnp.clip(jnp.broadcast_to(on_device(counts, np.int32), (batch,)), 0, high)

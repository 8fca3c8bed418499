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
    than the room behind the furthest token that it ever held.

    Args:
        cache: may be traced.
        tokens: an integer, or ``[B]`` integers: tokens to take back of each row; no further than its start. At most
            ``cache.rollback_room`` (see ``jmla.init_cache``); arrays on the device are taken into that range.
        draft_tokens: likewise, positions that the draft block is to read again. The row that it writes for a token
            depends on the next token, so those whose next token changes are to be counted too.

    Raises:
        CacheConsumedError: the cache was already consumed.
        TypeError: no cache, or no integers.
        ValueError: a shape that does not fit, a negative number, or more than there is room for.
    """
    check_alive(cache)
    room = cache.rollback_room
    back = _counts("tokens", tokens, cache.batch, room, "the rollback that the cache was made for")
    again = _counts("draft_tokens", draft_tokens, cache.batch, cache.max_seq_len, "the cache's max_seq_len")
    return cache.replace(
        lengths=jnp.maximum(cache.lengths - back, 0), draft_lengths=jnp.maximum(cache.draft_lengths - again, 0)
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

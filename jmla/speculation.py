"""Decoding with drafts: the draft block guesses some tokens, one pass of the trunk says how far they are right.

Every token is drawn from the trunk's own logits with the noise of its place, as ``jmla.decoding`` draws it, and a draft
is right if it is that token. So a request's text is the one that it has without drafts, at any temperature (in fast
mode up to the rounding of other shapes): nothing is accepted that would not have been drawn. The draft block draws its
guesses with the same noise, by which they agree more often than independent draws from both distributions (a Gumbel
coupling). Rejection sampling (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding") accepts
slightly more, but gives a seed another text.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmla import models, sampling
from jmla.decoding import BLOCK, Made, Rows, Unread, choose, nothing_made
from jmla.models import Model, PagedCache
from jmla.models.cache import record_boundaries
from jmla.models.config import DsaConfig
from jmla.sampling import RowParams

Counts = tuple[jax.Array, jax.Array, jax.Array]  # [B] each: tokens made, drafts checked, drafts that were right


def _propose(
    model: Model, cache: PagedCache, rows: Rows, unread: Unread, params: RowParams, count: int
) -> tuple[PagedCache, jax.Array]:
    """Guesses ``[B, count]`` of each active row's next tokens.

    The cache after it holds the draft block's rows of all tokens in it; behind them stand those of the guesses, which
    are written again when the tokens are known.
    """
    config, deterministic = model.spec.config, model.spec.deterministic
    sharing = isinstance(config, DsaConfig) and config.index_share_for_mtp_iteration
    counts = jnp.where(rows.active, unread.counts, 0)
    logits, hidden, *chosen, cache = models.draft(
        model, unread.hidden, unread.tokens, cache, lengths=counts, return_selected=sharing, donate=False
    )
    read = cache.draft_lengths
    row, last = jnp.arange(cache.batch), jnp.maximum(counts - 1, 0)
    selected = chosen[0][row, last] if chosen else None

    def guess(logits: jax.Array, history: sampling.History, ahead: Any) -> tuple[jax.Array, sampling.History]:
        token, _ = sampling.sample(logits, rows.made + ahead, params, history, deterministic=deterministic)
        token = jnp.where(rows.active, token, 0)
        return token, history.add(token, rows.active)

    def further(carry: Any, ahead: jax.Array) -> Any:
        token, hidden, history, cache = carry
        wanted = ahead + 1 < rows.limit - rows.made  # nobody looks at guesses behind those, nor has the cache room
        one = (rows.active & wanted).astype(jnp.int32)
        keys = None if selected is None else selected[:, None]
        logits, hidden, cache = models.draft(
            model, hidden[:, None], token[:, None], cache, lengths=one, selected=keys, donate=False
        )
        after, history = guess(logits[:, 0], history, ahead)
        return (after, hidden[:, 0], history, cache), after

    first, history = guess(logits[row, last], rows.history, 0)
    carry: Any = (first, hidden[row, last], history, cache)
    (*_, cache), others = lax.scan(further, carry, jnp.arange(1, count, dtype=jnp.int32))
    return cache.replace(draft_lengths=read), jnp.concatenate([first[:, None], others.T], axis=1)


def speculative_block(
    model: Model,
    cache: PagedCache,
    rows: Rows,
    params: RowParams,
    ends: jax.Array,
    alive: jax.Array,
    tops: jax.Array,
    passes: jax.Array,
    records: jax.Array | None = None,
) -> tuple[PagedCache, Rows, Made, Counts]:
    """As ``jmla.decoding.decode_block``, with drafts: 1 to ``k + 1`` tokens of each row in each of up to ``passes``.

    ``k + 1`` is the room of ``rows.unread``; ``passes`` at most ``BLOCK // (k + 1)``, and the cache made for a rollback
    of ``k``. The draft block has read all tokens of a row but its ``unread`` ones, before and after.

    Returns:
        The cache, the rows, what was made, of which each row has its own count at the front, and the counts.
    """
    unread = rows.unread
    if unread is None:
        raise ValueError("Expected rows with room for drafts")
    width = unread.tokens.shape[1]
    drafts = width - 1
    row = jnp.arange(cache.batch)
    none = jnp.zeros(cache.batch, jnp.int32)

    def body(carry: Any) -> Any:
        number, cache, rows, out, counts = carry
        live, before = rows.active, cache.lengths
        cache, guesses = _propose(model, cache, rows, rows.unread, params, drafts)
        # Behind the last token that a row may make nothing is worth a look, nor has it pages.
        given = jnp.where(live, jnp.clip(rows.limit - rows.made, 1, width), 0)
        tokens = jnp.concatenate([rows.token[:, None], guesses], axis=1)
        logits, hidden, cache = models.prefill(
            model, tokens, given, cache, all_logits=True, return_hidden=True, donate=False
        )

        def draw(carry: Any, step: Any) -> Any:
            rows, going, out, (made, checked, right) = carry
            logits, guess, ordinal = step
            after, new = choose(logits, replace(rows, active=going), params, ends, tops, model.spec.deterministic)
            at = jnp.where(going, made, BLOCK)  # past the end: dropped
            out = tuple(o.at[row, at].set(x, mode="drop") for o, x in zip(out, new, strict=True))
            hit = going & (after.token == guess)
            guessed = going & (ordinal + 1 < given)
            rows = replace(
                after,
                token=jnp.where(going, after.token, rows.token),
                active=jnp.where(going, after.active, rows.active),
            )
            counts = made + going, checked + guessed, right + (hit & guessed)
            return (rows, hit & guessed & after.active, out, counts), jnp.where(going, after.token, 0)

        steps = logits.swapaxes(0, 1), jnp.pad(guesses, ((0, 0), (0, 1))).T, jnp.arange(width)
        made = counts[0]
        (rows, _, out, counts), new = lax.scan(draw, (rows, live, out, counts), steps)
        taken = counts[0] - made
        cache = cache.replace(lengths=before + taken)
        if records is not None:
            cache = record_boundaries(cache, jnp.where(live, records, -1), before)
        now = Unread(hidden, new.T, taken)
        return number + 1, cache, replace(rows, unread=_where(live, now, rows.unread)), out, counts

    def going(carry: Any) -> Any:
        return (carry[0] < passes) & jnp.any(carry[2].active)

    rows = replace(rows, active=rows.active & alive)
    carry = (jnp.int32(0), cache, rows, nothing_made(rows), (none, none, none))
    _, cache, rows, out, counts = lax.while_loop(going, body, carry)
    return cache, rows, out, counts


def _where(rows: jax.Array, new: Unread, old: Unread) -> Unread:
    def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(chosen, new, old)

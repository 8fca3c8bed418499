"""What an engine runs on the device: compiled steps over a cache of many rows and the rows' sampling state."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jmla import models
from jmla.decoding import Made, Rows, choose, decode_block
from jmla.models import Model, PagedCache
from jmla.models.cache import copy_pages, place_row, put_rows, record_boundaries, take_rows
from jmla.sampling import History, RowParams
from jmla.speculation import speculative_block


@functools.partial(jax.jit, donate_argnames=("cache", "rows"))
def place(
    cache: PagedCache,
    rows: Rows,
    row: jax.Array,
    length: jax.Array,
    record: jax.Array,
    source: jax.Array,
    pages: jax.Array,
    window_pages: jax.Array,
    limit: jax.Array,
    tokens: jax.Array,
    prompt: jax.Array,
    made: jax.Array,
) -> tuple[PagedCache, Rows]:
    """Gives a row to a request.

    Args:
        cache: of all rows.
        rows: sampling state of all rows.
        row: the row.
        length: tokens that its pages hold already.
        record: of the states behind them, -1 for none.
        source: a row whose states it goes on with in place of those, -1 for none.
        pages: ``[1, 2]`` a page to copy, from and to, -1 for none.
        window_pages: likewise.
        limit: tokens that the request may make.
        tokens: ``[N]`` its prompt, and behind it what it has made before.
        prompt: tokens of the prompt.
        made: tokens made.
    """
    vocab = rows.history.counts.shape[1]
    seen = History.start(tokens[None], prompt[None], vocab).prompt[0]
    place = jnp.arange(len(tokens))
    ids = jnp.where((place >= prompt) & (place < prompt + made), tokens, vocab)  # others are dropped
    counts = jnp.zeros(vocab, jnp.int32).at[ids].add(1, mode="drop")
    history = History(rows.history.prompt.at[row].set(seen), rows.history.counts.at[row].set(counts))
    rows = replace(
        rows,
        made=rows.made.at[row].set(made),
        active=rows.active.at[row].set(False),
        limit=rows.limit.at[row].set(limit),
        history=history,
    )
    cache = copy_pages(cache, pages, window_pages)
    return place_row(cache, row, length, record, source), rows


@functools.partial(jax.jit, donate_argnames=("cache", "rows"))
def prefill_rows(
    model: Model,
    cache: PagedCache,
    rows: Rows,
    params: RowParams,
    index: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
    following: jax.Array,
    ending: jax.Array,
    ends: jax.Array,
    tops: jax.Array,
    records: jax.Array | None,
) -> tuple[PagedCache, Rows, Made, jax.Array]:
    """A chunk of the prompts of some rows; those whose prompt ends here make their first token and become active.

    Args:
        model: the model.
        cache: of all rows.
        rows: sampling state of all rows.
        params: the sampler's options of all rows.
        index: ``[b]`` rows, past the last one for none.
        tokens: ``[b, T]``.
        counts: ``[b]`` tokens of the chunk.
        following: ``[b]`` the token behind the chunk, where the prompt does not end with it.
        ending: ``[b]``, whether the prompt ends with it.
        ends: ``[n]`` ids that end a row.
        tops: whether the likeliest ids are wanted.
        records: ``[B]`` where each row's states go if its chunk ends with a page; None in caches that keep none.

    Returns:
        The cache, the rows, what was made ``[b, 1, ...]``, and ``[4, b]`` as ``decode_rows`` gives it.
    """
    part = take_rows(cache, index)
    here = jnp.minimum(index, cache.batch - 1)
    some = jax.tree.map(lambda x: x[here], rows)
    hidden: Any = None
    if some.unread is None:
        logits, part = models.prefill(model, tokens, counts, part, donate=False)
    else:
        logits, hidden, part = models.prefill(model, tokens, counts, part, return_hidden=True, donate=False)
        row, last = jnp.arange(len(index)), jnp.maximum(counts - 1, 0)
        after = jnp.roll(tokens, -1, axis=1).at[row, last].set(following)
        # The draft block reads a token together with the next one: a prompt's last token has to wait for it.
        _, _, part = models.draft(model, hidden, after, part, lengths=counts - ending, donate=False)
        hidden = hidden[row, last]
    before, cache = cache.lengths, put_rows(cache, index, part)
    if records is not None:
        cache = record_boundaries(cache, records, before)
    some, made = choose(
        logits,
        replace(some, active=ending),
        jax.tree.map(lambda x: x[here], params),
        ends,
        tops,
        model.spec.deterministic,
    )
    if some.unread is not None:
        some = replace(some, unread=some.unread.behind_a_prompt(hidden, some.token))
    target = jnp.where(ending, index, cache.batch)  # dropped
    rows = jax.tree.map(lambda all_, new: all_.at[target].set(new, mode="drop"), rows, some)
    none = jnp.zeros_like(counts)
    counted = jnp.stack([ending.astype(jnp.int32), none, none, some.active.astype(jnp.int32)])
    return cache, rows, tuple(x[:, None] for x in made), counted


@functools.partial(jax.jit, donate_argnames=("cache", "rows"))
def decode_rows(model: Model, cache: PagedCache, rows: Rows, *options: Any) -> tuple[PagedCache, Rows, Made, jax.Array]:
    """Some tokens of all rows that decode, with drafts where ``rows`` have room for what the draft block has not read.

    For ``options`` see ``jmla.decoding.decode_block`` and ``jmla.speculation.speculative_block``, which have the same.

    Returns:
        The cache, the rows, what was made, and ``[4, B]`` int32: tokens made, drafts checked, drafts that were right,
        and whether the row goes on.
    """
    before = rows.made
    if rows.unread is None:
        cache, rows, made = decode_block(model, cache, rows, *options)
        counts = (rows.made - before, jnp.zeros_like(before), jnp.zeros_like(before))
    else:
        cache, rows, made, counts = speculative_block(model, cache, rows, *options)
    return cache, rows, made, jnp.stack([*counts, rows.active.astype(jnp.int32)])

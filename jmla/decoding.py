"""The decode loop on the device: rows that go on until an end token or their limit, sampled in the same program."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmla import models, sampling
from jmla.models import Model, PagedCache
from jmla.models.cache import record_boundaries
from jmla.models.spec import ModelSpec, hidden_shape
from jmla.sampling import History, RowParams

BLOCK = 16  # tokens that one launch of the decode loop makes at most

Made = tuple[jax.Array, ...]  # tokens, their log-probabilities, the likeliest ids and their log-probabilities


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unread:
    """What the draft block has yet to read of each row: its last ``counts [B]`` tokens in the cache, as the trunk's
    ``hidden [B, n, ...]`` and the ``tokens [B, n]`` that follow each."""

    hidden: jax.Array
    tokens: jax.Array
    counts: jax.Array

    @classmethod
    def empty(cls, spec: ModelSpec, batch: int, count: int) -> "Unread":
        """Nothing, with room for ``count`` tokens a row."""
        hidden = jnp.zeros((batch, count, *hidden_shape(spec.config)), spec.dtype)
        return cls(hidden, jnp.zeros((batch, count), jnp.int32), jnp.zeros(batch, jnp.int32))

    def behind_a_prompt(self, hidden: jax.Array, tokens: jax.Array) -> "Unread":
        """The last token of each row's prompt, as its ``hidden [B, ...]`` and the first token made, ``tokens [B]``."""
        return Unread(self.hidden.at[:, 0].set(hidden), self.tokens.at[:, 0].set(tokens), jnp.ones_like(self.counts))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """State of the decode loop: ``token [B]`` last token of each row, ``made [B]`` tokens made, ``active [B]`` rows
    that go on, ``limit [B]`` tokens to make at most, the sampler's history, and where tokens are drafted what the draft
    block has not read."""

    token: jax.Array
    made: jax.Array
    active: jax.Array
    limit: jax.Array
    history: History
    unread: Unread | None = None

    @classmethod
    def empty(cls, spec: ModelSpec, batch: int, drafts: int = 0) -> "Rows":
        """Rows that do nothing; with room for ``drafts`` at a time."""
        zeros, vocab = jnp.zeros(batch, jnp.int32), spec.config.vocab_size
        history = History(jnp.zeros((batch, vocab), bool), jnp.zeros((batch, vocab), jnp.int32))
        unread = Unread.empty(spec, batch, drafts + 1) if drafts else None
        return cls(zeros, jnp.copy(zeros), jnp.zeros(batch, bool), jnp.copy(zeros), history, unread)


def choose(
    logits: jax.Array, rows: Rows, params: RowParams, ends: jax.Array, tops: jax.Array, deterministic: bool
) -> tuple[Rows, Made]:
    """Samples the next token of each active row: the rows after it, and what was made, ``[B]`` and ``[B, n]``."""
    top = sampling.top_logprobs(logits, tops, deterministic=deterministic)
    token, logprob = sampling.sample(logits, rows.made, params, rows.history, deterministic=deterministic)
    token = jnp.where(rows.active, token, 0)
    made = rows.made + rows.active
    going = rows.active & (made < rows.limit) & ~jnp.any(token[:, None] == ends, -1)
    history = rows.history.add(token, rows.active)
    return replace(rows, token=token, made=made, active=going, history=history), (token, logprob, *top)


def nothing_made(rows: Rows) -> Made:
    """Room for ``BLOCK`` tokens of each row."""
    batch, vocab = rows.history.counts.shape
    width = min(sampling.MAX_LOGPROBS, vocab)
    return (
        jnp.zeros((batch, BLOCK), jnp.int32),
        jnp.zeros((batch, BLOCK), jnp.float32),
        jnp.zeros((batch, BLOCK, width), jnp.int32),
        jnp.zeros((batch, BLOCK, width), jnp.float32),
    )


def decode_block(
    model: Model,
    cache: PagedCache,
    rows: Rows,
    params: RowParams,
    ends: jax.Array,
    alive: jax.Array,
    tops: jax.Array,
    steps: jax.Array,
    records: jax.Array | None = None,
) -> tuple[PagedCache, Rows, Made]:
    """Up to ``steps`` more tokens of each row that is active and ``alive [B]``; stops when no row is.

    Args:
        model: the model.
        cache: of the rows.
        rows: their state.
        params: the sampler's options.
        ends: ``[n]`` ids that end a row.
        alive: ``[B]`` rows that the host lets go on.
        tops: whether the likeliest ids are wanted.
        steps: at most ``BLOCK``.
        records: ``[B]`` where each row's running windows go when it reaches the end of a page, -1 for nowhere; None in
            caches that keep none.

    Returns:
        The cache, the rows, and the new ``tokens [B, BLOCK]``, their log-probabilities ``[B, BLOCK]``, the likeliest
        ids and their log-probabilities ``[B, BLOCK, n]``.
    """
    out = nothing_made(rows)

    def body(carry: Any) -> Any:
        step, cache, rows, out = carry
        before = cache.lengths
        logits, cache = models.decode(model, rows.token, cache, active=rows.active, donate=False)
        if records is not None:
            cache = record_boundaries(cache, jnp.where(rows.active, records, -1), before)
        rows, new = choose(logits, rows, params, ends, tops, model.spec.deterministic)
        out = tuple(o.at[:, step].set(x) for o, x in zip(out, new, strict=True))
        return step + 1, cache, rows, out

    def going(carry: Any) -> Any:
        return (carry[0] < steps) & jnp.any(carry[2].active)

    rows = replace(rows, active=rows.active & alive)
    _, cache, rows, out = lax.while_loop(going, body, (jnp.int32(0), cache, rows, out))
    return cache, rows, out


compiled_block = jax.jit(decode_block, donate_argnames=("cache", "rows"))

"""Text in, text out: the loop of prefill, decode and sampling over a batch of prompts."""

import functools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmla import models, sampling
from jmla.batching import CACHE_BYTES, bucket, cache_bytes, cache_room, chunk_width, groups
from jmla.completion import Completion, Output, Stream
from jmla.decoding import BLOCK, Made, Rows, choose, compiled_block
from jmla.kernels import dispatch
from jmla.models import Model, PagedCache
from jmla.models.config.common import shown
from jmla.models.inputs import check_counts, check_ids
from jmla.models.spec import check_model, pages_of
from jmla.requests import (
    as_model,
    complete_params,
    default_params,
    encode,
    end_token_array,
    end_token_ids,
    split_prompts,
    split_sampling,
    tokenizer_of,
)
from jmla.sampling import DEFAULTS, History, RowParams, SamplingParams
from jmla.values import check_integer, check_token_ids, is_list

MOST_CHOICES_AT_ONCE = 16  # rows of the engine that draws several completions of a prompt

# ---- on the device -------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("deterministic",))
def _start(
    logits: jax.Array, rows: Rows, params: RowParams, ends: jax.Array, tops: jax.Array, deterministic: bool
) -> tuple[Rows, Made]:
    """The first token of each row, from the prompt's logits."""
    rows, new = choose(logits, rows, params, ends, tops, deterministic)
    return rows, tuple(x[:, None] for x in new)


@jax.jit
def _ended_here(ended: jax.Array, logits: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.where(ended[:, None], logits, kept)


def _prefill(model: Model, prompts: Sequence[np.ndarray], batch: int, cache: PagedCache) -> tuple[Any, PagedCache]:
    """Runs ragged prompts together in chunks of a few fixed widths; returns each row's last logits ``[B, V]``."""
    lengths = np.array([len(p) for p in prompts] + [0] * (batch - len(prompts)))
    longest, start = int(lengths.max()), 0
    logits: Any = None
    while start < longest:
        width = chunk_width(model.spec, batch, longest - start)
        tokens = np.zeros((batch, width), np.int32)
        counts = np.clip(lengths - start, 0, width).astype(np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : counts[row]] = prompt[start : start + width]
        now, cache = models.prefill(model, tokens, counts, cache)
        start += width
        ended = (counts > 0) & (lengths <= start)
        logits = now if logits is None else _ended_here(ended, now, logits)
    return logits, cache


# ---- on the host ---------------------------------------------------------------------------------------------------


def generate(
    model_or_path: Any,
    prompts: Any,
    *,
    max_new_tokens: int | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: Any = None,
    stream: Stream | None = None,
) -> Completion | list[Completion]:
    """Completes one prompt or several; prompts of like length run together.

    None changes another's result: bit for bit with a model loaded as ``deterministic``, else up to rounding, which may
    tip a close choice between tokens.

    Args:
        model_or_path: a ``Model``, or anything ``jmla.load`` takes (loaded anew on each call).
        prompts: a string or token ids for one completion; a list of those for a list of completions.
        max_new_tokens: tokens to make at most; overrides ``sampling``.
        sampling: how to choose tokens, one for all prompts or one for each. What it leaves unset comes from the
            checkpoint's generation_config.json, then from the defaults of ``SamplingParams``.
        stop: strings or token id lists that end a completion; overrides ``sampling``.
        stream: called as ``stream(index, piece)`` with pieces of text as they become certain (token ids if the
            checkpoint has no tokenizer); the pieces of a prompt joined are its completion's text. Not with several
            completions of a prompt.

    Returns:
        A ``Completion``, or a list of them in the order of the prompts.

    Raises:
        TypeError, ValueError: bad prompts or options, found before anything runs; the message names the number that
            is wrong and what is allowed.
        FloatingPointError: the model made NaN logits.
    """
    if stream is not None and not callable(stream):
        raise TypeError(f"Expected stream={shown(stream)} to be a function of (index, piece)")
    items, single = split_prompts(prompts)
    split_sampling(sampling, len(items))  # a wrong option should not wait for the weights
    model = as_model(model_or_path)
    ids = [encode(model, index, prompt) for index, prompt in enumerate(items)]
    rows = complete_params(model, sampling, len(ids), [len(p) for p in ids], max_new_tokens, stop)
    if several := [row for row in rows if row.draws > 1]:
        if stream is not None:
            raise ValueError(f"Expected no stream where several completions are drawn, got {several[0].draws} of them")
        completions = _with_choices(model, ids, rows)
        return completions[0] if single else completions
    ends = end_token_ids(model)
    tokenizer = tokenizer_of(model)
    outputs = [Output(index, row, frozenset(ends), tokenizer, stream) for index, row in enumerate(rows)]
    for group in groups(model.spec, [len(p) for p in ids], [row.max_new_tokens or 0 for row in rows]):
        _run(model, [ids[i] for i in group], [outputs[i] for i in group], ends)
    completions = [output.completion() for output in outputs]
    return completions[0] if single else completions


def _with_choices(model: Model, prompts: list[np.ndarray], rows: list[SamplingParams]) -> list[Completion]:
    """Completions of prompts for some of which several are drawn, in an engine, where those share a prompt's pages."""
    from jmla.engine import Engine

    longest, pages = 0, 0
    for prompt, row in zip(prompts, rows, strict=True):
        new = row.max_new_tokens or 0
        longest = max(longest, len(prompt) + new)
        pages += pages_of(len(prompt)) + row.draws * (pages_of(new) + 1)
    running = bucket(min(sum(row.draws for row in rows), MOST_CHOICES_AT_ONCE))
    while running > 1 and cache_bytes(model.spec, running, longest) > CACHE_BYTES:
        running //= 2
    longest = cache_room(model.spec, running, longest)  # few sizes, so that few shapes are compiled
    pages = min(bucket(pages), running * pages_of(longest))
    return Engine(model, max_requests=running, max_seq_len=longest, pages=pages).generate(prompts, sampling=rows)


def _run(model: Model, prompts: list[np.ndarray], outputs: list[Output], ends: tuple[int, ...]) -> None:
    """Runs one group of prompts to the end of each."""
    batch, deterministic = bucket(len(prompts)), model.spec.deterministic
    spare = batch - len(prompts)
    limits = [output.params.max_new_tokens or 0 for output in outputs]
    room = max(len(p) + limit for p, limit in zip(prompts, limits, strict=True))
    cache = models.init_cache(model, batch, cache_room(model.spec, batch, room))
    logits, cache = _prefill(model, prompts, batch, cache)

    vocab = model.spec.config.vocab_size
    seen = np.zeros((batch, vocab), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    params = RowParams.pack([output.params for output in outputs] + [DEFAULTS] * spare)
    end_ids = end_token_array(ends)
    tops = np.array(any(output.params.logprobs for output in outputs))
    rows = Rows(
        token=jnp.zeros(batch, jnp.int32),
        made=jnp.zeros(batch, jnp.int32),
        active=jnp.arange(batch) < len(prompts),
        limit=jnp.asarray(np.array(limits + [0] * spare, np.int32)),
        history=History(jnp.asarray(seen), jnp.zeros((batch, vocab), jnp.int32)),
    )
    rows, new = _start(logits, rows, params, end_ids, tops, deterministic)
    count = 1
    # A listener gets every token at once; otherwise a launch makes a block of them.
    steps = np.int32(1 if any(output.stream for output in outputs) else BLOCK)
    while True:
        _collect(outputs, new, count)
        alive = np.array([output.reason is None for output in outputs] + [False] * spare)
        if not alive.any():
            return
        with dispatch.following(model.params, cache):
            cache, rows, new = compiled_block(model, cache, rows, params, end_ids, alive, tops, steps)
        count = int(steps)


def _collect(outputs: list[Output], new: tuple[jax.Array, ...], count: int) -> None:
    tokens, logprobs, top_ids, top_logprobs = (np.asarray(x) for x in new)
    for step in range(count):
        for row, output in enumerate(outputs):
            if output.reason is None:
                output.push(
                    int(tokens[row, step]), float(logprobs[row, step]), top_ids[row, step], top_logprobs[row, step]
                )


# ---- arrays only ---------------------------------------------------------------------------------------------------


def generate_tokens(
    model: Model,
    tokens: Any,
    lengths: Any,
    key: jax.Array,
    *,
    max_new_tokens: int,
    sampling: SamplingParams | RowParams | None = None,
    eos: Sequence[int] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Completes a batch of prompts; arrays in, arrays out, usable inside ``jax.jit``.

    Args:
        model: the model.
        tokens: ``[B, T]`` integers, each row a prompt, left-aligned; what stands past its length does not matter.
        lengths: ``[B]`` integers, tokens of each prompt; a row of length 0 stays empty. Arrays on the device are not
            looked at: their values are taken into ``0..T``.
        key: a random key, from which each row gets its own; or ``[B]`` keys, one a row.
        max_new_tokens: tokens to make at most (static).
        sampling: options for all rows (no ``n``, ``seed``, ``stop``, ``logprobs`` or ``max_new_tokens``: ``key``,
            ``eos`` and the argument take their place, and log-probabilities are always returned), or
            ``jmla.sampling.RowParams`` of arrays (its keys are not used). What is unset comes from the checkpoint, as
            in ``generate``.
        eos: token ids that end a row; default the checkpoint's; ``()`` for none.

    Returns:
        ``tokens [B, T + max_new_tokens]`` int32: prompt, then completion, then zeros; ``lengths [B]`` of both
        together; ``logprobs [B, max_new_tokens]`` float32 of the tokens made, zeros past the end.

    Raises:
        TypeError, ValueError: shapes, dtypes, or static options that do not fit; for tokens and lengths on the host
            also values out of range.
    """
    check_model(model)
    max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1)
    vocab, limit = model.spec.config.vocab_size, model.spec.max_seq_len
    tokens = check_ids(model.spec, tokens, "[B, T]", lengths)
    batch, width = tokens.shape
    if batch == 0 or width == 0:
        raise ValueError(f"Expected tokens [B, T] with B >= 1 and T >= 1, got shape {tokens.shape}")
    lengths = check_counts("lengths", lengths, batch, width)
    if width + max_new_tokens > limit:
        raise ValueError(
            f"Expected tokens of width {width} and {max_new_tokens=} to fit max_seq_len={limit}, "
            f"got {width + max_new_tokens} together"
        )
    if isinstance(sampling, RowParams):
        params = _check_row_params(sampling, batch)
    else:
        given = SamplingParams() if sampling is None else sampling
        if not isinstance(given, SamplingParams):
            raise TypeError(f"Expected sampling to be jmla.SamplingParams or RowParams, got {shown(given)}")
        if given.seed is not None or given.stop or given.logprobs is not None or given.max_new_tokens is not None:
            raise ValueError(
                "Expected sampling without seed, stop, logprobs and max_new_tokens: pass key, eos and max_new_tokens"
            )
        if given.draws > 1:
            raise ValueError(
                f"Expected sampling of one completion, got n={given.n} and best_of={given.best_of}: give a prompt in "
                "several rows instead"
            )
        params = RowParams.pack([given.over(default_params(model))] * batch)
    ends = end_token_ids(model) if eos is None else tuple(check_token_ids("eos", eos, vocab, least=0).tolist())
    keys = _row_keys(key, batch)
    with dispatch.following(model.params, tokens, lengths, keys):
        return _generate_tokens(model, tokens, lengths, replace(params, keys=keys), max_new_tokens, ends)


def _check_row_params(params: RowParams, batch: int) -> RowParams:
    """The options as arrays of the right dtypes; those on the host are also checked for range. Leaves the keys."""
    columns = {}
    for field in fields(params):
        if field.name == "keys":
            continue
        name, values = f"sampling.{field.name}", getattr(params, field.name)
        if not is_list(values) or len(values) != batch or getattr(values, "ndim", 1) != 1:
            raise ValueError(
                f"Expected {name} to have shape ({batch},), one value a row of tokens; got {shown(values)}"
            )
        kind = jnp.integer if field.name == "top_k" else jnp.floating
        if not isinstance(values, jax.Array):
            values = np.array([sampling.CHECKS[field.name](name, value) for value in values])
        elif not jnp.issubdtype(values.dtype, kind):
            raise TypeError(f"Expected {name} to have dtype {kind.__name__}, got {values.dtype}")
        columns[field.name] = jnp.asarray(values).astype(jnp.int32 if kind is jnp.integer else jnp.float32)
    return replace(params, **columns)


def _row_keys(key: Any, batch: int) -> jax.Array:
    """``[B, 2]`` uint32 key data of the rows, from one key or one key a row, of any key implementation."""
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            key = jax.random.wrap_key_data(key if isinstance(key, jax.Array) else jnp.asarray(key))
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"Expected key={shown(key)} to be a random key, as jax.random.key(0) makes it") from error
    if key.shape not in ((), (batch,)):
        raise ValueError(f"Expected key to be one random key, or one for each of the {batch} rows, got {key.shape}")
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    return jax.vmap(lambda k: jax.random.bits(k, (2,), jnp.uint32))(key)


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "ends"))
def _generate_tokens(
    model: Model,
    tokens: jax.Array,
    lengths: jax.Array,
    params: RowParams,
    max_new_tokens: int,
    ends: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, width = tokens.shape
    lengths = jnp.clip(lengths, 0, width)  # those on the device could not be refused
    vocab, deterministic = model.spec.config.vocab_size, model.spec.deterministic
    end_ids = jnp.array(ends or (-1,), jnp.int32)
    index = jnp.arange(batch)
    cache = models.init_cache(model, batch, width + max_new_tokens)
    logits, cache = models.prefill(model, tokens, lengths, cache, donate=False)
    inside = jnp.arange(width) < lengths[:, None]
    text = jnp.pad(jnp.where(inside, tokens, 0), ((0, 0), (0, max_new_tokens)))
    logprobs = jnp.zeros((batch, max_new_tokens), jnp.float32)
    rows = Rows(
        token=jnp.zeros(batch, jnp.int32),
        made=jnp.zeros(batch, jnp.int32),
        active=lengths > 0,
        limit=jnp.full(batch, max_new_tokens, jnp.int32),
        history=History.start(tokens, lengths, vocab),
    )

    def add(logits: jax.Array, rows: Rows, text: jax.Array, logprobs: jax.Array) -> tuple[Rows, Any, Any]:
        after, (_, logprob, *_) = choose(logits, rows, params, end_ids, jnp.array(False), deterministic)
        at = jnp.where(rows.active, lengths + rows.made, width + max_new_tokens)  # past the end: dropped
        text = text.at[index, at].set(after.token, mode="drop")
        step = jnp.where(rows.active, rows.made, max_new_tokens)
        return after, text, logprobs.at[index, step].set(logprob, mode="drop")

    def body(carry: Any) -> Any:
        cache, rows, text, logprobs = carry
        logits, cache = models.decode(model, rows.token, cache, active=rows.active, donate=False)
        return cache, *add(logits, rows, text, logprobs)

    carry = (cache, *add(logits, rows, text, logprobs))
    _, rows, text, logprobs = lax.while_loop(lambda c: jnp.any(c[1].active), body, carry)
    return text, lengths + rows.made, logprobs

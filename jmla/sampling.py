"""Sampling: what a caller may ask for, and the sampler that serves every row's own choice in one compiled function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmla.models.config.common import INT32_MAX, shown
from jmla.values import check_integer, check_number, check_text, check_token_ids, is_list

MAX_LOGPROBS = 20  # alternatives reported for a token; a fixed width, so that asking for them compiles nothing new
MAX_CHOICES = 1024  # completions of a prompt
DEFAULT_MAX_NEW_TOKENS = 256

Stop = tuple[str | tuple[int, ...], ...]


def normalize_stop(stop: Any) -> Stop:
    """Turns a stop argument into a tuple of strings and token id tuples.

    Args:
        stop: a string, or a list of strings and non-empty token id lists.

    Raises:
        TypeError, ValueError: for empty strings, empty id lists, ids that no vocabulary has, or anything else.
    """
    if isinstance(stop, str):
        stop = (stop,)
    if not is_list(stop):
        raise ValueError(f"Expected stop={shown(stop)} to be a string or a list of strings and token id lists")
    result: list[str | tuple[int, ...]] = []
    for item in stop:
        name = f"stop item {shown(item)}"
        if isinstance(item, str) and item:
            result.append(check_text(name, str(item)))
        elif is_list(item) and len(item):
            result.append(tuple(check_token_ids(name, item, INT32_MAX).tolist()))
        else:
            raise ValueError(f"Expected {name} to be a non-empty string or a non-empty list of token ids")
    return tuple(result)


# How each option is checked: called with its name and value.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": lambda n, v: check_number(n, v, 0, math.inf),
    "top_k": lambda n, v: check_integer(n, v, 0),
    "top_p": lambda n, v: check_number(n, v, 0, 1, low_open=True),
    "min_p": lambda n, v: check_number(n, v, 0, 1),
    "seed": lambda n, v: check_integer(n, v, 0, 2**64 - 1),
    "repetition_penalty": lambda n, v: check_number(n, v, 0, math.inf, low_open=True),
    "presence_penalty": lambda n, v: check_number(n, v, -math.inf, math.inf),
    "frequency_penalty": lambda n, v: check_number(n, v, -math.inf, math.inf),
    "max_new_tokens": lambda n, v: check_integer(n, v, 1),
    "stop": lambda _, v: normalize_stop(v),
    "logprobs": lambda n, v: check_integer(n, v, 0, MAX_LOGPROBS),
    "n": lambda n, v: check_integer(n, v, 1, MAX_CHOICES),
    "best_of": lambda n, v: check_integer(n, v, 1, MAX_CHOICES),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. ``None`` is "not set": the checkpoint's generation_config.json decides, then the default.

    Attributes:
        temperature: 0 is greedy. Default 0.
        top_k: keep the ``top_k`` likeliest tokens (ties to the lower id); 0 keeps all. Default 0.
        top_p: after ``top_k``, keep the smallest set of likeliest tokens whose probability reaches it. Default 1.
        min_p: drop tokens less likely than ``min_p`` times the likeliest. Default 0.
        seed: 0 to 2**64 - 1. The draw for a token depends on the seed and the token's position in the completion
            alone, so the same prompt and seed give the same text in any batch (exactly with a model loaded as
            ``deterministic``; else rounding may tip a close choice); give equal prompts different seeds for different
            texts. Default 0.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or completion.
            Default 1.
        presence_penalty: subtracted once from the logits of tokens in the completion. Default 0.
        frequency_penalty: subtracted for each occurrence in the completion. Default 0.
        max_new_tokens: completion tokens at most. Default 256, or what the model's context leaves.
        stop: strings or token id lists that end a completion; they are not part of its text.
        logprobs: report the log-probability of each chosen token and of this many likeliest ones (0 to 20), of the
            model's own distribution: before penalties, temperature and filters.
        n: completions of the prompt, each drawn with a seed of its own (see ``choice``); they share the pages of the
            prompt. Above 1 with a temperature above 0 alone. Default 1.
        best_of: completions to draw, of which the ``n`` with the highest mean log-probability of a token are given.
            Default ``n``.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    stop: Any = None
    logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))

    @property
    def draws(self) -> int:
        """Completions to draw."""
        return self.best_of or self.n or 1

    def choice(self, index: int) -> "SamplingParams":
        """The parameters of one of the completions alone: the first has the seed as it is given."""
        seed = self.seed or 0
        if index:  # far apart for neighbouring seeds: the multiplier is 2**64 over the golden ratio, and odd
            seed = (seed ^ (index * 0x9E3779B97F4A7C15)) % 2**64
        return replace(self, seed=seed, n=1, best_of=None)

    def over(self, defaults: "SamplingParams") -> "SamplingParams":
        """These parameters, with the ones that are not set taken from ``defaults``."""
        unset = {f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **unset)


DEFAULTS = SamplingParams(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    stop=(),
    n=1,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowParams:
    """The sampler's options as arrays, one value a row, so that one compiled sampler serves every mixture.

    ``keys [B, 2]`` uint32 is the row's random key data (threefry); ``top_k [B]`` int32; the others ``[B]`` float32.
    """

    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array

    @classmethod
    def pack(cls, rows: Sequence[SamplingParams]) -> "RowParams":
        """Builds the arrays on the host from one ``SamplingParams`` a row; values that are not set take defaults."""
        full = [row.over(DEFAULTS) for row in rows]

        def column(name: str, dtype: Any = np.float32) -> Any:
            return np.array([getattr(row, name) for row in full], dtype)

        seeds = column("seed", np.uint64)
        keys: Any = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)
        return cls(
            keys=keys,
            temperature=column("temperature"),
            top_k=column("top_k", np.int32),
            top_p=column("top_p"),
            min_p=column("min_p"),
            repetition_penalty=column("repetition_penalty"),
            presence_penalty=column("presence_penalty"),
            frequency_penalty=column("frequency_penalty"),
        )

    def with_row(self, row: int, params: SamplingParams) -> "RowParams":
        """The same options on the host but for those of one row. A copy: a step may still read the arrays."""

        def placed(rows: Any, new: Any) -> Any:
            rows = np.array(rows)
            rows[row] = new[0]
            return rows

        return jax.tree.map(placed, self, RowParams.pack([params]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What the penalties need to know: ``prompt [B, V]`` bool, token in the prompt; ``counts [B, V]`` int32, times
    the token stands in the completion."""

    prompt: jax.Array
    counts: jax.Array

    @classmethod
    def start(cls, tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> "History":
        """The history after a prompt ``tokens [B, T]`` of ``lengths [B]``."""
        batch, width = tokens.shape
        valid = jnp.arange(width) < lengths[:, None]
        ids = jnp.where(valid, tokens, vocab_size)  # past the end: dropped
        prompt = jnp.zeros((batch, vocab_size), bool).at[jnp.arange(batch)[:, None], ids].set(True, mode="drop")
        return cls(prompt, jnp.zeros((batch, vocab_size), jnp.int32))

    def add(self, tokens: jax.Array, active: jax.Array) -> "History":
        """Counts one more token ``tokens [B]`` in each row that is ``active [B]``."""
        rows = jnp.arange(tokens.shape[0])
        return replace(self, counts=self.counts.at[rows, tokens].add(active.astype(jnp.int32), mode="drop"))


def _penalise(given: jax.Array, params: RowParams, history: History) -> jax.Array:
    repetition = params.repetition_penalty[:, None]
    seen = history.prompt | (history.counts > 0)
    logits = jnp.where(seen, jnp.where(given > 0, given / repetition, given * repetition), given)
    logits = logits - history.counts * params.frequency_penalty[:, None]
    logits = jnp.where(history.counts > 0, logits - params.presence_penalty[:, None], logits)
    # A huge penalty moves a token as far as float32 goes, not to an infinity that the next difference makes NaN.
    largest = jnp.finfo(jnp.float32).max
    return jnp.where(jnp.isneginf(given), given, jnp.clip(logits, -largest, largest))


def _nucleus(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Of one row's scaled logits ``[V]``: which survive ``top_k``, then ``top_p`` of what is left."""
    size = scaled.shape[-1]
    negated, order = lax.sort((-scaled, jnp.arange(size)), num_keys=2)
    rank = jnp.arange(size)
    kept = (top_k == 0) | (rank < top_k)
    weights = jnp.where(kept, jnp.exp(negated[0] - negated), 0.0)
    before = jnp.cumsum(weights) - weights
    # 1 keeps everything, also what rounding of the sums would cut
    kept &= (top_p >= 1) | (before < top_p * jnp.sum(weights)) | (rank == 0)
    return jnp.zeros(size, bool).at[order].set(kept)


def _noise(key: jax.Array, step: jax.Array, size: int) -> jax.Array:
    row_key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(row_key, step), (size,), jnp.float32)


def each_row(fn: Callable[..., Any], deterministic: bool) -> Callable[..., Any]:
    """Lifts a function of one row to a batch: as one vector operation, or row by row with bits that no batch mate
    can change."""
    if deterministic:
        return lambda *rows: lax.map(lambda row: fn(*row), rows)
    return jax.vmap(fn)


def sample(
    logits: jax.Array, steps: jax.Array, params: RowParams, history: History, *, deterministic: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Chooses one token a row.

    The choice is ``argmax(penalised logits / temperature + Gumbel noise)`` over the tokens that the filters leave, the
    noise drawn from ``fold_in(row key, step)``; at temperature 0 it is the argmax of the penalised logits, ties to the
    lower id. A row's result depends on that row's inputs alone.

    Args:
        logits: ``[B, V]``, any float dtype.
        steps: ``[B]`` int32, the index of the token in its completion.
        params: options, one a row.
        history: tokens seen so far.
        deterministic: row by row, so that other rows cannot change the rounding either.

    Returns:
        ``tokens [B]`` int32 and ``logprobs [B]`` float32: log-probability of the chosen token under the model's own
        distribution (NaN if the row's logits hold a NaN).
    """
    logits = logits.astype(jnp.float32)
    size = logits.shape[-1]
    penalised = _penalise(logits, params, history)
    sampled = params.temperature > 0
    top = jnp.max(penalised, -1, keepdims=True)
    # relative to the maximum, so that a tiny temperature cannot overflow; 0 for the likeliest token
    scaled = (penalised - top) / jnp.where(sampled, params.temperature, 1.0)[:, None]
    keep = scaled >= jnp.log(params.min_p)[:, None]
    filtered = sampled & (((params.top_k > 0) & (params.top_k < size)) | (params.top_p < 1))
    keep &= lax.cond(
        jnp.any(filtered),  # the sort is dear: only when some row asks for it
        lambda: each_row(_nucleus, deterministic)(scaled, params.top_k, params.top_p),
        lambda: jnp.ones_like(keep),
    )
    noise = lax.cond(
        jnp.any(sampled),
        lambda: each_row(lambda k, s: _noise(k, s, size), deterministic)(params.keys, steps),
        lambda: jnp.zeros_like(scaled),
    )
    drawn = jnp.argmax(jnp.where(keep, scaled + noise, -jnp.inf), -1)
    tokens = jnp.where(sampled, drawn, jnp.argmax(penalised, -1)).astype(jnp.int32)
    return tokens, token_logprobs(logits, tokens, deterministic=deterministic)


def token_logprobs(logits: jax.Array, tokens: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """``log_softmax(logits [B, V])`` at ``tokens [B]``, float32."""

    def one(row: jax.Array, token: jax.Array) -> jax.Array:
        return row[token] - jax.nn.logsumexp(row)

    return each_row(one, deterministic)(logits.astype(jnp.float32), tokens)


def top_logprobs(logits: jax.Array, wanted: jax.Array, *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens of each row and their log-probabilities, if ``wanted`` (a traced bool) says so.

    Returns:
        ``ids [B, n]`` int32 and ``logprobs [B, n]`` float32, ``n = min(20, V)``; zeros when not wanted.
    """
    count = min(MAX_LOGPROBS, logits.shape[-1])

    def one(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(row, count)
        return ids.astype(jnp.int32), values - jax.nn.logsumexp(row)

    def nothing() -> tuple[jax.Array, jax.Array]:
        shape = (logits.shape[0], count)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return lax.cond(wanted, lambda: each_row(one, deterministic)(logits.astype(jnp.float32)), nothing)

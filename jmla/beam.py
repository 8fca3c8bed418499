"""Beam search: the likeliest continuations of a prompt, branches that share the pages of what they have in common."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla import models
from jmla.batching import bucket, cache_room, chunk_width
from jmla.completion import Completion, Output
from jmla.engine.pages import PagePool
from jmla.kernels import dispatch
from jmla.models import Model, PagedCache
from jmla.models.cache import copy_pages, first_window_page, open_cache, put_rows, take_rows, window_pages
from jmla.models.config import V4Config
from jmla.models.inputs import on_device
from jmla.models.spec import PAGE_TOKENS, pages_of
from jmla.requests import as_model, complete_params, encode, end_token_ids, tokenizer_of
from jmla.sampling import SamplingParams
from jmla.values import check_integer, check_number

MOST_BEAMS = 64


@dataclasses.dataclass(frozen=True)
class Beam:
    """A continuation that beam search found.

    Attributes:
        completion: its text and tokens, the end token included.
        logprob: of all its tokens together, by the model's own distribution.
        score: ``logprob / tokens ** length_penalty``, by which beams are ranked.
    """

    completion: Completion
    logprob: float
    score: float


def beam_search(
    model_or_path: Any, prompt: Any, *, beams: int = 4, max_new_tokens: int | None = None, length_penalty: float = 1.0
) -> list[Beam]:
    """The likeliest continuations that a beam search finds.

    In every step the ``beams`` likeliest of all one-token continuations of the current ones go on, but for those that
    an end token ends. The search stops when ``beams`` have ended of which none is worse than the best running one can
    become by going on with certainty at its present length, or at ``max_new_tokens``, when running ones count as ended.
    Ties go to the better beam, then to the lower token id.

    Args:
        model_or_path: a ``Model``, or anything ``jmla.load`` takes.
        prompt: a string or token ids.
        beams: 1 to 64.
        max_new_tokens: tokens to make at most; default as in ``generate``.
        length_penalty: -10 to 10, exponent of the length in the score: above 0 favours long continuations.

    Returns:
        ``beams`` of them, best first.

    Raises:
        TypeError, ValueError: a bad prompt or option.
        FloatingPointError: the model made NaN logits.
    """
    width = check_integer("beams", beams, 1, MOST_BEAMS)
    penalty = check_number("length_penalty", length_penalty, -10, 10)
    model = as_model(model_or_path)
    ids = encode(model, 0, prompt)
    greedy = SamplingParams(temperature=0, n=1, stop=[])
    (params,) = complete_params(model, greedy, 1, [len(ids)], max_new_tokens, None)
    limit = params.max_new_tokens or 0
    rows = _Rows(model, width, len(ids), limit)
    search = _Search(width, penalty, frozenset(end_token_ids(model)))
    logits = rows.read(ids)
    while search.step(*_likeliest(logits, rows.live, search.wanted), limit):
        rows.rearrange([beam.parent for beam in search.running])
        logits = rows.decode([beam.tokens[-1] for beam in search.running])
    return [_found(model, params, found, search.score(found)) for found in search.best()]


@dataclasses.dataclass(frozen=True)
class _Running:
    tokens: tuple[int, ...]
    logprob: float
    parent: int  # its row before the last step


class _Search:
    """Which beams run, and which have ended: host only."""

    def __init__(self, width: int, penalty: float, ends: frozenset[int]):
        self._width, self._penalty, self._ends = width, penalty, ends
        self.wanted = (1 + len(ends)) * width  # of all end tokens at each beam, as many others are left
        self.running = [_Running((), 0.0, 0)]
        self.ended: list[_Running] = []

    def score(self, beam: _Running) -> float:
        return beam.logprob / len(beam.tokens) ** self._penalty

    def step(self, tokens: np.ndarray, logprobs: np.ndarray, limit: int) -> bool:
        """Takes the likeliest tokens of each running beam ``[beams, n]``, best first; whether the search goes on."""
        found = [
            _Running((*beam.tokens, int(token)), beam.logprob + float(logprob), row)
            for row, beam in enumerate(self.running)
            for token, logprob in zip(tokens[row], logprobs[row], strict=True)
            if logprob > -math.inf
        ]
        found.sort(key=lambda beam: -beam.logprob)  # stable: ties keep the order of beams and ids
        self.ended += [beam for beam in found[: self._width] if beam.tokens[-1] in self._ends]
        self.running = [beam for beam in found if beam.tokens[-1] not in self._ends][: self._width]
        if self.running and len(self.running[0].tokens) == limit:
            self.ended += self.running
            self.running = []
        if not self.running:
            return False
        done = self.best()
        return len(done) < self._width or self.score(self.running[0]) > self.score(done[-1])

    def best(self) -> list[_Running]:
        return sorted(self.ended, key=lambda beam: -self.score(beam))[: self._width]


class _Rows:
    """The cache of the beams, and who holds which page."""

    def __init__(self, model: Model, width: int, prompt: int, limit: int):
        spec = model.spec
        self._window = spec.config.sliding_window if isinstance(spec.config, V4Config) else 0
        own = pages_of(limit) + 2  # behind the prompt's full pages, and one while rows are rearranged
        pages = bucket(prompt // PAGE_TOKENS + width * own)
        windows = 2 * width * (window_pages(spec) + 1) if self._window else 0
        longest = cache_room(spec, width, prompt + limit)
        self._cache = open_cache(model, width, longest, pages=pages, window_pages=windows)
        self.model = model
        self._pools = {"table": PagePool(pages)} | ({"window_table": PagePool(windows)} if self._window else {})
        self._tables = {name: np.full(self._cache.table.shape, -1, np.int32) for name in self._pools}
        self._length, self.live = 0, 1
        self._width = width

    def read(self, ids: np.ndarray) -> jax.Array:
        """Logits behind a prompt, which row 0 reads."""
        logits: Any = None
        while self._length < len(ids):
            width = chunk_width(self.model.spec, 1, len(ids) - self._length)
            piece = ids[self._length : self._length + width]
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(piece)] = piece
            self._take_pages(len(piece))
            cache = self._with_tables()
            with dispatch.following(self.model.params, cache):
                logits, self._cache = _read(self.model, cache, tokens, np.array([len(piece)], np.int32))
            self._length += len(piece)
        return logits

    def decode(self, tokens: list[int]) -> jax.Array:
        """Logits behind one more token of each live row."""
        self._take_pages(1)
        ids, active = np.zeros(self._width, np.int32), np.arange(self._width) < self.live
        ids[: self.live] = tokens
        logits, self._cache = models.decode(self.model, ids, self._with_tables(), active=active)
        self._length += 1
        return logits

    def rearrange(self, parents: list[int]) -> None:
        """Makes row i a branch of the row ``parents[i]``."""
        full = self._length // PAGE_TOKENS
        copies = {name: np.full((self._width, 2), -1, np.int32) for name in ("table", "window_table")}
        for name, table in self._tables.items():
            pool, new = self._pools[name], np.full_like(table, -1)
            first_child: set[int] = set()
            for row, parent in enumerate(parents):
                for ordinal in np.flatnonzero(table[parent] >= 0):
                    page = int(table[parent, ordinal])
                    if ordinal >= full and parent in first_child:  # still written: the first child keeps it
                        copies[name][row] = page, self._take(pool)
                        page = int(copies[name][row, 1])
                    else:
                        pool.share(page)
                    new[row, ordinal] = page
                first_child.add(parent)
            for held in table[table >= 0].tolist():
                pool.release(held)
            self._tables[name] = new
        self.live = len(parents)
        padded = np.arange(self._width, dtype=np.int32)
        padded[: self.live] = parents
        with dispatch.following(self.model.params, self._cache):
            self._cache = _rearranged(self._cache, padded, copies["table"], copies["window_table"])

    def _take(self, pool: PagePool) -> int:
        page = pool.take()
        if page is None:
            raise RuntimeError(f"Expected {pool.size} pages to be enough for {self._width} beams")
        return page

    def _take_pages(self, count: int) -> None:
        """Pages for ``count`` more tokens of each live row, and back with window pages that no token will see."""
        for name, table in self._tables.items():
            pool = self._pools[name]
            for row in range(self.live):
                for ordinal in range(self._length // PAGE_TOKENS, (self._length + count - 1) // PAGE_TOKENS + 1):
                    if table[row, ordinal] < 0:
                        table[row, ordinal] = self._take(pool)
                if name == "window_table":
                    passed = first_window_page(self._window, self._length)
                    for old in np.flatnonzero(table[row, :passed] >= 0):
                        pool.release(int(table[row, old]))
                        table[row, old] = -1

    def _with_tables(self) -> PagedCache:
        tables = {name: on_device(table, np.int32) for name, table in self._tables.items()}
        return self._cache.replace(**tables)


@functools.partial(jax.jit, donate_argnums=1)
def _read(model: Model, cache: PagedCache, tokens: Any, counts: Any) -> tuple[jax.Array, PagedCache]:
    first = jnp.zeros(1, jnp.int32)
    logits, part = models.prefill(model, tokens, counts, take_rows(cache, first), donate=False)
    return logits, put_rows(cache, first, part)


@functools.partial(jax.jit, donate_argnums=0)
def _rearranged(cache: PagedCache, parents: Any, pages: Any, window_pages: Any) -> PagedCache:
    cache = copy_pages(cache, pages, window_pages)
    return cache.replace(
        states={name: state[:, parents] for name, state in cache.states.items()},
        lengths=cache.lengths[parents],
        draft_lengths=cache.draft_lengths[parents],
    )


@functools.partial(jax.jit, static_argnums=1)
def _top(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    values, tokens = jax.lax.top_k(logprobs, min(count, logits.shape[1]))
    return tokens, values, jnp.isnan(logits).any(axis=-1)


def _likeliest(logits: jax.Array, live: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens of the live rows and their log-probabilities."""
    tokens, logprobs, broken = (np.asarray(x)[:live] for x in _top(logits, count))
    if broken.any():
        raise FloatingPointError("The model's logits are not numbers (NaN)")
    return tokens, logprobs


def _found(model: Model, params: SamplingParams, beam: _Running, score: float) -> Beam:
    nothing = np.zeros(0)
    output = Output(0, params, frozenset(end_token_ids(model)), tokenizer_of(model), None)
    for token in beam.tokens:
        output.push(token, 0.0, nothing, nothing)
    return Beam(output.completion(), beam.logprob, score)

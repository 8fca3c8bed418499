"""What comes back from a model: completions, put together token by token."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from jmla.sampling import SamplingParams
from jmla.tokenizer import Detokenizer, StopStrings, Tokenizer

Stream = Callable[[int, str | int], None]
Reason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one chosen token, and of the likeliest ones ``top = ((id, logprob), ...)``."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """What a model said to a prompt.

    Attributes:
        text: the completion without special tokens and without the stop; None if the checkpoint has no tokenizer.
        token_ids: every token made, the one that ended it included.
        finish_reason: "stop" (an end token, or a stop of the caller) or "length"; from an engine also "cancelled" or
            "deadline".
        logprobs: one entry a token when asked for, else None.
        choices: where several completions were asked for, all of them, the best or first, which is this one, first.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: Reason
    logprobs: tuple[TokenLogprob, ...] | None = None
    choices: tuple["Completion", ...] = ()


class _Text:
    """Tokens to text, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._detokenizer = Detokenizer(tokenizer)
        self._strings = StopStrings([s for s in params.stop if isinstance(s, str)])

    def push(self, tokens: Sequence[int], last: bool) -> tuple[list[str], bool]:
        """The pieces that are certain now, all that is left with the ``last`` ones; and whether a stop was met."""
        given = []
        for token in tokens:
            piece, stopped = self._strings.push(self._detokenizer.push(token))
            given.append(piece)
            if stopped:
                return given, True
        if not last:
            return given, False
        piece, stopped = self._strings.push(self._detokenizer.flush())
        return [*given, piece, "" if stopped else self._strings.flush()], stopped


class _Change(NamedTuple):
    """What tokens make of an output: ``lists = ((list, from where on, what stands there), ...)``, the rest anew."""

    lists: tuple[tuple[list[Any], int, Sequence[Any]], ...]
    total_logprob: float
    waiting: tuple[int, ...]
    text: _Text | None
    reason: Reason | None


@dataclass
class Output:
    """Collects the tokens of one completion: text, stops, stream.

    An interrupt may come anywhere: after it, ``tell`` and then ``push`` from token ``len(ids)`` on give what they would
    have given without it. Hence what a token makes of an output is first computed aside, and then carried out by steps
    that can be repeated.

    Attributes:
        index: of the prompt, for the stream and for messages.
        params: complete options.
        ends: token ids that end the completion.
        tokenizer: None gives tokens in place of text.
        stream: called with each piece.
        reason: why the completion ended; None while it goes on.
        total_logprob: log-probability of all tokens made.
    """

    index: int
    params: SamplingParams
    ends: frozenset[int]
    tokenizer: Tokenizer | None
    stream: Stream | None
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: Reason | None = None
    total_logprob: float = 0.0

    def __post_init__(self) -> None:
        self._id_stops = [s for s in self.params.stop if not isinstance(s, str)]
        # A token that may begin a stop of several ids is kept from the text until that is known.
        self._waiting: tuple[int, ...] = ()
        self._untold: list[str | int] = []
        self._text: _Text | None = None  # None while it takes tokens, and where an interrupt has left it so
        self._change: _Change | None = None

    def push(self, token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Takes one more token, settles whether the completion ends with it, and then tells the stream.

        Raises:
            FloatingPointError: the log-probability is not a number; the token is not taken.
        """
        self._settle()
        if math.isnan(logprob):
            raise FloatingPointError(
                f"The model's logits for token {len(self.ids)} of completion {self.index} are not numbers (NaN)"
            )
        entries = []
        if self.params.logprobs is not None:
            pairs = list(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))[: self.params.logprobs]
            entries.append(TokenLogprob(token, logprob, tuple(pairs)))
        ready, waiting, reason = self._sort(token)
        self._go_on([token], entries, self.total_logprob + logprob, ready, waiting, reason)
        self.tell()

    def tell(self) -> None:
        """Calls the stream with what it has not been told. A piece whose call raises counts as told."""
        self._settle()
        if self.stream is None or not self._untold:
            return
        # A piece is taken and given within one call of ``next``: no interrupt comes in between.
        calls = map(self.stream, itertools.repeat(self.index), map(self._untold.pop, itertools.repeat(0)))
        while self._untold:
            next(calls)

    def end(self, reason: Reason) -> None:
        """Ends the completion where it stands; what was held back as a possible stop is given out."""
        self._settle()
        if self.reason is None:
            self._go_on([], [], self.total_logprob, self._waiting, (), reason)
        self.tell()

    def _sort(self, token: int) -> tuple[tuple[int, ...], tuple[int, ...], Reason | None]:
        """Which tokens are ready for the text now, which go on waiting, and whether the completion ends with that."""
        if token in self.ends:
            return self._waiting, (), "stop"
        tokens = (*self._waiting, token)
        matched = max((len(s) for s in self._id_stops if tokens[-len(s) :] == s), default=0)
        if matched:
            return tokens[:-matched], (), "stop"
        if len(self.ids) + 1 >= (self.params.max_new_tokens or 0):
            return tokens, (), "length"
        held = 0
        for stop in self._id_stops:
            for size in range(min(len(stop) - 1, len(tokens)), held, -1):
                if tokens[-size:] == stop[:size]:
                    held = size
                    break
        return tokens[: len(tokens) - held], tokens[len(tokens) - held :], None

    def _go_on(
        self,
        ids: list[int],
        entries: list[TokenLogprob],
        total_logprob: float,
        ready: Sequence[int],
        waiting: tuple[int, ...],
        reason: Reason | None,
    ) -> None:
        """Takes tokens and puts those that are ready into the text, which a stop string may end."""
        text, self._text = self._text or self._read_again(), None
        given: list[str | int] = list(ready)
        if text is not None:
            pieces, stopped = text.push(ready, reason is not None)
            given, reason = [piece for piece in pieces if piece], "stop" if stopped else reason
        lists = (
            (self.ids, len(self.ids), ids),
            (self.logprobs, len(self.logprobs), entries),
            (self.pieces, len(self.pieces), [piece for piece in given if isinstance(piece, str)]),
            (self._untold, len(self._untold), given if self.stream is not None else []),
        )
        # Until here an interrupt leaves the output as it was; from here on what was computed is carried out.
        self._change = _Change(lists, total_logprob, waiting, text, reason)
        self._settle()

    def _settle(self) -> None:
        """Carries out what was decided last; begun again after an interrupt, it comes to the same."""
        change = self._change
        if change is None:
            return
        for values, at, new in change.lists:
            values[at:] = new
        self.total_logprob = change.total_logprob
        self._waiting = change.waiting
        self._text = change.text
        self.reason = change.reason  # last: who sees it sees all
        self._change = None

    def _read_again(self) -> "_Text | None":
        """The state of the text behind all tokens that it was given, from the beginning."""
        if self.tokenizer is None:
            return None
        text = _Text(self.tokenizer, self.params)
        text.push(self.ids[: len(self.ids) - len(self._waiting)], False)
        return text

    @property
    def rank(self) -> tuple[bool, float]:
        """Order among completions of a prompt: those that came to their end, then by their tokens' mean."""
        mean = self.total_logprob / len(self.ids) if self.ids else -math.inf
        return self.reason in ("cancelled", "deadline"), -mean

    def completion(self) -> Completion:
        self._settle()
        text = "".join(self.pieces) if self.tokenizer is not None else None
        logprobs = tuple(self.logprobs) if self.params.logprobs is not None else None
        return Completion(text, tuple(self.ids), self.reason or "length", logprobs)


def chosen(outputs: Sequence[Output], params: SamplingParams) -> Completion:
    """The completion of a prompt for which ``outputs`` were drawn: of several, the best or first with all of them."""
    if len(outputs) == 1:
        return outputs[0].completion()
    ranked = list(outputs)
    if len(ranked) > (params.n or 1):
        ranked = sorted(ranked, key=lambda output: output.rank)[: params.n]
    choices = tuple(output.completion() for output in ranked)
    return replace(choices[0], choices=choices)

"""What comes back from a model: completions, put together token by token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

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


@dataclass
class Output:
    """Collects the tokens of one completion: text, stops, stream.

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
        self._strings = StopStrings([s for s in self.params.stop if isinstance(s, str)])
        self._id_stops = [s for s in self.params.stop if not isinstance(s, str)]
        self._detokenizer = Detokenizer(self.tokenizer) if self.tokenizer is not None else None
        # A token that may begin a stop of several ids is kept from the text until that is known.
        self._waiting: list[int] = []
        self._untold: list[str | int] = []

    def push(self, token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Takes one more token, settles whether the completion ends with it, and then tells the stream."""
        self._take(token, logprob, top_ids, top_logprobs)
        self.tell()

    def tell(self) -> None:
        """Calls the stream with what it has not been told. A piece whose call raises counts as told."""
        while self._untold and self.stream is not None:
            self.stream(self.index, self._untold.pop(0))

    def _take(self, token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        if np.isnan(logprob):
            raise FloatingPointError(
                f"The model's logits for token {len(self.ids)} of completion {self.index} are not numbers (NaN)"
            )
        self.ids.append(token)
        self.total_logprob += logprob
        if self.params.logprobs is not None:
            pairs = list(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))[: self.params.logprobs]
            self.logprobs.append(TokenLogprob(token, logprob, tuple(pairs)))
        if token in self.ends:
            self._finish("stop")
            return
        self._waiting.append(token)
        if any(len(s) <= len(self._waiting) and tuple(self._waiting[-len(s) :]) == s for s in self._id_stops):
            matched = max(len(s) for s in self._id_stops if tuple(self._waiting[-len(s) :]) == s)
            del self._waiting[-matched:]
            self._finish("stop")
            return
        held = 0
        for stop in self._id_stops:
            for size in range(min(len(stop) - 1, len(self._waiting)), held, -1):
                if tuple(self._waiting[-size:]) == stop[:size]:
                    held = size
                    break
        if self._release(len(self._waiting) - held):
            return
        if len(self.ids) >= (self.params.max_new_tokens or 0):
            self._finish("length")

    def _release(self, count: int) -> bool:
        """Gives ``count`` waiting tokens to the text; True if a stop string ended it."""
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        for token in ready:
            if self._detokenizer is None:
                self._emit(token)
            elif self._say(self._detokenizer.push(token)):
                return True
        return False

    def _say(self, piece: str) -> bool:
        text, stopped = self._strings.push(piece)
        self._emit(text)
        if stopped:
            self.reason = "stop"
        return stopped

    def _finish(self, reason: Reason) -> None:
        if self._release(len(self._waiting)):
            return
        if self._detokenizer is not None:
            if self._say(self._detokenizer.flush()):
                return
            self._emit(self._strings.flush())
        self.reason = reason

    def _emit(self, piece: str | int) -> None:
        if isinstance(piece, str):
            self.pieces.append(piece)
        if self.stream is not None and piece != "":
            self._untold.append(piece)

    def end(self, reason: Reason) -> None:
        """Ends the completion where it stands; what was held back as a possible stop is given out."""
        if self.reason is None:
            self._finish(reason)
        self.tell()

    @property
    def rank(self) -> tuple[bool, float]:
        """Order among completions of a prompt: those that came to their end, then by their tokens' mean."""
        mean = self.total_logprob / len(self.ids) if self.ids else -math.inf
        return self.reason in ("cancelled", "deadline"), -mean

    def completion(self) -> Completion:
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

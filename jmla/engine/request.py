"""What an engine knows of a request, and what its caller holds."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jmla.completion import Completion, Output, chosen
from jmla.engine.prefixes import Node
from jmla.sampling import SamplingParams

if TYPE_CHECKING:
    from jmla.engine.engine import Engine


@dataclasses.dataclass(eq=False)
class Request:
    """A request from its submission to its end.

    Attributes:
        number: counts submissions.
        prompt: token ids.
        params: complete sampling options.
        output: collects what is made.
        priority: higher runs first.
        deadline: on the engine's clock; None for none.
        salt: prefixes are shared among requests of one salt.
        row: of the cache, -1 while it waits.
        length: tokens that its pages hold.
        pages: of the growing streams, in order.
        windows: ordinal of a page -> page of the window stream.
        node: of the last full page that is known to the index; None before the row is placed.
        noted: full pages that are known to the index.
        active: whether the last token, which its pages do not hold, is what the next step starts from.
        seat: something of its own for each time that it has a row: what was computed for another seat is void.
        made: token ids made; ``output`` gets them while the device goes on.
        coming: tokens at most that the device makes and that are not among ``made``.
        counted: whether it has ended, been counted and left.
        unsaid: what ``output`` has not got yet: tokens with log-probabilities and likeliest ids.
        known_pages: pages of its tokens that the index knew when it was placed, with a resume point or without.
        cached: tokens read from earlier requests' pages, when it was first placed.
        drafted: guesses of the draft block for it that were looked at.
        accepted: of those, the ones that were right.
        pieces: what iterating over the handle has not given out yet.
        source: another request for the same prompt, whose pages this one waits for.
        branches: requests that wait for this one's pages.
    """

    number: int
    prompt: np.ndarray
    params: SamplingParams
    output: Output
    priority: int
    deadline: float | None
    salt: str
    row: int = -1
    length: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    windows: dict[int, int] = dataclasses.field(default_factory=dict)
    node: Node | None = None
    noted: int = 0
    active: bool = False
    seat: object = None
    made: list[int] = dataclasses.field(default_factory=list)
    coming: int = 0
    counted: bool = False
    unsaid: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    known_pages: int = 0
    cached: int | None = None
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0
    error: BaseException | None = None
    pieces: list[str | int] = dataclasses.field(default_factory=list)
    source: "Request | None" = None
    branches: list["Request"] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and what was made."""
        return np.concatenate([self.prompt, np.asarray(self.made, np.int32)])

    @property
    def known(self) -> int:
        """Number of ``tokens``."""
        return len(self.prompt) + len(self.made)

    @property
    def left(self) -> int:
        """Tokens that it may still make for certain, beside those coming."""
        return (self.params.max_new_tokens or 0) - len(self.made) - self.coming

    @property
    def coming_decoded(self) -> int:
        """Tokens at most that its pages hold in addition once all that are coming are made."""
        return max(self.known + self.coming - 1 - self.length, 0)

    def ahead(self, steps: int) -> int:
        """Tokens at most that its pages hold in addition after a launch of ``steps`` behind all that are coming."""
        most = len(self.prompt) + (self.params.max_new_tokens or 0) - 1 - self.length
        return min(self.coming_decoded + steps, most)

    def leave_row(self) -> None:
        """As before it had a row."""
        self.row, self.length, self.noted, self.active = -1, 0, 0, False
        self.pages, self.windows, self.node = [], {}, None
        self.seat, self.coming = None, 0

    def let_branches_go(self) -> None:
        """Nobody waits for this request's pages any more."""
        for branch in self.branches:
            branch.source = None
        self.branches = []

    @property
    def ended(self) -> bool:
        return self.output.reason is not None or self.error is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Order among requests: priority, then age."""
        return -self.priority, self.number


class Handle:
    """A prompt that was submitted: iterate over its pieces as they are made, or wait for its result.

    Where several completions are drawn, ``token_ids`` and ``cached_tokens`` are those of the first.
    """

    def __init__(self, engine: "Engine", requests: Sequence[Request], params: SamplingParams):
        self._engine, self._requests, self._params = engine, tuple(requests), params

    @property
    def _request(self) -> Request:
        return self._requests[0]

    def __repr__(self) -> str:
        state = "ended" if self.done else "waiting" if self._request.row < 0 else "running"
        return f"Handle(request {self._request.number}, {state}, {len(self._request.output.ids)} tokens)"

    @property
    def done(self) -> bool:
        return all(request.ended for request in self._requests)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens made so far."""
        return tuple(self._request.output.ids)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were read from earlier requests' pages; None before the request has started."""
        return self._request.cached

    @property
    def preemptions(self) -> int:
        """How often requests gave their pages back and were computed again."""
        return sum(request.preempted for request in self._requests)

    @property
    def drafted_tokens(self) -> int:
        """Guesses of the draft block that were looked at."""
        return sum(request.drafted for request in self._requests)

    @property
    def accepted_tokens(self) -> int:
        """Of ``drafted_tokens``, those that were right."""
        return sum(request.accepted for request in self._requests)

    def cancel(self) -> None:
        """Ends the completion, or all of them, where they stand; their pages are back when this returns."""
        self._engine.cancel(self)

    def result(self) -> Completion:
        """Steps the engine until the request has ended.

        Raises:
            FloatingPointError: the model made NaN logits.
            RuntimeError: the engine knows nothing of the request any more.
        """
        while not self.done:
            self._step()
        for request in self._requests:
            if request.error is not None:
                raise request.error
        return chosen([request.output for request in self._requests], self._params)

    def _step(self) -> None:
        """Steps the engine; an engine without work that has not ended this request never will."""
        if not self._engine.step() and not self.done:
            raise RuntimeError(f"Expected {self!r} to be among its engine's requests, which are all ended")

    def __iter__(self) -> Iterator[str | int]:
        """Pieces of text (token ids without a tokenizer) as they become certain; steps the engine meanwhile.

        Raises:
            ValueError: several completions were asked for.
        """
        if len(self._requests) > 1:
            raise ValueError(f"Expected one completion to iterate over, {len(self._requests)} are drawn: use result()")
        return self._pieces()

    def _pieces(self) -> Iterator[str | int]:
        request = self._request
        while True:
            done = self.done  # before looking: another thread may step meanwhile
            while request.pieces:
                yield request.pieces.pop(0)
            if done:
                break
            self._step()
        if request.error is not None:
            raise request.error

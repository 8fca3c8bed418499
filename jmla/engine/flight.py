"""What the device was asked for and has not been looked at."""

import dataclasses

import numpy as np

from jmla.engine.line import Launch
from jmla.engine.request import Request


@dataclasses.dataclass
class Passenger:
    """A request in a flight.

    Attributes:
        at: its place among the rows of the flight's arrays.
        request: itself.
        seat: the one that it has: what was computed for another seat is void.
        most: tokens that it makes at most.
        record: where the device keeps its states if it comes to a page's end, -1 for nowhere.
    """

    at: int
    request: Request
    seat: object
    most: int
    record: int = -1


@dataclasses.dataclass
class Flight:
    """What the device was asked for and has not been looked at.

    Attributes:
        passengers: whom it makes tokens for.
        launch: which gives tokens, log-probabilities, and the likeliest ids with theirs if someone wants them,
            ``[n, ...]``; then ``[4, n]`` as ``jmla.engine.device`` says.
        decoding: whether rows go on from tokens that they have made; else these are the first behind prompts, and no
            page holds them.
    """

    passengers: list[Passenger]
    launch: Launch
    decoding: bool

    @property
    def ready(self) -> bool:
        return self.launch.done and self.launch.result()[-1].is_ready()

    def fetch(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Waits for the arrays; without likeliest ids there are none of each token."""
        *made, counted = (np.asarray(x) for x in self.launch.result())
        if len(made) == 2:
            made += [np.zeros((*made[0].shape, 0))] * 2
        return made, counted

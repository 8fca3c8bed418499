"""What the device holds, and the line of launches that change it, which another thread makes.

A launch takes as long as the host has to follow the device through a program: a loop whose end the device decides keeps
it to the last round. Meanwhile the host does other things, and puts further launches in the line.
"""

import atexit
import contextlib
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from jmla.decoding import Rows
from jmla.models import PagedCache

QUICK = 2e-4  # seconds; a thread that computes lets another go on after 5 ms by default

Call = Callable[[PagedCache, Rows], tuple[PagedCache, Rows, tuple[Any, ...]]]


class Launch:
    """A call that some thread makes, once."""

    def __init__(self, function: Callable[[], Any]):
        self._function: Callable[[], Any] | None = function
        self._lock = threading.Lock()
        self._begun = self._void = False
        self._over = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call, unless it was taken back."""
        with self._lock:
            if self._void or self._function is None:
                return
            self._begun, function, self._function = True, self._function, None
        try:
            self._result = function()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        finally:
            self._over.set()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def result(self) -> Any:
        """Waits for the call, and gives what it gave or raises what it raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def take_back(self) -> None:
        """Once this returns the call is over, or will never be made, however often the wait is interrupted."""
        with self._lock:
            self._void = True
        while self._begun and not self._over.is_set():
            with contextlib.suppress(KeyboardInterrupt):
                self._over.wait()


class Hands:
    """A thread for launches in their order, which ends with this object, and with the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Launch | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="jmla-launch", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def make(self, launch: Launch) -> None:
        """Has it made behind those before it."""
        self._calls.put(launch)


def _work(calls: "queue.SimpleQueue[Launch | None]") -> None:
    while (launch := calls.get()) is not None:
        launch.run()
        del launch  # else its results live on until the next one


class Line:
    """Cache and rows on the device, and the launches under way, each of which takes over what the one before left."""

    def __init__(self, cache: PagedCache, rows: Rows):
        self._cache, self._rows = cache, rows
        self._waiting: list[Launch] = []
        self._hands: Hands | None = None
        self._error: BaseException | None = None
        self._latest: Any = None  # of what the device was given last; None once all is done
        self._working_at = 0.0  # when it was given that, or seen to work
        self._rest = 0.0
        _LINES.add(self)

    def send(self, call: Call, *, work: bool, counted: bool) -> Launch:
        """Has another thread make a launch behind all others.

        Args:
            call: gives what cache and rows have become, and what else is asked for.
            work: whether it keeps the device busy.
            counted: whether the device's rest before it counts.
        """
        self._hands = self._hands or Hands()
        launch = Launch(lambda: self._make(call, work, counted))
        self._waiting = [other for other in self._waiting if not other.done]
        self._waiting.append(launch)
        self._hands.make(launch)
        return launch

    def make(self, call: Call, *, work: bool, counted: bool) -> Launch:
        """Makes a launch here and now, behind all others."""
        self.held()
        launch = Launch(lambda: self._make(call, work, counted))
        launch.run()
        launch.result()
        return launch

    def _make(self, call: Call, work: bool, counted: bool) -> tuple[Any, ...]:
        if self._error is not None:  # nobody knows what the device holds
            raise self._error
        try:
            if work and counted and self._ended():
                self._rest += time.perf_counter() - self._working_at
            self._cache, self._rows, results = call(self._cache, self._rows)
            for array in results:  # on their way to the host from now on
                array.copy_to_host_async()
            if work:
                self._latest, self._working_at = results[-1], time.perf_counter()
            return results
        except BaseException as error:
            self._error = error
            raise

    def held(self) -> tuple[PagedCache, Rows]:
        """What is there behind all launches; waits until they are made."""
        while self._waiting:
            self._waiting[0].result()
            self._waiting.pop(0)
        return self._cache, self._rows

    def hold(self, cache: PagedCache, rows: Rows) -> None:
        """Puts others in their place."""
        self.held()
        self._cache, self._rows = cache, rows

    def take_back(self) -> None:
        """Drops the launches that were not begun, and waits for the one that was."""
        for launch in reversed(self._waiting):
            launch.take_back()
        self._waiting, self._error, self._latest = [], None, None

    def rest(self) -> None:
        """Waits for all launches; from here the device's time is not counted."""
        self.held()
        self._latest = None

    def rests(self) -> bool:
        """Whether the device has done all that it was given."""
        return all(launch.done for launch in self._waiting) and self._ended()

    def _ended(self) -> bool:
        return self._latest is not None and self._latest.is_ready()

    def seen_working(self, until: float) -> None:
        """Notes that the device had work until a time, of ``time.perf_counter``."""
        self._working_at = max(self._working_at, until)

    def take_rest(self) -> float:
        """Seconds of rest that have come together since the last call."""
        found, self._rest = self._rest, 0.0
        return found

    def idle(self) -> bool:
        """Whether nothing is under way that anyone has to wait for."""
        return not self._waiting and self._latest is None


_LINES: "weakref.WeakSet[Line]" = weakref.WeakSet()


@atexit.register
def _end_launches() -> None:
    """No launch is under way when the process takes its devices down."""
    for line in list(_LINES):
        line.take_back()


_switching = threading.Lock()
_quick: list[float] = []  # the interval before, once for each who wants it short


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Inside it the thread that launches soon gets its turn where this one computes."""
    with _switching:
        _quick.append(_quick[0] if _quick else sys.getswitchinterval())
        sys.setswitchinterval(min(_quick[0], QUICK))
    try:
        yield
    finally:
        with _switching:
            before = _quick.pop()
            if not _quick:
                sys.setswitchinterval(before)

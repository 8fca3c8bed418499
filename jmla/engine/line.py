"""What the device holds, and the line of launches that change it, which another thread makes.

A launch takes as long as the host has to follow the device through a program: a loop whose end the device decides keeps
it to the last round. Meanwhile the host does other things, and puts further launches in the line. While there are any,
Python's threads take turns more often than they do by default.
"""

import atexit
import contextlib
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from jmla.decoding import Rows
from jmla.models import PagedCache

QUICK = 2e-4  # seconds after which a thread that computes lets another go on, 5 ms by default
LINGER = 0.05  # seconds without a launch, after which it is the default again

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
        """Waits for the call, and gives what it gave or raises what it raised.

        Raises:
            RuntimeError: it was taken back.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def take_back(self) -> None:
        """Once this returns the call is over, or will never be made, however often the wait is interrupted."""
        with self._lock:
            self._void = True
            if not self._begun:
                self._error = self._error or RuntimeError("Expected the result of a launch that was made: it was not")
                self._over.set()
        while self._begun and not self._over.is_set():
            with contextlib.suppress(KeyboardInterrupt):
                self._over.wait()


class Hands:
    """A thread for launches in their order, which ends with this object, and with the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Launch | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._calls,), name="jmla-launch", daemon=True)
        thread.start()
        self.ident = thread.ident
        weakref.finalize(self, self._calls.put, None)

    def make(self, launch: Launch) -> None:
        """Has it made behind those before it."""
        self._calls.put(launch)


def _work(calls: "queue.SimpleQueue[Launch | None]") -> None:
    quick = False
    while True:
        try:
            launch = calls.get(timeout=LINGER) if quick else calls.get()
        except queue.Empty:
            quick = _take_turns_quickly(False)
            continue
        if launch is None:
            break
        quick = quick or _take_turns_quickly(True)
        launch.run()
        del launch  # else its results live on until the next one
    if quick:
        _take_turns_quickly(False)


_turns = threading.Lock()
_before: list[float] = []  # the interval, for each thread with launches


def _take_turns_quickly(quick: bool) -> bool:
    """Whether the calling thread wants its turn soon; only of threads that no interrupt comes to. Returns the same."""
    with _turns:
        if quick:
            _before.append(_before[0] if _before else sys.getswitchinterval())
            sys.setswitchinterval(min(_before[0], QUICK))
        else:
            interval = _before.pop()
            if not _before:
                sys.setswitchinterval(interval)
    return quick


class Line:
    """Cache and rows on the device, and the launches under way, each of which takes over what the one before left."""

    def __init__(self, cache: PagedCache, rows: Rows):
        self._cache, self._rows = cache, rows
        self._waiting: list[Launch] = []
        self._hands: Hands | None = None
        self._error: BaseException | None = None
        self._latest: Any = None  # of what the device was given last; None once all is done
        self._clock = threading.Lock()  # of the next two
        self._working_at = 0.0  # when it was given that, or seen to work
        self._idle_seconds = 0.0
        _LINES.add(self)

    def send(self, call: Call, *, work: bool, since: float | None) -> Launch:
        """Has another thread make a launch behind all others.

        Args:
            call: gives what cache and rows have become, and what else is asked for.
            work: whether it keeps the device busy.
            since: from when the device can count as idle before it, in ``time.perf_counter``'s seconds; None: never.
        """
        self._hands = self._hands or Hands()
        launch = Launch(lambda: self._make(call, work, since))
        self._waiting = [other for other in self._waiting if not other.done]
        self._waiting.append(launch)
        self._hands.make(launch)
        return launch

    def make(self, call: Call, *, work: bool, since: float | None) -> Launch:
        """Makes a launch here and now, behind all others."""
        self.held()
        launch = Launch(lambda: self._make(call, work, since))
        launch.run()
        launch.result()
        return launch

    def _make(self, call: Call, work: bool, since: float | None) -> tuple[Any, ...]:
        if self._error is not None:  # nobody knows what the device holds
            raise self._error
        try:
            if work and since is not None and self._ended():
                with self._clock:
                    self._idle_seconds += max(time.perf_counter() - max(self._working_at, since), 0)
            self._cache, self._rows, results = call(self._cache, self._rows)
            for array in results:  # on their way to the host from now on
                array.copy_to_host_async()
            if work:
                self._latest = results[-1]
                self.seen_working(time.perf_counter())
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

    def finish(self) -> None:
        """Waits for all launches; until the next one the device does not count as idle."""
        self.held()
        self._latest = None

    def is_done(self) -> bool:
        """Whether the device has done all that it was given."""
        return all(launch.done for launch in self._waiting) and self._ended()

    def _ended(self) -> bool:
        return self._latest is not None and self._latest.is_ready()

    def seen_working(self, until: float) -> None:
        """Notes that the device had work until a time, of ``time.perf_counter``."""
        with self._clock:
            self._working_at = max(self._working_at, until)

    def take_idle_seconds(self) -> float:
        """The device's idle time since the last call."""
        with self._clock:
            found, self._idle_seconds = self._idle_seconds, 0.0
        return found

    def is_finished(self) -> bool:
        """Whether nothing is under way that anyone has to wait for."""
        return not self._waiting and self._latest is None

    def is_launching(self) -> bool:
        """Whether the calling thread is the one that makes launches: it must not wait for anybody."""
        return self._hands is not None and threading.get_ident() == self._hands.ident


_LINES: "weakref.WeakSet[Line]" = weakref.WeakSet()


@atexit.register
def _end_launches() -> None:
    """No launch is under way when the process takes its devices down."""
    for line in list(_LINES):
        line.take_back()

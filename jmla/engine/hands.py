"""Launches that another thread makes, while the one that asked for them does something else."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Launch:
    """A call that another thread makes, once."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._lock = threading.Lock()
        self._begun = self._void = False
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call, unless it was taken back."""
        with self._lock:
            if self._void:
                return
            self._begun = True
        try:
            self._result = self._function()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        finally:
            self._done.set()

    def result(self) -> Any:
        """Waits for the call, and gives what it gave or raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def take_back(self) -> None:
        """Once this returns the call is over, or will never be made, however often the wait is interrupted."""
        with self._lock:
            self._void = True
        while self._begun and not self._done.is_set():
            with contextlib.suppress(KeyboardInterrupt):
                self._done.wait()


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

"""Launches of another thread: made once, taken back or waited for, whatever interrupts the wait."""

import _thread
import gc
import subprocess
import sys
import threading
import time

import pytest

from jmla.engine.line import Hands, Launch


def made(function):
    hands, launch = Hands(), Launch(function)
    hands.make(launch)
    return hands, launch


def test_results_and_errors_come_back():
    hands, launch = made(lambda: (threading.current_thread().name, 7))
    assert launch.result() == ("jmla-launch", 7)
    failing = Launch(lambda: 1 / 0)
    hands.make(failing)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    again = Launch(lambda: 8)  # the thread goes on
    hands.make(again)
    assert again.result() == 8


def test_what_is_taken_back_is_over_or_never_begins():
    gate, seen = threading.Event(), []
    hands, first = made(lambda: (gate.wait(), seen.append(1)))
    second = Launch(lambda: seen.append(2))
    hands.make(second)
    second.take_back()
    threading.Timer(0.2, gate.set).start()
    while not first._begun:
        time.sleep(0.001)
    first.take_back()
    assert seen == [1]
    last = Launch(lambda: seen.append(3))
    hands.make(last)
    last.result()
    assert seen == [1, 3]
    never = Launch(lambda: seen.append(4))
    never.take_back()  # nobody has it
    never.run()
    assert seen == [1, 3]


def test_an_interrupted_wait_goes_on():
    gate, seen = threading.Event(), []
    _, launch = made(lambda: (gate.wait(), seen.append(1)))
    while not launch._begun:
        time.sleep(0.001)
    threading.Timer(0.1, _thread.interrupt_main).start()
    threading.Timer(0.4, gate.set).start()
    launch.take_back()
    assert seen == [1]


def test_the_thread_ends_with_its_owner():
    before = set(threading.enumerate())
    hands, launch = made(lambda: None)
    launch.result()
    (thread,) = [thread for thread in threading.enumerate() if thread not in before]
    del hands
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_launches_are_made_after_the_main_thread_has_ended():
    """Threads that serve on may outlive it; an executor of the standard library refuses work then."""
    code = """
import threading, time
from jmla.engine.line import Hands, Launch
hands = Hands()
def serve():
    threading.main_thread().join()
    launch = Launch(lambda: print("made", flush=True))
    hands.make(launch)
    launch.result()
threading.Thread(target=serve).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "made\n"


def test_what_was_taken_back_has_no_result():
    launch = Launch(lambda: 1)
    launch.take_back()
    with pytest.raises(RuntimeError, match="it was not"):
        launch.result()


def test_threads_take_turns_quickly_while_there_are_launches():
    usual = sys.getswitchinterval()
    gate = threading.Event()
    seen = []
    several = [made(lambda: (seen.append(sys.getswitchinterval()), gate.wait())) for _ in range(3)]
    while len(seen) < 3:
        time.sleep(0.001)
    assert max(seen) < usual
    gate.set()
    for _, launch in several:
        launch.result()
    deadline = time.monotonic() + 20
    while sys.getswitchinterval() != usual and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sys.getswitchinterval() == usual

"""Errors and interrupts in an engine whose launches another thread makes: they cost time, and nothing else."""

import dataclasses
import itertools
import threading
import time

import pytest

from jmla import SamplingParams
from jmla.engine import device
from tests.test_engine import MIXED, alone, check_all_back, make, prompt

ASKED = (
    (prompt(254), dataclasses.replace(MIXED[1], max_new_tokens=40, stop=[])),
    (prompt(300), SamplingParams(max_new_tokens=40, stop=[])),
)


@pytest.fixture(scope="module")
def warm():
    engine = make("v32")
    engine.warmup(progress=False)
    return engine


@pytest.fixture
def engine(warm):
    """One for each test to the eye: all before it was put right."""
    yield warm
    warm.run()
    assert not warm._broken
    assert warm._line.is_finished()
    check_all_back(warm)


def submitted(engine):
    return [engine.submit(tokens, sampling=sampling) for tokens, sampling in ASKED]


def check_results(engine, handles):
    for handle, (tokens, sampling) in zip(handles, ASKED, strict=True):
        assert handle.result() == alone("v32", tokens, sampling)


def failing(engine, monkeypatch, function, nth, after, error):
    """From now on the n-th launch of a function fails, after it has run or before."""
    run, calls = engine._programs.run, itertools.count(1)

    def once(called, key, *args):
        fails = called is function and next(calls) == nth
        if fails and after:
            run(called, key, *args)
        if fails:
            raise error("once")
        return run(called, key, *args)

    monkeypatch.setattr(engine._programs, "run", once)


@pytest.mark.parametrize("function", [device.place, device.prefill_rows, device.decode_rows])
@pytest.mark.parametrize(("nth", "after"), [(1, True), (2, False)])
def test_a_launch_that_fails_is_said_once(engine, monkeypatch, function, nth, after):
    failing(engine, monkeypatch, function, nth, after, MemoryError)
    handles = submitted(engine)
    errors = 0
    while engine.busy:
        try:
            engine.step()
        except MemoryError:
            errors += 1
    assert errors == 1
    check_results(engine, handles)


def decoding_fails(engine, monkeypatch):
    """Two requests whose next launch has failed, which nobody knows yet."""
    handles = submitted(engine)
    while not all(handle.token_ids for handle in handles):
        engine.step()
    failing(engine, monkeypatch, device.decode_rows, 1, True, MemoryError)
    engine.step()
    while not engine._line.is_done():
        time.sleep(0.001)
    return handles


def test_a_failed_launch_that_nobody_needs_any_more_is_no_error(engine, monkeypatch):
    for handle in decoding_fails(engine, monkeypatch):
        handle.cancel()
    assert engine.free_pages == engine._pages.size
    check_results(engine, submitted(engine))


def test_a_failed_launch_shows_in_a_warm_up_too(engine, monkeypatch):
    handles = decoding_fails(engine, monkeypatch)
    with pytest.raises(MemoryError):
        engine.warmup(progress=False)
    check_results(engine, handles)


class Interrupt(KeyboardInterrupt):
    pass


def interrupting(monkeypatch, owner, name, nth=1, after=True):
    """The n-th call of a function is interrupted, at its end or before it begins."""
    call, calls = getattr(owner, name), itertools.count(1)

    def once(*args, **options):
        interrupted = next(calls) == nth
        if interrupted and not after:
            raise Interrupt
        result = call(*args, **options)
        if interrupted:
            raise Interrupt
        return result

    monkeypatch.setattr(owner, name, once)


RECOVERY = [("_line", "take_back"), (None, "_open_pools"), (None, "_wait_again"), ("_line", "held")]


@pytest.mark.parametrize(("part", "name"), RECOVERY)
@pytest.mark.parametrize(("nth", "after"), [(1, False), (1, True), (2, True)])
def test_another_interrupt_while_one_is_put_right(engine, monkeypatch, part, name, nth, after):
    handles = submitted(engine)
    while not all(handle.token_ids for handle in handles):
        engine.step()
    with monkeypatch.context() as patches:
        interrupting(patches, engine, "_settle", after=False)
        interrupting(patches, engine if part is None else getattr(engine, part), name, nth, after)
        with pytest.raises(Interrupt):
            engine.step()
    check_results(engine, handles)


@pytest.mark.parametrize("name", ["_leave", "_release", "_forget_row", "_count"])
def test_an_interrupt_while_a_request_is_cancelled(engine, monkeypatch, name):
    first, second = submitted(engine)
    while not (first.token_ids and second.token_ids):
        engine.step()
    with monkeypatch.context() as patches:
        interrupting(patches, engine, name, after=False)
        with pytest.raises(Interrupt):
            first.cancel()
    engine.run()
    assert first.done
    assert second.result() == alone("v32", *ASKED[1])


def test_a_cancellation_on_the_thread_of_launches_waits_for_nobody(engine, monkeypatch):
    """As of a finaliser that the collector of garbage runs there."""
    first, second = submitted(engine)
    while not first.token_ids:
        engine.step()
    run, seen = engine._programs.run, []

    def cancelling(*args):
        if not seen:
            seen.append(threading.current_thread().name)
            first.cancel()
        return run(*args)

    monkeypatch.setattr(engine._programs, "run", cancelling)
    engine.run()
    assert seen == ["jmla-launch"]
    assert first.result().finish_reason == "cancelled"
    assert second.result() == alone("v32", *ASKED[1])

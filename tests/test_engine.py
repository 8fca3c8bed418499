"""The engine: every request's tokens are those it would get alone, and every page comes back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmla
from jmla import SamplingParams
from jmla.engine import Engine
from jmla.models import make_model
from jmla.models.random import init_random
from jmla.models.spec import PAGE_TOKENS
from tests.tiny import V4, tiny_model

FAMILIES = ("v4", "v32", pytest.param("glm", marks=pytest.mark.slow))
BASE = np.random.default_rng(0).integers(2, 96, 4200).astype(np.int32)


def prompt(length, fork=None):
    """The first ``length`` tokens of one text, or of one that leaves it after ``fork`` tokens."""
    tokens = BASE[:length].copy()
    if fork is not None:
        tokens[fork:] = (tokens[fork:] - 2 + 17) % 94 + 2
    return tokens


@functools.cache
def model(family):
    return tiny_model(family, deterministic=True)


@functools.cache
def _alone(family, tokens, sampling):
    return jmla.generate(model(family), [np.frombuffer(tokens, np.int32)], sampling=sampling)[0]


def alone(family, tokens, sampling):
    return _alone(family, np.asarray(tokens, np.int32).tobytes(), sampling)


def check_all_back(engine):
    assert not engine.busy
    assert engine.free_pages == engine._pages.size
    engine.forget_prefixes()
    for pool in (engine._pages, engine._windows, engine._records):
        assert pool is None or (pool.free == pool.size and not pool.owners.any())
    assert (engine._table == -1).all()
    assert engine._window_table is None or (engine._window_table == -1).all()


SHAPES = {"max_requests": 2, "pages": 8, "max_seq_len": 512, "prefill_chunk": 256}  # one set, compiled once


def make(family, **options):
    return Engine(model(family), **SHAPES | options)


GREEDY = SamplingParams(max_new_tokens=9)
MIXED = (
    GREEDY,
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=5, logprobs=2),
    SamplingParams(max_new_tokens=7, temperature=0.8, top_p=0.9, seed=1, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(max_new_tokens=1),
)


def check_tokens_are_those_of_a_request_alone(family, **options):
    """Prompts that share beginnings, with pages for one and a half of them, twice over; what the engine counted."""
    prompts = [prompt(254), prompt(254, fork=200), prompt(300), prompt(300, fork=270), prompt(490, fork=256)]
    engine = make(family, **options)
    away = [engine._pages.take() for _ in range(5)]
    for _ in range(2):
        handles = [engine.submit(p, sampling=MIXED[i % 4]) for i, p in enumerate(prompts)]
        engine.run()
        for i, (handle, tokens) in enumerate(zip(handles, prompts, strict=True)):
            assert handle.result() == alone(family, tokens, MIXED[i % 4]), i
    assert engine.stats.cached_tokens >= 256
    assert engine.stats.preempted > 0
    assert engine.stats.finished == 10
    for page in away:
        engine._pages.release(page)
    check_all_back(engine)
    return engine.stats


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v32", "v4", "glm"])
def test_tokens_are_those_of_a_request_alone(family):
    check_tokens_are_those_of_a_request_alone(family)


CUTS = (127, 255, 256, 257, 300)


@pytest.mark.parametrize("family", ["v4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v32", "glm"))])
def test_f10_a_prefix_hit_gives_the_bits_of_a_cold_start(family):
    """At cuts around pages and windows, another prompt used the row. No page is reused of which a part differs."""
    ask = SamplingParams(max_new_tokens=6, logprobs=3)
    warm = make(family)
    warm.submit(prompt(490), sampling=ask).result()
    for cut in CUTS:
        tokens = prompt(490, fork=cut)
        warm.submit(prompt(300, fork=0), sampling=ask).result()
        handle = warm.submit(tokens, sampling=ask)
        assert handle.result() == alone(family, tokens, ask), cut
        assert handle.cached_tokens == cut // PAGE_TOKENS * PAGE_TOKENS, cut
    check_all_back(warm)


@pytest.mark.slow
def test_a_prefix_hit_at_every_cut_gives_the_bits_of_a_cold_start():
    """Forks after 1 to 600 tokens, of a V4 with the published ratios and window; other prompts use the rows between."""
    config = dataclasses.replace(V4, sliding_window=128, hca_ratio=128)
    params = jax.tree.map(jnp.asarray, init_random(config, "float32", seed=3))
    true = make_model(config, params, dtype="float32", kv_layout="float32", deterministic=True)
    ask = SamplingParams(max_new_tokens=2, logprobs=20)
    warm, cold = (Engine(true, **SHAPES | {"max_seq_len": 1024}, prefix_reuse=reuse) for reuse in (True, False))
    for cut in range(1, 601):
        tokens = prompt(608, fork=cut)
        warm.submit(prompt(608), max_new_tokens=1).result()
        if cut % 3 == 0:
            warm.submit(prompt(20, fork=0), sampling=ask).result()
        handle = warm.submit(tokens, sampling=ask)
        assert handle.result() == cold.submit(tokens, sampling=ask).result(), cut
        assert handle.cached_tokens == cut // PAGE_TOKENS * PAGE_TOKENS, cut
    check_all_back(warm)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "first"), [("v4", 4000), ("v32", 2330)])
def test_f11_the_second_turn_of_a_chat_reads_the_first(family, first):
    """All of its whole pages, decoded ones too: nine tenths and more."""
    engine = Engine(tiny_model(family, deterministic=False), max_requests=1)
    said = engine.submit(prompt(first - 100), max_new_tokens=100, sampling=SamplingParams(stop=[])).result()
    held = first - 100 + len(said.token_ids) - 1  # the last token was given out, but not read
    turn = np.concatenate([prompt(first - 100), np.asarray(said.token_ids, np.int32), prompt(40, fork=0)])
    handle = engine.submit(turn, max_new_tokens=4)
    handle.result()
    assert handle.cached_tokens == held // PAGE_TOKENS * PAGE_TOKENS >= 0.9 * held


def test_f9_prompts_just_above_a_page_hit_and_tenants_do_not_share():
    engine = make("v32")
    for salt, cached in (("a", 0), ("b", 0), ("a", 256), ("", 0)):
        handle = engine.submit(prompt(300), max_new_tokens=2, salt=salt)
        handle.result()
        assert handle.cached_tokens == cached


def test_without_reuse_nothing_is_kept():
    engine = make("v32", prefix_reuse=False)
    for _ in range(2):
        handle = engine.submit(prompt(300), sampling=GREEDY)
        assert handle.result() == alone("v32", prompt(300), GREEDY)
        assert handle.cached_tokens == 0
        assert engine._pages.free == engine._pages.size
    spare = Engine(model("v4"), max_requests=1, pages=1, prefix_reuse=False)
    assert not any("boundaries" in name for name in spare._cache.nbytes)


def test_cancelling_gives_pages_back_and_leaves_the_others_alone():
    engine = make("v32", prefix_reuse=False)
    long = SamplingParams(max_new_tokens=60)
    kept, gone, waiting = (engine.submit(prompt(300, fork=f), sampling=long) for f in (None, 1, 2))
    for _ in range(4):
        engine.step()
    assert gone.token_ids
    assert not waiting.token_ids
    held = engine.free_pages
    gone.cancel()
    assert engine.free_pages == held + 2
    assert gone.done
    assert gone.result().finish_reason == "cancelled"
    waiting.cancel()
    gone.cancel()
    assert waiting.result().token_ids == ()
    assert kept.result() == alone("v32", prompt(300), long)
    kept.cancel()
    assert engine.stats.cancelled == 2
    assert kept.result().finish_reason == "length"
    check_all_back(engine)


def test_a_deadline_ends_a_request_with_what_it_has():
    now = [0.0]
    engine = make("v32", decode_steps=2, clock=lambda: now[0])
    late, _ = (engine.submit(prompt(20), max_new_tokens=50, deadline=10) for _ in range(2))
    behind = engine.submit(prompt(20), max_new_tokens=50, deadline=5)
    engine.step()
    engine.step()
    now[0] = 10.0
    engine.step()
    assert late.result().finish_reason == behind.result().finish_reason == "deadline"
    assert 0 < len(late.token_ids) < 50
    assert behind.token_ids == ()
    check_all_back(engine)


def test_higher_priority_runs_first_and_takes_the_place_of_lower():
    engine = make("v32", decode_steps=2)
    order = []
    engine.submit(prompt(20), max_new_tokens=60, priority=2)  # keeps the other row
    low = engine.submit(prompt(20), sampling=GREEDY, callback=lambda _: order.append("low"))
    engine.step()
    middle = engine.submit(prompt(30), sampling=GREEDY, callback=lambda _: order.append("middle"))
    high = engine.submit(prompt(40), sampling=GREEDY, priority=1, callback=lambda _: order.append("high"))
    engine.run()
    said = "".join(name[0] for name in order)
    assert said.index("h") > said.index("l")
    assert said.rindex("h") < said.rindex("l") < said.index("m")
    assert low.preemptions == 1
    for handle, length in ((low, 20), (middle, 30), (high, 40)):
        assert handle.result() == alone("v32", prompt(length), GREEDY)


def test_callbacks_may_cancel_and_fail():
    engine = make("v32")
    handles = {}

    def broken(_):
        raise ZeroDivisionError("from a callback")

    handles["broken"] = engine.submit(prompt(20), sampling=GREEDY, callback=broken)
    handles["other"] = engine.submit(prompt(30), sampling=GREEDY, callback=lambda _: handles["cancelled"].cancel())
    handles["cancelled"] = engine.submit(prompt(40), max_new_tokens=40)
    engine.run()
    with pytest.raises(ZeroDivisionError, match="from a callback"):
        handles["broken"].result()
    assert handles["other"].result() == alone("v32", prompt(30), GREEDY)
    assert handles["cancelled"].result().finish_reason == "cancelled"
    assert engine.stats.failed == 1
    check_all_back(engine)


class _Interrupted(BaseException):
    pass


@pytest.mark.parametrize("family", [pytest.param("v4", marks=pytest.mark.slow), "v32"])
def test_an_interrupt_costs_nothing_but_time(family):
    """Requests are computed again from the tokens they have given out, whatever the device has done meanwhile."""
    engine = make(family)
    interrupts = []

    def interrupt(token):
        interrupts.append(token)
        raise _Interrupted

    first = engine.submit(prompt(254), sampling=MIXED[1], callback=interrupt)
    second = engine.submit(prompt(300), sampling=MIXED[2])
    last = engine.submit(prompt(20), max_new_tokens=1, callback=interrupt)
    while engine.busy:
        seen = len(interrupts)
        try:
            engine.step()
        except _Interrupted:
            assert len(interrupts) == seen + 1
    assert tuple(interrupts) != ()
    assert sorted(interrupts) == sorted(first.token_ids + last.token_ids)
    assert last.result().token_ids == alone(family, prompt(20), SamplingParams(max_new_tokens=1)).token_ids
    assert engine.stats.made_tokens == sum(len(handle.token_ids) for handle in (first, second, last))
    assert second.result() == alone(family, prompt(300), MIXED[2])
    assert first.result() == alone(family, prompt(254), MIXED[1])
    check_all_back(engine)


def test_a_failing_callback_at_the_end_of_a_request_harms_no_other():
    engine = make("v32")
    whole = alone("v32", prompt(20), GREEDY).token_ids
    later = []

    def broken(piece):
        if later:
            raise ZeroDivisionError("from a callback")

    held = engine.submit(prompt(20), sampling=GREEDY, stop=[[*whole[:3], 0]], callback=broken)  # keeps tokens back
    other = engine.submit(prompt(30), sampling=GREEDY)
    engine._steps = 2
    engine.step()
    later.append(True)
    held.cancel()
    with pytest.raises(ZeroDivisionError):
        held.result()
    assert other.result() == alone("v32", prompt(30), GREEDY)
    check_all_back(engine)


def test_stops_pieces_and_several_prompts():
    whole = alone("v32", prompt(20), GREEDY).token_ids
    engine = make("v32")
    stopped = engine.submit(prompt(20), sampling=GREEDY, stop=[list(whole[2:4])])
    assert list(stopped) == list(whole[:2])
    assert stopped.result().finish_reason == "stop"
    assert stopped.result().token_ids == whole[:4]
    lengths = (20, 30, 256)
    several = engine.generate([prompt(n) for n in lengths], sampling=GREEDY)
    assert several == [alone("v32", prompt(n), GREEDY) for n in lengths]
    check_all_back(engine)


@pytest.mark.slow
def test_odd_sizes():
    """Chunks that fit no page, a budget smaller than the batch, one page, tables that end within a page."""
    options = {"pages": 1, "max_seq_len": 250, "prefill_chunk": 77, "token_budget": 1, "decode_steps": 1}
    engine = make("v32", **options)
    handles = [engine.submit(prompt(n), sampling=GREEDY) for n in (240, 12)]
    engine.run()
    assert [h.result() for h in handles] == [alone("v32", prompt(n), GREEDY) for n in (240, 12)]
    check_all_back(engine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_requests": 0}, "max_requests=0"),
        ({"max_seq_len": 5000}, "max_seq_len=5000"),
        ({"pages": 0}, "pages=0"),
        ({"resume_points": -1}, "resume_points=-1"),
        ({"prefill_chunk": 513}, "prefill_chunk=513"),
        ({"token_budget": 0}, "token_budget=0"),
        ({"decode_steps": 17}, "decode_steps=17"),
        ({"prefix_reuse": 1}, "prefix_reuse=1"),
        ({"clock": 5}, "clock=5"),
        ({"pages": 2**31 - 1}, r"2\*\*31 - 1 slots"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        Engine(model("v32"), **options)


def test_f18_bad_requests():
    """What no pool holds is refused when it is submitted."""
    engine = Engine(model("v32"), max_requests=1, pages=2, max_seq_len=1024)
    with pytest.raises(ValueError, match="max_seq_len=512, got 520 together"):  # what two pages hold
        engine.submit(prompt(500), max_new_tokens=20)
    with pytest.raises(ValueError, match="token ids in 0"):
        engine.generate([[5], [96]])
    with pytest.raises(ValueError, match=r"token ids in 0\.\.95"):
        engine.submit([96])
    with pytest.raises(TypeError, match="salt=5"):
        engine.submit([5], salt=5)
    with pytest.raises(TypeError, match="callback=5"):
        engine.submit([5], callback=5)
    with pytest.raises(ValueError, match="priority='high'"):
        engine.submit([5], priority="high")
    with pytest.raises(ValueError, match="deadline=-1"):
        engine.submit([5], deadline=-1)
    with pytest.raises(TypeError, match=r"jmla\.Model"):
        Engine("path")
    other = make("v32").submit([5])
    for stranger in (other, "handle"):
        with pytest.raises(TypeError, match="a Handle that this engine gave out"):
            engine.cancel(stranger)
    assert not engine.busy
    assert engine.stats.submitted == 0

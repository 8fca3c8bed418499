"""Branches of a sequence go on exactly as it would, and nobody notices the others."""

import numpy as np
import pytest

import jmla
from jmla import SamplingParams
from tests.test_engine import alone, check_all_back, make, model, prompt


def read(family, tokens, cache=None, rows=1, row=0):
    """Logits behind ``tokens`` in one row, and the cache; the other rows stand still."""
    chosen = model(family)
    cache = jmla.init_cache(chosen, 1, 1024) if cache is None else cache
    for start in range(0, len(tokens), 256):
        piece = tokens[start : start + 256]
        ids, counts = np.zeros((rows, 256), np.int32), np.zeros(rows, np.int32)  # one width, compiled once
        ids[row, : len(piece)], counts[row] = piece, len(piece)
        logits, cache = jmla.prefill(chosen, ids, counts, cache)
    return np.asarray(logits[row]), cache


@pytest.mark.parametrize("length", [256, *(pytest.param(length, marks=pytest.mark.slow) for length in (130, 300))])
@pytest.mark.parametrize("family", ["v4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v32", "glm"))])
def test_branches_go_on_exactly(family, length):
    """Mid group, mid window, at the end of a page and behind it; the parent goes on in between, and first."""
    _, cache = read(family, prompt(length))
    forked = jmla.fork(cache, 0, 2)
    ends = [prompt(40, fork=0)[i : 40 - i] for i in range(3)]
    for row in (1, 0, 2):
        got, forked = read(family, ends[row], forked, rows=3, row=row)
        want, _ = read(family, np.concatenate([prompt(length), ends[row]]))
        np.testing.assert_array_equal(got, want, str(row))
    got, _ = read(family, ends[0], cache)  # the cache that was given is what it was
    want, _ = read(family, np.concatenate([prompt(length), ends[0]]))
    np.testing.assert_array_equal(got, want)


def test_full_pages_are_shared():
    cache = read("v32", prompt(600))[1]
    forked = jmla.fork(cache, 0, 3)
    table = np.asarray(forked.table)
    assert (table[1:, :2] == table[0, :2]).all()
    assert len(np.unique(table[:, 2:])) == table[:, 2:].size
    assert forked.pools["latent"].shape[0] == cache.pools["latent"].shape[0] * (4 + 3 * 2) // 4


@pytest.mark.slow
def test_drafts_of_branches_are_their_own():
    """Forked at the end of a page, whose last draft row depends on the token that each row chooses."""
    chosen = model("v32")
    ids = prompt(256)[None]

    def start():
        _, hidden, cache = jmla.prefill(
            chosen, ids, np.array([256]), jmla.init_cache(chosen, 1, 512), return_hidden=True
        )
        _, _, cache = jmla.draft(chosen, hidden[:, :255], ids[:, 1:], cache)
        return hidden[:, 255], cache

    def go_on(tokens, hidden, cache):
        first, _, cache = jmla.draft(chosen, hidden, tokens, cache)
        _, hidden, cache = jmla.decode(chosen, tokens, cache, return_hidden=True)
        second, _, _ = jmla.draft(chosen, hidden, tokens, cache)
        return np.asarray(first), np.asarray(second)

    hidden, cache = start()
    both = go_on(np.array([11, 50]), np.repeat(hidden, 2, axis=0), jmla.fork(cache, 0))
    for row, token in enumerate((11, 50)):
        for got, want in zip(both, go_on(np.array([token]), *start()), strict=True):
            np.testing.assert_array_equal(got[row], want[0])


@pytest.mark.slow
def test_a_completion_that_has_not_begun_is_not_the_best():
    now = [0.0]
    engine = make("v32", clock=lambda: now[0])
    ask = SamplingParams(max_new_tokens=6, temperature=1.0, best_of=4)
    handle = engine.submit(prompt(20), sampling=ask, deadline=5)
    while sum(request.ended for request in handle._requests) < 2:
        engine.step()
    now[0] = 9.0
    assert len(handle.result().token_ids) == 6
    check_all_back(engine)


def test_bad_forks():
    cache = jmla.init_cache(model("v32"), 2, 256)
    for row in (2, -1, True, 0.5):
        with pytest.raises(ValueError, match=r"Expected row=.* in 0\.\.1"):
            jmla.fork(cache, row)
    with pytest.raises(ValueError, match="Expected n=0"):
        jmla.fork(cache, 0, 0)
    with pytest.raises(TypeError, match="PagedCache"):
        jmla.fork({}, 0)
    _, kept = jmla.decode(model("v32"), np.zeros(2, np.int32), cache)
    with pytest.raises(jmla.CacheConsumedError):
        jmla.fork(cache, 0)
    jmla.fork(kept, 1)


SLOW = [("v32", 300), ("v4", 1), ("v4", 300), ("glm", 1), ("glm", 300)]  # the engine's machine has long ones too
DRAWN = SamplingParams(max_new_tokens=10, temperature=1.0, seed=3, n=3, logprobs=0)


@pytest.mark.parametrize(
    ("family", "length"),
    [("v32", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_choices_are_those_of_requests_alone(family, length):
    engine = make(family, max_requests=4, pages=12)
    other = engine.submit(prompt(270, fork=0), sampling=SamplingParams(max_new_tokens=20))
    handle = engine.submit(prompt(length), sampling=DRAWN)
    result = handle.result()
    want = tuple(alone(family, prompt(length), DRAWN.choice(i)) for i in range(3))
    assert result.choices == want
    assert result.token_ids == want[0].token_ids
    assert len({c.token_ids for c in result.choices}) == 3
    if length > 1:  # the branches read all but the last token
        assert engine.stats.cached_tokens >= 2 * (length - 1)
    assert other.result() == alone(family, prompt(270, fork=0), SamplingParams(max_new_tokens=20))
    check_all_back(engine)


@pytest.mark.slow
def test_choices_without_room_or_reuse():
    """Two rows for three choices: the third computes for itself. Without an index branches share all the same."""
    for options, cached in (
        ({"max_requests": 2}, 256 + 299),
        ({"prefix_reuse": False, "max_requests": 4, "pages": 12}, 598),
    ):
        engine = make("v32", **options)
        result = engine.submit(prompt(300), sampling=DRAWN).result()
        assert result.choices == tuple(alone("v32", prompt(300), DRAWN.choice(i)) for i in range(3))
        assert engine.stats.cached_tokens == cached
        check_all_back(engine)


def test_the_best_of_several():
    engine = make("v32", max_requests=4, pages=12)
    ask = SamplingParams(max_new_tokens=10, temperature=1.0, seed=3, n=2, best_of=4, logprobs=0)
    result = engine.submit(prompt(40), sampling=ask).result()
    drawn = [alone("v32", prompt(40), ask.choice(i)) for i in range(4)]
    ranked = sorted(drawn, key=lambda c: -np.mean([t.logprob for t in c.logprobs]))
    assert result.choices == tuple(ranked[:2])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v4"])
def test_a_parent_that_leaves_lets_its_branches_go(family):
    engine = make(family, max_requests=4, pages=12)
    handle = engine.submit(prompt(300), sampling=DRAWN)
    engine.step()
    engine._end(handle._requests[0], "cancelled")
    engine.run()
    for i in (1, 2):
        want = alone(family, prompt(300), DRAWN.choice(i))
        assert handle._requests[i].output.completion() == want
    handle = engine.submit(prompt(300), sampling=DRAWN)
    engine.step()
    handle.cancel()
    assert handle.done
    check_all_back(engine)


@pytest.mark.slow
def test_generate_gives_choices():
    result = jmla.generate(model("v32"), [prompt(300), prompt(20)], sampling=[DRAWN, SamplingParams(max_new_tokens=4)])
    assert result[0].choices == tuple(alone("v32", prompt(300), DRAWN.choice(i)) for i in range(3))
    assert result[1] == alone("v32", prompt(20), SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 2}, "temperature above 0"),
        ({"n": 3, "best_of": 2, "temperature": 1.0}, "best_of=2 to be at least n=3"),
        ({"best_of": 2}, "temperature above 0"),
    ],
)
def test_bad_choices(options, said):
    ask = SamplingParams(max_new_tokens=2, **options)
    with pytest.raises(ValueError, match=said):
        make("v32").submit(prompt(4), sampling=ask)
    with pytest.raises(ValueError, match=said):
        jmla.generate(model("v32"), prompt(4), sampling=ask)


def test_one_listener_hears_one_completion():
    with pytest.raises(ValueError, match="no callback"):
        make("v32").submit(prompt(4), sampling=DRAWN, callback=print)
    with pytest.raises(ValueError, match="no stream"):
        jmla.generate(model("v32"), prompt(4), sampling=DRAWN, stream=print)
    with pytest.raises(ValueError, match=r"use result\(\)"):
        iter(make("v32").submit(prompt(4), sampling=DRAWN))
    several = SamplingParams(n=3, temperature=1.0)
    with pytest.raises(ValueError, match="n=3 and best_of=None"):
        jmla.generate_tokens(model("v32"), np.ones((1, 4), np.int32), [4], None, max_new_tokens=2, sampling=several)


def test_seeds_of_choices_differ():
    seeds = {SamplingParams(seed=seed, n=4).choice(i).seed for seed in range(50) for i in range(50)}
    assert len(seeds) == 2500
    assert SamplingParams(seed=7, n=2).choice(0).seed == 7

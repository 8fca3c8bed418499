"""The sampler against a plain NumPy one, its independence of batch mates, and its statistics."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla.sampling import DEFAULTS, History, RowParams, SamplingParams, sample, top_logprobs

VOCAB = 50


@jax.jit
def run(logits, steps, params, history):
    return sample(logits, steps, params, history)


@jax.jit
def run_vectorised(logits, steps, params, history):
    return sample(logits, steps, params, history, deterministic=False)


def history(rows, prompt=(), counts=None):
    seen = np.zeros((rows, VOCAB), bool)
    seen[:, list(prompt)] = True
    made = np.zeros((rows, VOCAB), np.int32)
    for token, count in (counts or {}).items():
        made[:, token] = count
    return History(jnp.asarray(seen), jnp.asarray(made))


def draw(logits, options, count=4000, fn=run, **seen):
    """Draws ``count`` tokens from one row's logits, each at another step."""
    params = RowParams.pack([options] * count)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, VOCAB))
    return np.asarray(fn(rows, jnp.arange(count), params, history(count, **seen))[0])


def allowed(logits, options):
    """Which tokens the filters leave, written as one would on paper."""
    scaled = np.asarray(logits, np.float64) / options.temperature
    order = sorted(range(VOCAB), key=lambda i: (-scaled[i], i))
    if options.top_k:
        order = order[: options.top_k]
    weight = np.exp(scaled[order] - scaled[order[0]])
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]]) / weight.sum()
    kept = {i for i, b in zip(order, before, strict=True) if b < options.top_p}
    best = np.exp(scaled - scaled.max())
    return {i for i in kept if best[i] >= options.min_p}


LOGITS = np.asarray(jax.random.normal(jax.random.key(3), (VOCAB,))) * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    ],
    ids=str,
)
def test_distribution_is_the_filtered_softmax(options):
    params = SamplingParams(**{"temperature": 1.0, "seed": 11} | options).over(DEFAULTS)
    tokens = draw(LOGITS, params)
    expected = np.exp(LOGITS / params.temperature)
    kept = allowed(LOGITS, params)
    expected[[i for i in range(VOCAB) if i not in kept]] = 0
    expected /= expected.sum()
    seen = np.bincount(tokens, minlength=VOCAB) / len(tokens)
    assert set(np.flatnonzero(seen)) <= kept
    # five standard deviations of a binomial share
    assert (np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(tokens)) + 1e-9).all()


def test_ties_at_the_cut_go_to_the_lower_id():
    logits = np.zeros(VOCAB)
    assert set(draw(logits, SamplingParams(temperature=1.0, top_k=3), 500)) == {0, 1, 2}
    assert set(draw(logits, SamplingParams(temperature=1.0, top_p=0.1), 500)) == {0, 1, 2, 3, 4}


def test_greedy_is_the_first_maximum():
    logits = np.zeros(VOCAB)
    logits[[9, 30]] = 1
    assert set(draw(logits, SamplingParams(temperature=0.0, seed=4), 10)) == {9}


def test_tiny_temperature_does_not_overflow():
    assert set(draw(LOGITS * 100, SamplingParams(temperature=1e-30), 50)) == {int(LOGITS.argmax())}


def test_huge_penalties_do_not_overflow():
    """They move logits to the ends of float32; differences of infinities would be NaN."""
    largest = float(np.finfo(np.float32).max)
    logits = np.where(np.arange(VOCAB) == 17, 0.0, np.where(np.arange(VOCAB) == 9, 2.0, -np.inf))
    for options in ({"frequency_penalty": -largest}, {"repetition_penalty": 1.2e-38}):
        params = SamplingParams(temperature=1.0, **options)
        assert set(draw(logits, params, 50, counts={9: 3})) == {9}
    params = SamplingParams(temperature=1.0, repetition_penalty=largest)
    assert set(draw(logits - 5, params, 50, counts={9: 3, 17: 1})) == {9, 17}


def test_minus_infinity_is_never_drawn():
    logits = np.where(np.arange(VOCAB) == 17, 0.0, -np.inf)
    assert set(draw(logits, SamplingParams(temperature=5.0), 50)) == {17}


def test_penalties():
    logits = np.zeros(VOCAB)
    logits[:4] = [2.0, 1.9, -0.1, 1.8]
    greedy = SamplingParams(temperature=0.0)
    assert draw(logits, greedy, 1, prompt=[0])[0] == 0
    # 2.0 / 1.06 = 1.887 < 1.9
    assert draw(logits, replace(greedy, repetition_penalty=1.06), 1, prompt=[0])[0] == 1
    # a prompt token is not a token made
    assert draw(logits, replace(greedy, presence_penalty=5.0), 1, prompt=[0])[0] == 0
    # 2.0 - 0.15 < 1.9, whatever the count
    assert draw(logits, replace(greedy, presence_penalty=0.15), 1, counts={0: 3})[0] == 1
    # 1.88 against 1.86; 1.82 against 1.84; 1.7 and 1.7 against 1.8
    assert draw(logits, replace(greedy, frequency_penalty=0.04), 1, counts={0: 3, 1: 1})[0] == 0
    assert draw(logits, replace(greedy, frequency_penalty=0.06), 1, counts={0: 3, 1: 1})[0] == 1
    assert draw(logits, replace(greedy, frequency_penalty=0.1), 1, counts={0: 3, 1: 2})[0] == 3
    # negative logits move away from zero
    negative = np.full(VOCAB, -1.0)
    assert draw(negative, replace(greedy, repetition_penalty=2.0), 1, prompt=[0, 1])[0] == 2


def test_history_counts_prompt_and_tokens_made():
    start = History.start(jnp.array([[3, 4, 9], [5, 6, 7]]), jnp.array([2, 0]), VOCAB)
    assert np.flatnonzero(start.prompt[0]).tolist() == [3, 4]
    assert not start.prompt[1].any()
    after = start.add(jnp.array([4, 4]), jnp.array([True, False])).add(jnp.array([4, 8]), jnp.array([True, True]))
    assert (int(after.counts[0, 4]), int(after.counts[1, 8]), int(after.counts.sum())) == (2, 1, 3)


def mixture():
    base = SamplingParams(temperature=1.0, seed=7).over(DEFAULTS)
    return [
        base,
        replace(base, temperature=0.0),
        replace(base, top_k=5, seed=8),
        replace(base, top_p=0.6, repetition_penalty=1.3),
        replace(base, min_p=0.1, frequency_penalty=0.7, seed=2**63),
    ]


def test_a_row_depends_on_itself_alone():
    """Bitwise, whatever stands beside it, wherever it stands."""
    options = mixture()
    logits = jax.random.normal(jax.random.key(5), (5, VOCAB)) * 3
    steps = jnp.array([0, 3, 1, 9, 4])
    seen = History(jax.random.bernoulli(jax.random.key(6), 0.2, (5, VOCAB)), jnp.ones((5, VOCAB), jnp.int32))
    tokens, logprobs = run(logits, steps, RowParams.pack(options), seen)
    for order in ([4, 2, 0, 3, 1], [2], [1, 1, 3]):
        index = jnp.array(order)
        mates = jax.tree.map(lambda x, index=index: x[index], seen)
        some = run(logits[index], steps[index], RowParams.pack([options[i] for i in order]), mates)
        np.testing.assert_array_equal(some[0], tokens[index])
        np.testing.assert_array_equal(some[1], logprobs[index])


def test_vectorised_sampler_agrees():
    options = mixture()
    logits = jax.random.normal(jax.random.key(5), (5, VOCAB)) * 3
    args = (logits, jnp.arange(5), RowParams.pack(options), history(5, prompt=[1, 2]))
    np.testing.assert_array_equal(run(*args)[0], run_vectorised(*args)[0])
    np.testing.assert_allclose(run(*args)[1], run_vectorised(*args)[1], atol=1e-6)


def test_seed_and_step_both_matter():
    flat = np.zeros(VOCAB)
    a, b = (draw(flat, SamplingParams(temperature=1.0, seed=s), 64) for s in (0, 1))
    assert (a != b).mean() > 0.8
    assert len(set(a.tolist())) > 20
    # seeds that agree in the low 32 bits differ
    c = draw(flat, SamplingParams(temperature=1.0, seed=2**32), 64)
    assert (a != c).mean() > 0.8


def test_one_compile_serves_every_option():
    """P2: options are values, never another structure."""
    fn = jax.jit(lambda *args: sample(*args))
    for options in [*mixture(), SamplingParams()]:
        fn(jnp.zeros((2, VOCAB)), jnp.zeros(2, jnp.int32), RowParams.pack([options, SamplingParams()]), history(2))
    assert fn._cache_size() == 1


def test_logprobs_are_the_models_own():
    """Before penalties, temperature and filters."""
    params = RowParams.pack([SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0, seed=1)])
    token, logprob = run(jnp.asarray(LOGITS)[None], jnp.zeros(1, jnp.int32), params, history(1, prompt=range(20)))
    expected = LOGITS - np.log(np.exp(LOGITS).sum())
    np.testing.assert_allclose(logprob[0], expected[int(token[0])], atol=1e-5)
    ids, values = top_logprobs(jnp.asarray(LOGITS)[None], jnp.array(True))
    order = np.argsort(-LOGITS, kind="stable")[:20]
    np.testing.assert_array_equal(ids[0], order)
    np.testing.assert_allclose(values[0], expected[order], atol=1e-5)
    assert not np.asarray(top_logprobs(jnp.asarray(LOGITS)[None], jnp.array(False))[1]).any()


def test_nan_logits_show_in_the_logprob():
    logits = jnp.zeros((2, VOCAB)).at[0, 3].set(jnp.nan)
    _, logprob = run(logits, jnp.zeros(2, jnp.int32), RowParams.pack([SamplingParams()] * 2), history(2))
    assert np.isnan(logprob[0])
    assert np.isfinite(logprob[1])


def test_unset_values_come_from_the_defaults():
    mine = SamplingParams(top_k=4, stop="end")
    theirs = SamplingParams(temperature=0.6, top_k=9, top_p=0.95)
    full = mine.over(theirs).over(DEFAULTS)
    assert (full.temperature, full.top_k, full.top_p, full.min_p, full.seed) == (0.6, 4, 0.95, 0.0, 0)
    assert full.stop == ("end",)
    assert SamplingParams(stop=["a", [3, np.int64(4)]]).stop == ("a", (3, 4))

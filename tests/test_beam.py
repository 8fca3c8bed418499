"""Beam search against one that computes every sequence anew."""

import math

import numpy as np
import pytest

import jmla
from jmla.beam import _Rows, _Running, _Search
from jmla.requests import end_token_ids
from tests.test_engine import model, prompt


def logprobs(family, tokens):
    """Log-probabilities behind a sequence that is read as a whole."""
    ids = np.zeros((1, 512), np.int32)
    ids[0, : len(tokens)] = tokens
    logits, _ = jmla.prefill(model(family), ids, np.array([len(tokens)]), jmla.init_cache(model(family), 1, 512))
    logits = np.asarray(logits[0], np.float64)
    return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()


def slow_search(family, tokens, beams, limit, penalty):
    ends = set(end_token_ids(model(family)))
    running, ended = [((), 0.0)], []
    for _ in range(limit):
        found = []
        for made, total in running:
            after = logprobs(family, [*tokens, *made])
            found += [((*made, i), total + after[i]) for i in range(len(after))]
        found = sorted(found, key=lambda b: -b[1])
        ended += [b for b in found[:beams] if b[0][-1] in ends]
        running = [b for b in found if b[0][-1] not in ends][:beams]
        if len(running[0][0]) == limit:
            ended += running
            break
        best = sorted(ended, key=lambda b: -b[1] / len(b[0]) ** penalty)[:beams]
        if (
            len(best) == beams
            and running[0][1] / len(running[0][0]) ** penalty <= best[-1][1] / len(best[-1][0]) ** penalty
        ):
            break
    return sorted(ended, key=lambda b: -b[1] / len(b[0]) ** penalty)[:beams]


@pytest.mark.parametrize("family", ["v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v4", "glm"))])
def test_beams_are_those_of_a_slow_search(family):
    """Across the end of a page, which rows share up to there."""
    length = 254
    got = jmla.beam_search(model(family), prompt(length), beams=3, max_new_tokens=5, length_penalty=0.7)
    want = slow_search(family, prompt(length), 3, 5, 0.7)
    assert [beam.completion.token_ids for beam in got] == [tokens for tokens, _ in want]
    np.testing.assert_allclose([beam.logprob for beam in got], [total for _, total in want], rtol=1e-4)
    assert [beam.score for beam in got] == sorted((beam.score for beam in got), reverse=True)


@pytest.mark.slow
def test_one_beam_is_greedy():
    (beam,) = jmla.beam_search(model("v32"), prompt(20), beams=1, max_new_tokens=5)
    assert beam.completion == jmla.generate(model("v32"), prompt(20), max_new_tokens=5)


def test_ended_beams_and_the_end_of_the_search():
    """Token 9 ends; beams that ended are ranked by their scores with those that have not."""
    search = _Search(2, 1.0, frozenset({9}))
    assert search.step(np.array([[9, 5, 6, 7]]), np.log([[0.4, 0.3, 0.2, 0.1]]), 3)
    assert [b.tokens for b in search.running] == [(5,), (6,)]
    assert [b.tokens for b in search.ended] == [(9,)]
    assert not search.step(np.array([[9, 1], [9, 2]]), np.log([[0.9, 0.01], [0.05, 0.02]]), 3)
    assert [b.tokens for b in search.best()] == [(5, 9), (9,)]
    lasting = _Search(1, 0.0, frozenset())
    assert not lasting.step(np.array([[3, 4]]), np.log([[0.5, 0.5]]), 1)  # the limit; ties go to the lower id
    assert lasting.best() == [_Running((3,), math.log(0.5), 0)]


def test_many_end_tokens_leave_beams_running():
    search = _Search(2, 1.0, frozenset({7, 8, 9}))
    assert search.wanted == 8
    search.step(np.array([[9, 8, 7, 1, 2]]), np.log([[0.3, 0.2, 0.2, 0.1, 0.1]]), 5)
    assert [b.tokens for b in search.running] == [(1,), (2,)]
    assert [b.tokens for b in search.ended] == [(9,), (8,)]


def test_pages_come_back():
    rows = _Rows(model("v4"), 3, 300, 600)
    free = {name: pool.free for name, pool in rows._pools.items()}
    rows._take_pages(300)
    rows._length = 300
    rng = np.random.default_rng(0)
    for _ in range(600):
        rows.rearrange(rng.integers(0, rows.live, 3).tolist())
        rows._take_pages(1)
        rows._length += 1
        for name, table in rows._tables.items():
            owners = np.bincount(table[table >= 0], minlength=rows._pools[name].size)
            np.testing.assert_array_equal(owners, rows._pools[name].owners)
    assert all(rows._pools[name].free >= 0 for name in free)
    assert (rows._tables["window_table"] >= 0).sum() <= 3 * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beams": 0}, "beams=0"),
        ({"beams": 65}, "beams=65"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(ValueError, match=said):
        jmla.beam_search(model("v32"), prompt(4), **options)

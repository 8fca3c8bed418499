"""Training for long contexts: sequences with facts, positions with gaps, and what a guide changes."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla import bundled
from jmla.bench.facts import KEY, LINE, VALUE, WORDS, Facts
from jmla.tokenizer import Tokenizer
from tests.tiny import V4, tiny_model

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # training/ is not part of the installed package
    sys.path.insert(0, str(ROOT))

from training import model as training_model  # noqa: E402

long_context = pytest.importorskip("training.long_context", reason="needs the extra train")

SMALL = Facts(words=tuple(range(10, 50)), head=(2, 3, 4), equals=5, end=2)


def test_lines_are_text_of_the_bundled_tokenizer():
    tokenizer = Tokenizer(bundled.path())
    facts = Facts.of(tokenizer)
    rng = np.random.default_rng(0)
    for _ in range(20):
        key, value = facts.draw(rng)
        line = facts.line(key, value)
        assert len(line) == LINE
        assert line[KEY : KEY + WORDS] == list(key)
        assert line[VALUE : VALUE + WORDS] == list(value)
        assert line[: len(facts.question(key))] == facts.question(key)
        assert tokenizer.encode(tokenizer.decode(line)) == line
    assert tokenizer.decode(line).startswith("\n# key ")
    assert len(facts.words) > 80


def test_keys_are_not_drawn_twice():
    few = Facts(words=(10, 11, 12, 13), head=(2, 3, 4), equals=5, end=2)
    taken = []
    rng = np.random.default_rng(0)
    for _ in range(16):
        taken.append(few.draw(rng, taken)[0])
    assert len(set(taken)) == 16


def test_facts_are_planted_one_in_each_part():
    text, planted, places = SMALL.plant(np.random.default_rng(1), np.full(300, 60), 3)
    assert [place // 100 for place in places] == [0, 1, 2]
    for (key, value), place in zip(planted, places, strict=True):
        assert text[place : place + LINE].tolist() == SMALL.line(key, value)
    assert (text == 60).sum() == 300 - 3 * LINE
    with pytest.raises(ValueError, match="at least 27 tokens for 3 facts, got 26"):
        SMALL.plant(np.random.default_rng(1), np.full(26, 60), 3)


def test_questions_know_the_entries_with_their_facts():
    """At any alignment: the entry's window of 8 holds key and value, and only lines that come before count."""
    rng, alignments, asked = np.random.default_rng(2), set(), 0
    for _ in range(10):
        part = long_context.with_facts(rng, SMALL, np.full(512, 60), 512, 4)
        tokens = part["tokens"]
        starts = [s for s in range(512 - LINE + 1) if tokens[s : s + 3].tolist() == [2, 3, 4]]
        assert (tokens != 60).sum() == LINE * len(starts)
        for place, entries in zip(part["asks"], part["holds"], strict=True):
            if place < 0:
                assert (entries == -1).all()
                continue
            asked += 1
            start = max(s for s in starts if s < place)
            assert place - start in (VALUE - 1, VALUE)
            assert part["weights"][place + 1] == 0
            key = tokens[start + KEY : start + KEY + WORDS].tolist()
            earlier = [s for s in starts if s < start and tokens[s + KEY : s + KEY + WORDS].tolist() == key]
            held = entries[entries >= 0]
            assert len(held) == len(earlier) >= 1
            for entry, s in zip(held, earlier, strict=True):
                alignments.add((s + KEY) % 4)
                assert 4 * entry - 4 <= s + KEY
                assert s + VALUE + WORDS - 1 <= 4 * entry + 3
                assert tokens[s + VALUE : s + VALUE + WORDS].tolist() == tokens[start + VALUE :][:WORDS].tolist()
                assert (entry + 1) * 4 <= start, "the entry was complete before the question"
    assert alignments == {0, 1, 2, 3}
    assert asked > 50


def test_positions_lie_apart_by_whole_windows():
    rng, plain, furthest = np.random.default_rng(3), 0, 0
    for _ in range(200):
        positions, whole = long_context.spaced(rng, 512, 1 << 16)
        steps = np.diff(positions)
        assert positions.dtype == np.int32
        assert (steps >= 1).all()
        assert positions[0] % 128 == 0
        assert ((steps == 1) | ((steps - 1) % 128 == 0)).all()
        assert (np.flatnonzero(steps > 1) % 128 == 127).all()
        assert positions[-1] < whole <= 1 << 16
        plain += whole == 512
        furthest = max(furthest, whole)
    assert 20 < plain < 90
    assert furthest > 1 << 15


def test_batches():
    data = np.random.default_rng(0).integers(50, 96, 4096).astype(np.uint16)
    for seed in range(8):
        batch = long_context.draw_batch(np.random.default_rng(seed), SMALL, data, V4, 3, 256, 1 << 14)
        gaps = np.flatnonzero(np.diff(batch["positions"]) > 1) + 1
        assert (batch["weights"][:, gaps] == 0).all()
        assert batch["tokens"].shape == batch["weights"].shape == (3, 256)
        assert 1 <= batch["topk"] <= V4.index_topk
        assert 1 <= batch["spread"] <= batch["crowd"] == 64


def test_window_mask_follows_positions():
    plain = training_model.window_mask(8, 3, None)
    there = training_model.window_mask(8, 3, jnp.arange(24))
    np.testing.assert_array_equal(there, plain)
    np.testing.assert_array_equal(training_model.window_mask(8, 3, jnp.arange(24) + 800), plain)
    apart = np.array(training_model.window_mask(8, 3, jnp.arange(24) + np.repeat([0, 80, 80], 8)))
    assert not apart[1, :, :8].any()
    np.testing.assert_array_equal(apart[[0, 2]], plain[[0, 2]])
    np.testing.assert_array_equal(apart[1, :, 8:], plain[1, :, 8:])


@pytest.mark.slow
def test_a_guide_that_says_nothing_changes_nothing():
    """Positions 0, 1, ... and one of each entry give the plain pass; gaps and many of each another."""
    model = tiny_model("v4")
    ids = np.random.default_rng(0).integers(2, 96, (2, 40)).astype(np.int32)
    nothing = np.full((2, 1), -1, np.int32)

    def run(positions, spread, topk):
        guide = training_model.Guide(spread, topk, np.float32(1), nothing, nothing[..., None])
        return training_model.forward(V4, model.params, ids, "float32", positions, guide)[:2]

    run = jax.jit(run)
    expected = training_model.forward(V4, model.params, ids, "float32")[:2]
    order = np.arange(40, dtype=np.int32)
    for ours, theirs in zip(run(order, np.float32(1), np.int32(V4.index_topk)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    for changed in (
        (order + np.where(order < 24, 0, 800), 1, V4.index_topk),
        (order, 50, V4.index_topk),
        (order, 1, 1),
    ):
        positions, spread, topk = changed
        logits = run(positions, np.float32(spread), np.int32(topk))[0]
        assert np.abs(logits - expected[0]).max() > 1e-3, changed


@pytest.mark.slow
def test_steps_learn_the_answers_of_a_batch():
    data = np.random.default_rng(0).integers(50, 96, 4096).astype(np.uint16)
    batch = long_context.draw_batch(np.random.default_rng(5), SMALL, data, V4, 2, 256, 1 << 14)
    trained, tables = long_context.split_ids(tiny_model("v4").params)
    trained = jax.tree.map(jnp.array, trained)
    optimizer = long_context.make_optimizer(3e-3)
    state = optimizer.init(trained)
    reports = []
    for _ in range(25):
        trained, state, report = long_context.step(
            V4, optimizer, "float32", trained, tables, state, batch, np.float32(1), np.float32(0.2)
        )
        reports.append(jax.device_get(report))
    first, last = reports[0], reports[-1]
    assert all(np.isfinite(value) for value in last.values())
    for name in ("loss", "answer", "attention_0", "kept_0", "kept_1"):
        assert last[name] < first[name], name
    assert last["answer"] < 0.9 * first["answer"]

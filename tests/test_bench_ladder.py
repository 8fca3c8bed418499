"""The ladder of long contexts: its comparisons, what it reads and refuses, and a climb on a small model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jmla
from jmla.bench import ladder
from jmla.bench.__main__ import app
from jmla.bench.facts import LINE, Facts
from jmla.models import make_model
from jmla.models.random import init_random
from tests.tiny import V4, tiny_model

FACTS = Facts(words=tuple(range(10, 50)), head=(2, 3, 4), equals=5, end=2)


def served(dtype="bfloat16"):
    return tiny_model("v4", "footer584", deterministic=False, dtype=dtype)


# ---- comparisons


def replay(chosen, logits):
    return {1: jnp.asarray(chosen, jnp.int32)}, jnp.asarray(logits, jnp.float32)


SCORES = {1: jnp.asarray([[8.0, 4.0, 3.99, 1.0], [8.0, 4.0, 3.99, 1.0], [8.0, 4.0, -np.inf, -np.inf]])}
CHOSEN, LOGITS = [[0, 1], [0, 1], [0, 1]], [[0.0, 1.0]] * 3


def test_equal_replays():
    found = ladder.compare(replay(CHOSEN, LOGITS), replay(CHOSEN, LOGITS), SCORES, "float32")
    assert found == {
        "rows": 3,
        "equal": 3,
        "explained": 0,
        "farthest": 0.0,
        "shared": 1.0,
        "logits": 0.0,
        "same_next": 3,
    }


def test_other_choices_are_explained_by_scores_that_are_nearly_equal():
    """Row 0 took the next best, 0.01 of 8 away; row 1 one that is far behind."""
    ours = replay([[0, 2], [0, 3], [0, 1]], [[0.0, 1.0], [2.0, 1.0], [0.0, 0.5]])
    found = ladder.compare(ours, replay(CHOSEN, LOGITS), SCORES, "float32")
    assert (found["rows"], found["equal"], found["explained"]) == (3, 1, 1)
    assert found["farthest"] == pytest.approx(3 / 8)
    assert found["shared"] == pytest.approx(2 / 3)
    assert (found["logits"], found["same_next"]) == (2.0, 2)
    report = {"tokens": 512, "replays": {"kernels, float32": found}}
    said = ladder.faults(report)
    assert said == [
        "512 tokens: 1 of 3 selections differ from the reference",
        "512 tokens: logits differ by 2",
    ]


def test_a_choice_that_is_missing_or_unseen_is_not_explained():
    missing = replay([[0, -1], [0, 1], [0, 1]], LOGITS)
    unseen = replay([[0, 1], [0, 1], [0, 2]], LOGITS)
    for ours in (missing, unseen):
        found = ladder.compare(ours, replay(CHOSEN, LOGITS), SCORES, "float32")
        assert (found["equal"], found["explained"]) == (2, 0)


def test_without_scores_nothing_is_explained():
    found = ladder.compare(replay([[0, 2], [0, 1], [0, 1]], LOGITS), replay(CHOSEN, LOGITS), None, "float32")
    assert (found["equal"], found["explained"], found["shared"]) == (2, 0, pytest.approx(5 / 6))


def test_logits_that_are_no_numbers_are_a_fault():
    found = ladder.compare(replay(CHOSEN, [[np.nan, 1.0]] * 3), replay(CHOSEN, LOGITS), SCORES, "float32")
    assert ladder.faults({"tokens": 1, "replays": {"kernels, float32": found}}) == ["1 tokens: logits differ by nan"]


# ---- memory


@pytest.mark.parametrize("length", [200, 3000])
def test_memory_is_what_the_layouts_say(length):
    model = served()
    cache = jmla.init_cache(model, 1, length)
    found = ladder.memory(model.spec, cache)
    counts = dict(cache.layers)
    said = jmla.models.bytes_per_token(model.spec)
    assert found["token_and_layer"] == {name: said[name] / counts[name] for name in ("csa", "hca", "index")}
    assert set(found["row"]) == {"window", "csa state", "index state", "hca state"}
    larger = cache.replace(pools=cache.pools | {"hca": jnp.zeros((99, 7), jnp.uint8)})
    with pytest.raises(RuntimeError, match=r"bytes of hca in a cache of .* tokens, got 693"):
        ladder.memory(model.spec, larger)


def test_bytes_that_a_step_reads():
    """Two CSA layers whose keys take 16 + 4 bytes an entry of 4 tokens, two HCA layers."""
    model = served()
    layout = dict(jmla.init_cache(model, 1, 256).layouts)
    hca = layout["hca"].page_stride / layout["hca"].page_size
    assert ladder.growing_bytes(model.spec, 800) == int(2 * 200 * 20 + 2 * 100 * hca)


# ---- what is read


def test_text(tmp_path):
    model = served()
    np.arange(90, dtype="<u2").tofile(tmp_path / "a.bin")
    np.testing.assert_array_equal(
        ladder.text_ids(model, str(tmp_path / "a.bin"), 200, 0)[85:95], [*range(85, 90), *range(5)]
    )
    drawn = ladder.text_ids(model, None, 500, 3)
    np.testing.assert_array_equal(drawn, ladder.text_ids(model, None, 500, 3))
    assert set(drawn.tolist()) <= set(range(6, 96))
    np.array([96], "<u2").tofile(tmp_path / "b.bin")
    for name, message in (("b.bin", "ids below 96"), ("c.bin", "a file that can be read"), ("d.txt", "no tokenizer")):
        with pytest.raises(ValueError, match=message):
            ladder.text_ids(model, str(tmp_path / name), 10, 0)


def test_lengths():
    assert ladder.parse_lengths("4096, 32768") == [4096, 32768]
    for wrong in ("", "4096,", "4k", "-1", "100"):
        with pytest.raises(ValueError, match="Expected lengths="):
            ladder.parse_lengths(wrong)


def test_bad_options_end_with_their_reason(tmp_path):
    for options, message in (
        (["--lengths", "many"], "Expected lengths='many'"),
        (["--json", str(tmp_path)], "to be a file in a directory that exists"),
        (["--corpus", str(tmp_path / "none.bin")], "to be a file that can be read"),
        (["--seed", "-1"], "Expected seed=-1"),
    ):
        done = CliRunner().invoke(app, ["ladder", *options])
        assert done.exit_code == 1, options
        assert message in done.output, options


# ---- the climb


def check_climb(rungs, lengths, layers, said):
    """Random weights: everything but the look-ups is right, and a row follows for each rung."""
    assert [found["tokens"] for found in rungs] == lengths
    for found in rungs:
        assert found["facts"] == 3
        assert len(found["facts_at"]) == 3
        assert max(found["facts_at"]) <= found["tokens"] - 2 * ladder.REPLAYED - LINE
        exact = found["replays"]["kernels, float32"]
        assert exact["rows"] == exact["equal"] == layers * ladder.REPLAYED, "the CPU has one implementation only"
        assert exact["logits"] < 1e-4
        assert found["replays"]["as served, against float32"]["shared"] > 0.8
        assert found["decode_ms"] > 0
        assert found["prefill_tokens_per_second"] > 0
        assert ladder.faults(found) == []
        assert json.loads(json.dumps(found)) == found
        assert ladder.line(found, rungs[0]).count("|") == ladder.HEAD.split("\n")[0].count("|")
    rows = layers * ladder.REPLAYED
    assert said.count(f"kernels, float32: {rows} of {rows} selections equal") == len(lengths)
    assert f"{lengths[-1]:,} tokens: " in said


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(ladder, "facts_of", lambda model: FACTS)
    monkeypatch.setattr(ladder, "LAUNCHES", 2)
    monkeypatch.setattr(ladder, "BLOCK", 8)


@pytest.mark.slow
def test_rung_of_a_small_model(short, capsys):
    config = dataclasses.replace(
        V4, num_hidden_layers=2, layer_kinds=("csa", "hca"), layer_routing=("hash", "learned"), hc_mult=2
    )
    models = []
    for dtype in ("bfloat16", "float32"):
        params = jax.tree.map(jnp.asarray, init_random(config, dtype, seed=3))
        models.append(make_model(config, params, dtype=dtype, kv_layout="footer584"))
    check_climb(ladder.climb(*models, [512], None, 0), [512], 1, capsys.readouterr().out)


@pytest.mark.slow
def test_climb_of_a_small_model(short, capsys):
    """Two layers of each compressing kind, which steps scan over and the reference takes one by one."""
    rungs = ladder.climb(served(), served("float32"), [512, 1024], None, 0)
    check_climb(rungs, [512, 1024], 2, capsys.readouterr().out)


def test_a_rung_leaves_room_for_the_steps_behind_it(monkeypatch):
    seen = []
    monkeypatch.setattr(ladder, "text_ids", lambda model, corpus, count, seed: seen.append(count) or 1 / 0)
    model = served()
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, max_seq_len=2048))
    with pytest.raises(ZeroDivisionError):
        ladder.rung(model, model, 2048, None, 0)
    assert seen == [2048 - 3 * 8 - 4 * 64]

"""Logits, index sets, greedy tokens and drafts of small models against those of transformers (tests/golden)."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jmla
from tests.golden.configs import CASES
from tests.golden.weights import make, prompt

TOLERANCE = 5e-5  # absolute, on logits with a standard deviation of one
MAX_SEQ_LEN = 512


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A golden case and the model loaded from its checkpoint. Forward pass and prefill run once, on first use."""

    golden: Any
    model: Any

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and greedy continuation ``[T + 64]``."""
        return np.concatenate([self.golden.arrays["prompt"], self.golden.arrays["greedy"]])

    @functools.cached_property
    def forward(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Logits ``[T + 64, V]`` and the index sets ``[T + 64, k]`` of the whole sequence."""
        logits, selected = jmla.forward(self.model, self.sequence[None], return_selected=True)
        return np.asarray(logits[0]), {layer: np.asarray(rows[0]) for layer, rows in selected.items()}

    @functools.cached_property
    def prefilled(self) -> tuple[np.ndarray, Any, Any]:
        """Logits ``[T, V]`` and draft states ``[1, T, ...]`` of the prompt, and the cache that holds it."""
        tokens = self.golden.arrays["prompt"]
        cache = jmla.init_cache(self.model, 1, MAX_SEQ_LEN)
        logits, hidden, cache = jmla.prefill(
            self.model, tokens[None], np.array([len(tokens)]), cache, all_logits=True, return_hidden=True
        )
        return np.asarray(logits[0]), hidden, cache


@pytest.fixture(scope="module", params=CASES)
def case(request, golden_checkpoint) -> Loaded:
    golden = golden_checkpoint(request.param)
    model = jmla.load(golden.path, dtype="float32", kv_layout="float32", deterministic=True)
    return Loaded(golden, model)


def sorted_sets(rows: np.ndarray, width: int) -> np.ndarray:
    """Rows of indices in ascending order, the -1 last, ``width`` columns."""
    ordered = np.sort(np.where(rows < 0, np.iinfo(np.int32).max, rows), axis=-1)[:, :width]
    ordered = np.where(ordered == np.iinfo(np.int32).max, -1, ordered)
    return np.pad(ordered, [(0, 0), (0, width - ordered.shape[1])], constant_values=-1)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_prompt_are_those_of_the_golden_file(name, golden_checkpoint):
    golden, described = golden_checkpoint(name), CASES[name]
    assert golden.digest == str(golden.arrays["weights_sha256"])
    assert golden.config == described.config
    assert_array_equal(golden.arrays["prompt"], prompt(golden.config, described.seed, described.prompt))


def test_any_tensor_can_be_drawn_alone():
    described = CASES["v4_small"]
    name = "layers.2.attn.indexer.compressor.ape"
    alone = make(described.config, described.seed, [name])
    assert list(alone) == [name]
    assert_array_equal(alone[name], make(described.config, described.seed)[name])


def test_forward_logits(case):
    logits, _ = case.forward
    assert_allclose(logits[case.golden.arrays["logits_at"]], case.golden.arrays["logits"], rtol=0, atol=TOLERANCE)


def test_forward_index_sets(case):
    _, selected = case.forward
    expected = case.golden.selected
    assert set(selected) == set(expected)
    for layer, rows in expected.items():
        assert_array_equal((selected[layer] >= 0).sum(-1), (rows >= 0).sum(-1), err_msg=f"{layer=}")
        assert_array_equal(sorted_sets(selected[layer], rows.shape[-1]), rows, err_msg=f"{layer=}")


def test_prefill_logits(case):
    """Through the cache. Every position agrees with the forward pass, so the index sets do too."""
    arrays = case.golden.arrays
    logits, _, cache = case.prefilled
    assert int(cache.lengths[0]) == len(arrays["prompt"])
    within = arrays["logits_at"] < len(arrays["prompt"])
    assert_allclose(logits[arrays["logits_at"][within]], arrays["logits"][within], rtol=0, atol=TOLERANCE)
    assert_allclose(logits, case.forward[0][: len(logits)], rtol=0, atol=TOLERANCE)


def test_greedy_decode(case):
    """Token by token through the cache: the same tokens, and at every step the logits of the forward pass."""
    greedy = case.golden.arrays["greedy"].tolist()
    logits, _, cache = case.prefilled
    newest, cache, tokens = logits[-1], jmla.copy(cache), []
    for expected in case.forward[0][len(logits) :]:
        tokens.append(int(np.argmax(newest)))
        assert tokens == greedy[: len(tokens)]
        newest, cache = jmla.decode(case.model, np.array(tokens[-1:]), cache)
        newest = np.asarray(newest[0])
        assert_allclose(newest, expected, rtol=0, atol=TOLERANCE, err_msg=f"after {len(tokens)} tokens")
    assert tokens == greedy


def test_draft_logits(case):
    """The draft block over the prompt, then chained on its own states and tokens."""
    arrays = case.golden.arrays
    _, hidden, cache = case.prefilled
    following = case.sequence[1 : len(arrays["prompt"]) + 1]
    logits, hidden, cache = jmla.draft(case.model, hidden, following[None], jmla.copy(cache))
    drafted = np.asarray(logits[0])
    assert_allclose(drafted[arrays["draft_at"]], arrays["draft_logits"], rtol=0, atol=TOLERANCE)
    assert_allclose(np.asarray(hidden[0, -1]), arrays["draft_hidden"], rtol=0, atol=2 * TOLERANCE)
    newest, state = drafted[-1], hidden[:, -1]
    for token, expected in zip(arrays["chain_tokens"], arrays["chain_logits"], strict=True):
        assert int(np.argmax(newest)) == token
        logits, state, cache = jmla.draft(case.model, state, np.array([token]), cache)
        newest = np.asarray(logits[0])
        assert_allclose(newest, expected, rtol=0, atol=TOLERANCE)

"""The training-time forward pass and rounding against the network and the checkpoint code that serve."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jmla
from jmla.models.checkpoint import collect_tensors, load_params, save_checkpoint
from jmla.models.random import init_random
from tests.tiny import V4, tiny_model

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # training/ is not part of the installed package
    sys.path.insert(0, str(ROOT))

from training import model as training_model  # noqa: E402
from training import quantise  # noqa: E402


def leaves(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.slow
def test_dense_forward_equals_the_network_that_serves() -> None:
    """Two rows of five windows: all kinds of layers, more entries than the indexer keeps, and the draft block."""
    model = tiny_model("v4")
    ids = np.random.default_rng(0).integers(2, 96, (2, 40)).astype(np.int32)
    logits, drafted = jax.jit(lambda params: training_model.forward(model.config, params, ids, "float32")[:2])(
        model.params
    )
    np.testing.assert_allclose(logits, jmla.forward(model, ids), atol=1e-4, rtol=0)
    cache = jmla.init_cache(model, 2, 40)
    _, hidden, cache = jmla.prefill(model, ids, [40, 40], cache, return_hidden=True)
    expected, _, _ = jmla.draft(model, hidden, np.roll(ids, -1, axis=1), cache)
    np.testing.assert_allclose(drafted, expected[:, :-1], atol=1e-4, rtol=0)
    assert np.std(drafted) > 0.1


def test_rounding_in_training_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Matrices in FP8 and FP4 as they are read back: with partial blocks, and parts of a matrix of unlike sizes.

    A shared expert's gate and up matrices are one array among the parameters and two in the checkpoint.
    """
    config = dataclasses.replace(
        V4,
        num_hidden_layers=3,
        layer_kinds=("window", "csa", "hca"),
        layer_routing=("hash", "learned", "learned"),
        hidden_size=160,
        moe_intermediate_size=96,
        n_shared_experts=2,
    )
    params = init_random(config, seed=5)
    for path, w in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in ("shared_gate_up", "gate_up"):
            w[..., w.shape[-2] // 2 :, :] *= 2.0**-12  # the up half
    save_checkpoint(tmp_path, config, collect_tensors(config, params))
    stored = leaves(load_params(tmp_path, config, "float32")[0])
    drawn, rounded = leaves(params), leaves(quantise.straight_through(params))
    assert stored.keys() == rounded.keys()
    checked = set()
    for name, w in rounded.items():
        last = name.rsplit("'", 2)[-2]
        if last in quantise.FP8 | quantise.FP4:
            np.testing.assert_array_equal(w, stored[name], err_msg=name)
            assert (w != drawn[name]).any(), name
            checked.add(last)
        else:  # BF16 and F32, which training does not round
            np.testing.assert_array_equal(w, drawn[name], err_msg=name)
            np.testing.assert_allclose(w, stored[name], rtol=2**-8, atol=0, err_msg=name)
    assert checked == quantise.FP8 | quantise.FP4

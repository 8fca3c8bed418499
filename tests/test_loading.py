"""From files to a model: what loading costs in memory."""

import weakref

import jax
import numpy as np
import pytest

import jmla
from jmla import loading
from jmla.models.checkpoint import CheckpointError
from tests import fixtures_checkpoint as fx


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_on_the_cpu_copies_nothing(dtype, monkeypatch, tmp_path):
    """The loader's arrays are the buffers of the model, and nothing else holds on to them."""
    fx.write_fixture(tmp_path, fx.V4, fx.draw(fx.V4), dialect="original", number_format="published")
    starts, held = [], []

    def load_params(*args, **options):
        params, report = original(*args, **options)
        leaves = jax.tree.leaves(params)
        starts.extend(x.ctypes.data for x in leaves)
        held.extend(weakref.ref(x) for x in leaves)
        return params, report

    original = loading.load_params
    monkeypatch.setattr(loading, "load_params", load_params)
    model = jmla.load(tmp_path, dtype=dtype)
    leaves = jax.tree.leaves(model.params)
    assert len(leaves) > 20
    assert [x.unsafe_buffer_pointer() for x in leaves] == starts
    assert all(isinstance(x, jax.Array) for x in leaves)
    copies = [np.array(x) for x in leaves]
    del model
    for x, copy in zip(leaves, copies, strict=True):  # the memory belongs to the arrays, whoever else lets go
        np.testing.assert_array_equal(x, copy)
    del leaves, x
    assert all(reference() is None for reference in held)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_link_to_nothing_is_a_missing_file(shards, tmp_path):
    stored, _ = fx.build(fx.V4, fx.draw(fx.V4), dialect="original", number_format="published")
    fx.write_stored(tmp_path, fx.V4, stored, shards)
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    file.unlink()
    file.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=rf"file {file.name}: (missing|cannot be read)"):
        jmla.load(tmp_path)


def test_host_arrays_are_let_go_one_by_one():
    """On a device with memory of its own, what has been put there leaves the host before the next array."""
    tree = {"a": {"b": np.zeros(3), "c": np.ones(2)}, "d": np.ones(1, np.int32)}
    out = loading._on_device(tree)
    assert tree == {}
    assert jax.tree.map(lambda x: x.shape, out) == {"a": {"b": (3,), "c": (2,)}, "d": (1,)}

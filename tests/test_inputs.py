"""What steps take: ids before each row's length count, whatever stands past it; lengths and arrays of any origin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

import jmla
from jmla.models.inputs import check_active, check_hidden, check_ids

PADDED = [[5, 9, 7], [3, -1, -1]]


@pytest.mark.parametrize("filler", [-1, 10**6, 2**40])
def test_padding_may_be_anything(filler):
    """The ids before each row's length come through; -1 or an id of another vocabulary past it is no error."""
    spec = tiny_model("v32").spec
    tokens = np.array([[5, 9, 7], [3, filler, filler]])
    ids = check_ids(spec, tokens, "[B, T]", [3, 1])
    assert ids.dtype == jnp.int32
    assert ids[0].tolist() == [5, 9, 7]
    assert int(ids[1, 0]) == 3


def test_padding_changes_no_result():
    model = tiny_model("v32")
    results = []
    for tokens in (PADDED, np.maximum(PADDED, 0), jnp.array(PADDED)):
        logits, cache = jmla.prefill(model, tokens, [3, 1], jmla.init_cache(model, 2, 16))
        results.append(np.asarray(logits))
        assert cache.lengths.tolist() == [3, 1]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_lengths_on_the_device_are_taken_into_range():
    """They cannot be refused without a look at them; a step counts none below 0 and none past the width."""
    model = tiny_model("v32")
    cache = jmla.init_cache(model, 2, 16)
    logits, cache = jmla.prefill(model, PADDED, jnp.array([9, -1]), cache)
    assert cache.lengths.tolist() == [3, 0]
    assert not np.asarray(logits)[1].any()


def test_an_array_in_two_places_can_be_donated():
    model = tiny_model("v32")
    expected, _ = jmla.decode(model, [5, 3], jmla.init_cache(model, 2, 16), donate=False)
    cache = jmla.init_cache(model, 2, 16)
    got, cache = jmla.decode(model, [5, 3], cache.replace(draft_lengths=cache.lengths))
    np.testing.assert_array_equal(got, expected)
    assert cache.lengths.tolist() == [1, 1]
    _, cache = jmla.prefill(model, [[5], [3]], cache.lengths, cache)  # read by the step that takes it over
    assert cache.lengths.tolist() == [2, 2]


def test_gradients_pass_integer_parameters_by():
    """As the docstring of ``forward`` has it."""
    model = tiny_model("v4")

    def loss(params):
        return jmla.forward(dataclasses.replace(model, params=params), [[5, 9]]).sum()

    shapes = jax.eval_shape(jax.grad(loss, allow_int=True), model.params)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(shapes)}
    assert kinds == {np.dtype("float32"), jax.dtypes.float0}


def test_lengths_on_the_device_leave_ids_to_it():
    """They are not brought to the host: ids need only fit int32, as those of arrays on the device."""
    assert check_ids(tiny_model("v32").spec, PADDED, "[B, T]", jnp.array([3, 1])).tolist() == PADDED


def test_drafts_take_lists_and_padding():
    model = tiny_model("v32")
    cache = jmla.init_cache(model, 2, 16)
    _, hidden, cache = jmla.prefill(model, PADDED, [3, 1], cache, return_hidden=True, donate=False)
    expected = jmla.draft(model, hidden, PADDED, cache, lengths=[3, 1], donate=False)
    got = jmla.draft(model, np.asarray(hidden).tolist(), np.maximum(PADDED, 0), cache, lengths=[3, 1])
    for x, y in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(expected[:2]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_active_is_bool():
    assert check_active(None, 2).tolist() == [1, 1]
    for active in ([True, False], np.array([True, False]), jnp.array([True, False])):
        assert check_active(active, 2).tolist() == [1, 0]


def test_hidden_is_floating_point():
    assert check_hidden([[1.0, 2.0]], (1, 2)).shape == (1, 2)
    with pytest.raises(TypeError, match="hidden to be floating point, got dtype int"):
        check_hidden([[1, 2]], (1, 2))
    with pytest.raises(ValueError, match=r"hidden to have shape \(1, 3\), got \(1, 2\)"):
        check_hidden([[1.0, 2.0]], (1, 3))


def test_steps_read_host_arrays_as_they_were_given():
    """The caller may change an array while the step still runs."""
    model = tiny_model("v32")

    def run():
        tokens, lengths, active = np.full((1, 40), 5, np.int32), np.array([40], np.int32), np.ones(1, bool)
        logits, cache = jmla.prefill(model, tokens, lengths, jmla.init_cache(model, 1, 256))
        tokens[:], lengths[:] = 0, 0
        after, _ = jmla.decode(model, np.array([7]), cache, active=active)
        active[:] = False
        return np.stack([logits, after])

    wanted = run()
    assert wanted[1].any()
    for _ in range(20):
        np.testing.assert_array_equal(run(), wanted)

"""The compressor against a float64 reference written window by window, and against itself cut into other calls."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla.kernels import shapes
from jmla.kernels.compress import compress

ON_GPU = any(device.platform == "gpu" for device in jax.devices())
run = jax.jit(compress, static_argnames=("ratio", "overlap", "implementation"))
KINDS = {
    "csa": (4, True, 12, 8),
    "csa_drafts": (4, True, 12, 16),
    "hca8": (8, False, 6, 8),
    "hca128": (128, False, 6, 130),
    "csa_wide": (4, True, 600, 9),  # more channels than a program of a kernel has, and not a power of two of them
    "widest": (256, True, 6, 512),
}


def reference(values, gates, ape, ratio, overlap, window):
    """Entry ``window`` of one sequence ``[T, W]``."""
    values, gates, ape = (np.asarray(x, np.float64) for x in (values, gates, ape))
    d = values.shape[1] // 2 if overlap else values.shape[1]
    out = np.zeros(d)
    for c in range(d):
        scores, picked = [], []
        for token in range(ratio * (window - 1), ratio * (window + 1)):
            own = token >= ratio * window
            if token < 0 or not (own or overlap):
                continue
            column = c + d if overlap and own else c
            scores.append(gates[token, column] + ape[token % ratio, column])
            picked.append(values[token, column])
        weights = np.exp(np.array(scores) - max(scores))
        out[c] = (weights / weights.sum()) @ np.array(picked)
    return out


def case(kind, batch, tokens, seed=0):
    ratio, _, width, ring = KINDS[kind]
    rng = np.random.default_rng(seed)
    values, gates = rng.normal(size=(2, batch, tokens, width)).astype(np.float32)
    ape = rng.normal(size=(ratio, width)).astype(np.float32)
    state = np.full((batch, ring, 2 * width), np.nan, np.float32)  # a new sequence may start on any content
    return values, 3 * gates, ape, state


def feed(implementation, kind, values, gates, ape, state, cuts, start=0):
    """Entries by window, and the last state, of rows that all take the same calls."""
    ratio, overlap, *_ = KINDS[kind]
    entries, at = {}, start
    for size in cuts:
        positions = np.broadcast_to(np.arange(at, at + size, dtype=np.int32), (values.shape[0], size))
        part = slice(at - start, at - start + size)
        out, state = run(
            values[:, part],
            gates[:, part],
            state,
            positions,
            ratio=ratio,
            overlap=overlap,
            ape=ape,
            implementation=implementation,
        )
        assert out.shape[1] == size // ratio + 1
        for e, entry in enumerate(np.moveaxis(np.asarray(out), 1, 0)):
            window = at // ratio + e
            if (window + 1) * ratio <= at + size:
                entries[window] = entry
            else:
                assert not entry.any()
        at += size
    return entries, np.asarray(state)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_sequence(kind, implementation):
    ratio, overlap, *_ = KINDS[kind]
    tokens = 2 * ratio + 5
    values, gates, ape, state = case(kind, 2, tokens)
    entries, _ = feed(implementation, kind, values, gates, ape, state, [tokens])
    assert sorted(entries) == list(range(tokens // ratio))
    for window, entry in entries.items():
        for b in range(2):
            np.testing.assert_allclose(
                entry[b], reference(values[b], gates[b], ape, ratio, overlap, window), rtol=2e-6, atol=2e-6
            )


@pytest.mark.parametrize("kind", ["csa", "csa_drafts", "hca8"])
@pytest.mark.parametrize("cuts", [[1] * 24, [5, 7, 12], [8, 1, 1, 1, 1, 12], [7, 17], [23, 1]])
def test_f2_cuts_are_bitwise_equal(kind, cuts, implementation):
    values, gates, ape, state = case(kind, 3, 24)
    whole, whole_state = feed(implementation, kind, values, gates, ape, state, [24])
    parts, parts_state = feed(implementation, kind, values, gates, ape, state, cuts)
    assert sorted(parts) == sorted(whole)
    for window in whole:
        np.testing.assert_array_equal(parts[window], whole[window])
    np.testing.assert_array_equal(parts_state, whole_state)


def test_f2_cuts_are_bitwise_equal_at_ratio_128(implementation):
    values, gates, ape, state = case("hca128", 1, 270)
    whole, _ = feed(implementation, "hca128", values, gates, ape, state, [270])
    parts, _ = feed(implementation, "hca128", values, gates, ape, state, [100, 27, *[1] * 3, 130, 10])
    assert sorted(parts) == [0, 1]
    for window in whole:
        np.testing.assert_array_equal(parts[window], whole[window])


def test_f2_batch_of_other_sizes_is_bitwise_equal(implementation):
    values, gates, ape, state = case("csa", 20, 12)
    many, _ = feed(implementation, "csa", values, gates, ape, state, [12])
    for b in (0, 7, 19):
        one, _ = feed(implementation, "csa", values[b : b + 1], gates[b : b + 1], ape, state[:1], [12])
        for window in many:
            np.testing.assert_array_equal(one[window][0], many[window][b])


def test_rows_at_their_own_positions_are_bitwise_as_if_alone(implementation):
    kind, starts, lengths = "csa_wide", [0, 3, 4, 7, 13], [11, 2, 11, 1, 9]
    values, gates, ape, blank = case(kind, 5, 24)
    positions = np.full((5, 11), -1, np.int32)
    given = np.full((2, 5, 11, values.shape[2]), np.nan, np.float32)
    expected, states, lasts = [], [], []
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        row = slice(b, b + 1)
        _, state = feed(implementation, kind, values[row], gates[row], ape, blank[row], [start] if start else [])
        states.append(state)
        rest = values[row, start:], gates[row, start:]
        entries, last = feed(implementation, kind, *rest, ape, state, [1] * length, start=start)
        expected.append(entries)
        lasts.append(last)
        positions[b, :length] = np.arange(start, start + length)
        given[:, b, :length] = values[b, start : start + length], gates[b, start : start + length]
    out, after = run(
        *given,
        np.concatenate(states),
        positions,
        ratio=4,
        overlap=True,
        ape=ape,
        implementation=implementation,
    )
    for b, start in enumerate(starts):
        for e in range(3):
            np.testing.assert_array_equal(out[b, e], expected[b].get(start // 4 + e, np.zeros((1, 300)))[0])
    np.testing.assert_array_equal(after, np.concatenate(lasts))


@pytest.mark.parametrize("kind", ["csa", "widest"])
def test_a_chunk_far_longer_than_the_ring(kind, implementation):
    ratio, overlap, _, ring = KINDS[kind]
    values, gates, ape, state = case(kind, 1, 1100)
    _, state = feed(implementation, kind, values, gates, ape, state, [3])
    entries, after = feed(implementation, kind, values[:, 3:], gates[:, 3:], ape, state, [1097], start=3)
    assert sorted(entries) == list(range(1100 // ratio))
    for window in (0, 1, 2, 3, 1100 // ratio - 1):
        want = reference(values[0], gates[0], ape, ratio, overlap, window)
        np.testing.assert_allclose(entries[window][0], want, rtol=4e-6, atol=4e-6)
    for token in range(1100 - ring, 1100):
        np.testing.assert_array_equal(after[0, token % ring], np.concatenate([values[0, token], gates[0, token]]))


def test_f2_first_window_ignores_missing_half(implementation):
    values, gates, ape, state = case("csa", 1, 4)
    entries, _ = feed(implementation, "csa", values, gates, ape, state, [4])
    d = values.shape[2] // 2
    score = np.float64(gates[0, :, d:]) + ape[:, d:]
    weights = np.exp(score - score.max(0))
    np.testing.assert_allclose(
        entries[0][0], (weights * values[0, :, d:]).sum(0) / weights.sum(0), rtol=2e-6, atol=2e-6
    )


def test_f6_ragged_rows_and_padding_are_inert(implementation):
    """Rows of 0 to 9 tokens in one call: each as if alone, and its padding touches nothing."""
    values, gates, ape, state = case("csa", 10, 9)
    state = np.random.default_rng(5).normal(size=state.shape).astype(np.float32)
    lengths = np.arange(10)
    positions = np.where(np.arange(9) < lengths[:, None], np.arange(9), -1).astype(np.int32)
    padded = np.where(positions[..., None] >= 0, values, np.nan)
    out, after = run(
        padded,
        np.where(positions[..., None] >= 0, gates, np.nan),
        state,
        positions,
        ratio=4,
        overlap=True,
        ape=ape,
        implementation=implementation,
    )
    assert np.isfinite(np.asarray(out)).all()
    for b, length in enumerate(lengths):
        alone, expected = feed(
            implementation,
            "csa",
            values[b : b + 1, :length],
            gates[b : b + 1, :length],
            ape,
            state[b : b + 1],
            [length] if length else [],
        )
        for window in range(3):
            np.testing.assert_array_equal(out[b, window], alone[window][0] if window in alone else 0)
        np.testing.assert_array_equal(after[b], expected[0])


def test_state_rows_hold_value_and_raw_gate(implementation):
    values, gates, ape, state = case("csa", 1, 11)
    _, after = feed(implementation, "csa", values, gates, ape, state, [11])
    for token in range(3, 11):
        np.testing.assert_array_equal(after[0, token % 8], np.concatenate([values[0, token], gates[0, token]]))


def test_rejected_drafts_are_overwritten(implementation):
    values, gates, ape, state = case("csa_drafts", 1, 16)
    whole, _ = feed(implementation, "csa_drafts", values, gates, ape, state, [16])
    _, state = feed(implementation, "csa_drafts", values, gates, ape, state, [10])
    wrong = np.flip(values, 1)
    _, state = feed(
        implementation, "csa_drafts", wrong[:, 10:14], gates[:, 10:14], ape, state, [4], start=10
    )  # only position 10 is kept
    _, state = feed(implementation, "csa_drafts", values[:, 10:11], gates[:, 10:11], ape, state, [1], start=10)
    rest, _ = feed(implementation, "csa_drafts", values[:, 11:], gates[:, 11:], ape, state, [5], start=11)
    for window in (2, 3):
        np.testing.assert_array_equal(rest[window], whole[window])


@pytest.mark.parametrize("steps", [1, 9])
def test_a_donated_state_is_updated_in_place(steps, implementation):
    if implementation != "xla" and not ON_GPU:
        pytest.skip("needs an NVIDIA GPU")
    values, gates, ape, state = (jnp.asarray(x) for x in case("csa_drafts", 64, steps))
    positions = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), (64, steps))
    call = partial(compress, ratio=4, overlap=True, ape=ape, implementation=implementation)
    step = jax.jit(call, donate_argnums=2)
    before = state.unsafe_buffer_pointer()
    _, after = step(values, gates, state, positions)
    assert after.unsafe_buffer_pointer() == before
    assert state.is_deleted()
    copies = [
        line
        for line in step.lower(values, gates, after, positions).compile().as_text().splitlines()
        if " copy(" in line and f"[{','.join(map(str, after.shape))}]" in line
    ]
    assert not copies


@pytest.mark.gpu
@pytest.mark.parametrize("name", shapes.COMPRESS)
def test_twenty_repeats_and_any_cuts_are_bitwise_equal(name):
    """At the shapes of the models, where programs meet on the device in no fixed order."""
    if not ON_GPU:
        pytest.skip("needs an NVIDIA GPU")
    shape = shapes.COMPRESS[name]
    halves = 2 if shape.overlap else 1
    batch, tokens, width, ring = 8, 4 * shape.ratio + 7, halves * shape.width, 2 * halves * shape.ratio
    keys = jax.random.split(jax.random.key(0), 4)
    values, gates = jax.random.normal(keys[0], (2, batch, tokens, width))
    ape = jax.random.normal(keys[2], (shape.ratio, width))
    blank = jax.random.normal(keys[3], (batch, ring, 2 * width))
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    call = partial(run, ratio=shape.ratio, overlap=shape.overlap, ape=ape, implementation="triton")

    def cut(*sizes):
        state, entries, at = blank, {}, 0
        for size in sizes:
            part = slice(at, at + size)
            out, state = call(values[:, part], gates[:, part], state, positions[:, part])
            for window in range(at // shape.ratio, (at + size) // shape.ratio):
                entries[window] = np.asarray(out[:, window - at // shape.ratio])
            at += size
        return np.stack([entries[window] for window in sorted(entries)]), np.asarray(state)

    want = cut(tokens)
    for sizes in [(tokens,)] * 20 + [(1,) * tokens] * 2 + [(shape.ratio - 1, 2, tokens - shape.ratio - 1)] * 5:
        for got, wanted in zip(cut(*sizes), want, strict=True):
            np.testing.assert_array_equal(got, wanted)
    for b in (0, 7):
        for window in (0, 1, 3):
            wanted = reference(values[b], gates[b], ape, shape.ratio, shape.overlap, window)
            np.testing.assert_allclose(want[0][window, b], wanted, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("kind", ["csa", "hca8"])
def test_gradients(kind, implementation):
    ratio, overlap, *_ = KINDS[kind]
    values, gates, ape, state = case(kind, 1, 9)
    state = np.random.default_rng(1).normal(size=state.shape).astype(np.float32)
    positions = np.arange(3, 12, dtype=np.int32)[None]

    def loss(values, gates, state, ape):
        out, after = compress(
            values, gates, state, positions, ratio=ratio, overlap=overlap, ape=ape, implementation=implementation
        )
        return jnp.sum(jnp.sin(out)) + 0.1 * jnp.sum(after**2)

    args = (values, gates, state, ape)
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)
    value = jax.jit(loss)
    rng = np.random.default_rng(2)
    for i, grad in enumerate(grads):
        assert np.isfinite(np.asarray(grad)).all()
        direction = rng.normal(size=grad.shape).astype(np.float32)
        shifted = [[a + s * 1e-2 * direction if j == i else a for j, a in enumerate(args)] for s in (1, -1)]
        numeric = (float(value(*shifted[0])) - float(value(*shifted[1]))) / 2e-2
        np.testing.assert_allclose(np.sum(np.float64(grad) * direction), numeric, rtol=2e-2, atol=2e-2)


def test_gradient_of_first_window_is_finite(implementation):
    values, gates, ape, state = case("csa", 1, 6)
    positions = np.arange(6, dtype=np.int32)[None]

    def loss(values, gates):
        out, _ = compress(
            values, gates, state, positions, ratio=4, overlap=True, ape=ape, implementation=implementation
        )
        return jnp.sum(out)

    for grad in jax.grad(loss, argnums=(0, 1))(values, gates):
        assert np.isfinite(np.asarray(grad)).all()


def test_low_precision_inputs_and_vmap(implementation):
    values, gates, ape, state = case("csa", 2, 12)
    low = jnp.asarray(values, jnp.bfloat16), jnp.asarray(gates, jnp.bfloat16)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    call = partial(compress, ratio=4, overlap=True, ape=ape, implementation=implementation)
    out, after = call(*low, state, positions)
    assert out.dtype == after.dtype == jnp.float32
    expected, _ = call(*(x.astype(jnp.float32) for x in low), state, positions)
    np.testing.assert_array_equal(out, expected)
    each, _ = jax.vmap(call)(*(x[:, None] for x in low), state[:, None], positions[:, None])
    np.testing.assert_allclose(each[:, 0], out, rtol=1e-6, atol=1e-6)


def test_no_tokens(implementation):
    values, gates, ape, state = case("csa", 2, 0)
    out, after = run(
        values, gates, state, np.zeros((2, 0), np.int32), ratio=4, overlap=True, ape=ape, implementation=implementation
    )
    assert out.shape == (2, 1, 6)
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(after, state)


def test_v6_ratio_and_state_of_another_ratio():
    values, gates, ape, state = case("csa", 1, 8)
    positions = np.arange(8, dtype=np.int32)[None]
    with pytest.raises(ValueError, match="ratio=3"):
        compress(values, gates, state, positions, ratio=3, overlap=True, ape=ape[:3])
    hca_ape = np.zeros((128, 12), np.float32)
    with pytest.raises(ValueError, match="another ratio"):
        compress(values, gates, state, positions, ratio=128, overlap=False, ape=hca_ape)
    saved_at_128 = np.zeros((1, 128, 12), np.float32)  # half as wide: no previous window
    with pytest.raises(ValueError, match="state"):
        compress(values, gates, saved_at_128, positions, ratio=4, overlap=True, ape=ape)
    with pytest.raises(ValueError, match="ape"):
        compress(values, gates, state, positions, ratio=8, overlap=False, ape=ape)


def test_v7_shapes_of_the_overlapping_form(implementation):
    """W = 2 d in, d out: eight slots of d channels meet in an entry."""
    values, gates, ape, state = case("csa", 2, 9)
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
    out, _ = run(values, gates, state, positions, ratio=4, overlap=True, ape=ape, implementation=implementation)
    assert out.shape == (2, 9 // 4 + 1, values.shape[2] // 2)


def test_bad_arguments():
    values, gates, ape, state = case("csa", 1, 8)
    positions = np.arange(8, dtype=np.int32)[None]
    call = partial(compress, ratio=4, overlap=True)
    with pytest.raises(TypeError, match="int32"):
        call(values, gates, state, positions.astype(np.float32), ape=ape)
    with pytest.raises(ValueError, match="int32"):
        call(values, gates, state, positions + np.int64(2**40), ape=ape)
    with pytest.raises(TypeError, match="state"):
        call(values, gates, state.astype(np.float16), positions, ape=ape)
    with pytest.raises(TypeError, match="gates"):
        call(values, gates.astype(np.int32), state, positions, ape=ape)
    with pytest.raises(ValueError, match="gates"):
        call(values, gates[:, :-1], state, positions, ape=ape)
    with pytest.raises(ValueError, match="positions"):
        call(values, gates, state, positions[:, :-1], ape=ape)
    with pytest.raises(ValueError, match="even"):
        call(values[..., :-1], gates[..., :-1], state, positions, ape=ape)


@pytest.mark.parametrize("sliced", [False, True], ids=["layer", "slice"])
@pytest.mark.parametrize("cuts", [[24], [5, 1, 1, 1, 16]])
@pytest.mark.parametrize("kind", ["csa", "hca8"])
def test_one_of_several_layers_is_advanced_as_if_alone(kind, cuts, sliced, implementation):
    """Bit for bit, whether the states are given whole or cut apart and put together; the others stay as they are."""
    if implementation == "pallas" and not sliced:
        pytest.skip("takes the state of one layer, not of all")
    ratio, overlap, *_ = KINDS[kind]
    values, gates, ape, state = case(kind, 2, 24)
    alone, last = feed(implementation, kind, values, gates, ape, state, cuts)
    other = np.arange(state.size, dtype=np.float32).reshape(state.shape)

    @jax.jit
    def step(values, gates, states, positions, layer):
        static = {"ratio": ratio, "overlap": overlap, "ape": ape, "implementation": implementation}
        if not sliced:
            return compress(values, gates, states, positions, layer=layer, **static)
        entries, state = compress(values, gates, states[layer], positions, **static)
        return entries, states.at[layer].set(state)

    states, at, entries = np.stack([other, state, -other]), 0, {}
    for size in cuts:
        positions = np.broadcast_to(np.arange(at, at + size, dtype=np.int32), (2, size))
        out, states = step(values[:, at : at + size], gates[:, at : at + size], states, positions, np.int32(1))
        first, at = at // ratio, at + size
        entries |= {first + e: np.asarray(out[:, e]) for e in range(at // ratio - first)}
    assert sorted(entries) == sorted(alone)
    for window, entry in alone.items():
        np.testing.assert_array_equal(entries[window], entry)
    np.testing.assert_array_equal(np.asarray(states), np.stack([other, last, -other]))


@pytest.mark.parametrize("layer", [-1, 3, np.int64(7), np.int32(-1)])
def test_a_layer_that_does_not_exist(layer):
    values, gates, ape, state = case("csa", 2, 4)
    positions = np.broadcast_to(np.arange(4, dtype=np.int32), (2, 4))
    with pytest.raises(ValueError, match=f"layer={layer} to be one of the 3 layers"):
        compress(values, gates, np.stack([state] * 3), positions, ratio=4, overlap=True, ape=ape, layer=layer)

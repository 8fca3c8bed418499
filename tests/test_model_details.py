"""Pieces of the networks against formulas, and properties of the compiled steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl

import jmla
from jmla.models import forward, moe, params, rope, steps, trunk
from jmla.models.checkpoint import collect_tensors, places
from jmla.models.checkpoint.places import placements
from jmla.models.dsa import rotary_magnitude, softmax_scale
from jmla.models.layers import embed, swiglu
from jmla.models.params import Stack, layer_stacks
from jmla.models.random import init_random
from jmla.models.rope import inverse_frequencies
from tests.tiny import CONFIGS, GLM, V4, V32, tiny_model

IDS = np.random.default_rng(0).integers(2, 96, (1, 40)).astype(np.int32)


# ---- rotary embedding


def yarn_by_hand(dims: int, theta: float, factor: float, fast: float, slow: float, original: float) -> np.ndarray:
    base = theta ** -(np.arange(0, dims, 2) / dims)
    correction = [dims * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta)) for turns in (fast, slow)]
    low, high = np.floor(correction[0]), np.ceil(correction[1])
    keep = 1 - np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    return base / factor * (1 - keep) + base * keep


def test_f17_inverse_frequencies_by_layer_kind(monkeypatch):
    """Sliding layers and the draft layer: base theta, no YaRN. Compressing layers: their theta with YaRN."""
    config = dataclasses.replace(
        V4, qk_rope_head_dim=64, head_dim=512, yarn=dataclasses.replace(V4.yarn, original_max_position_embeddings=65536)
    )
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    compressed = yarn_by_hand(64, 160000.0, 16, 32, 1, 65536)
    assert compressed[15] == pytest.approx(160000.0 ** -(30 / 64))  # the ramp of the published model starts at pair 15
    assert compressed[25] == pytest.approx(160000.0 ** -(50 / 64) / 16)  # and ends at pair 25
    asked = []

    class Context:
        def rotary(self, positions, dims, theta, yarn):
            asked.append(inverse_frequencies(dims, theta, yarn))

    kinds = [*params.layer_kinds(config), params.draft_kind(config)]
    for kind in kinds:
        params.layer_module(config, kind, "float32").rotary(Context(), None)
    for kind, frequencies in zip(kinds, asked, strict=True):
        expected = plain if kind.attention == "window" else compressed
        np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert kinds[-1].attention == "window"


def test_f17_v32_yarn_ramp():
    frequencies = inverse_frequencies(64, 10000.0, dataclasses.replace(V32.yarn, original_max_position_embeddings=4096))
    np.testing.assert_allclose(frequencies, yarn_by_hand(64, 10000.0, 40, 32, 1, 4096), rtol=1e-6)


def test_k11_rotation_pairs():
    """Interleaved pairs (2i, 2i+1) and half-split pairs (i, i+d/2), and the way back."""
    x = np.float32([[1, 2, 3, 4]])
    table = np.float32([[np.cos(0.5), np.cos(0.1), np.sin(0.5), np.sin(0.1)]])
    turn = lambda a, b, t: (a * np.cos(t) - b * np.sin(t), a * np.sin(t) + b * np.cos(t))  # noqa: E731
    p, q = turn(1, 2, 0.5), turn(3, 4, 0.1)
    np.testing.assert_allclose(rope.rotate(x, table)[0], [*p, *q], rtol=1e-6)
    p, q = turn(1, 3, 0.5), turn(2, 4, 0.1)
    np.testing.assert_allclose(rope.rotate(x, table, interleaved=False)[0], [p[0], q[0], p[1], q[1]], rtol=1e-6)
    np.testing.assert_allclose(rope.rotate(rope.rotate(x, table), table, inverse=True), x, rtol=1e-6)


# ---- experts


def test_k11_clamp_is_one_sided_for_the_gate():
    gate_up = np.float32([[9, -9, 2, -2]])
    silu = lambda g: g / (1 + np.exp(-g))  # noqa: E731
    np.testing.assert_allclose(swiglu(gate_up, 1.0)[0], [silu(1.0) * 1, silu(-9.0) * -1], rtol=1e-6)
    np.testing.assert_allclose(swiglu(gate_up, None)[0], [silu(9.0) * 2, silu(-9.0) * -2], rtol=1e-6)


def test_k11_hash_routing_weighs_by_scores():
    """Hash layers renormalise sqrt(softplus) of the gate's logits over the table's experts; they do not weigh 1/k."""
    logits = np.float32([[0.0, 1.0, 2.0, -1.0]])
    chosen, weights = moe.route_v4(logits, None, np.int32([[3, 1]]), 2, 1.5, True)
    scores = np.sqrt(np.log1p(np.exp([-1.0, 1.0])))
    np.testing.assert_array_equal(chosen, [[3, 1]])
    np.testing.assert_allclose(weights[0], scores / scores.sum() * 1.5, rtol=1e-6)


def test_learned_routing_biases_the_choice_alone():
    logits = np.float32([[0.0, 1.0, 2.0, -1.0]])
    chosen, weights = moe.route_v4(logits, np.float32([5, 0, 0, 4]), None, 2, 1.0, True)
    np.testing.assert_array_equal(chosen, [[0, 3]])
    scores = np.sqrt(np.log1p(np.exp([0.0, -1.0])))
    np.testing.assert_allclose(weights[0], scores / scores.sum(), rtol=1e-6)


def test_grouped_routing_keeps_the_best_groups():
    """Four groups of two: the groups' scores are the sums of their two best; the best expert's group may lose."""
    wanted = np.float32([0.99, 0.01, 0.6, 0.6, 0.5, 0.55, 0.2, 0.1])
    logits = np.log(wanted / (1 - wanted))[None]
    chosen, weights = moe.route_grouped(logits, np.zeros(8, np.float32), 3, 4, 2, 2.5, True)
    np.testing.assert_array_equal(chosen, [[2, 3, 5]])
    np.testing.assert_allclose(weights[0], wanted[[2, 3, 5]] / wanted[[2, 3, 5]].sum() * 2.5, rtol=1e-5)


def test_c14_nan_router_logits_stay_in_range():
    logits = np.random.default_rng(0).normal(size=(2, 1024)).astype(np.float32)
    logits[0, 7] = -np.float32(np.nan)
    chosen, _ = moe.route_grouped(logits, np.zeros(1024, np.float32), 8, 1, 1, 1.0, True)
    scores = np.where(np.isnan(logits), -np.inf, logits)
    for row in range(2):
        assert set(np.asarray(chosen[row])) == set(np.argsort(-scores[row])[:8])


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_experts_equal_a_loop(rows):
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    gate_up = rng.normal(size=(5, 12, 8)).astype(np.float32)
    down = rng.normal(size=(5, 8, 6)).astype(np.float32)
    chosen = np.stack([rng.permutation(5)[:2] for _ in range(rows)]).astype(np.int32)
    chosen[0, 1] = -1
    weights = rng.uniform(size=(rows, 2)).astype(np.float32)
    expected = np.zeros((rows, 8))
    for r in range(rows):
        for e, w in zip(chosen[r], weights[r], strict=True):
            if e >= 0:
                gate, up = np.split(gate_up[e].astype(np.float64) @ x[r], 2)
                expected[r] += w * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    out = moe.experts(*map(jnp.asarray, (x, chosen, weights, gate_up, down)), None)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_k7_random_expert_tables_are_in_range():
    drawn = init_random(V4, seed=1)
    tables = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(drawn) if path[-1].key == "fixed"]
    assert tables
    for table in tables:
        assert table.dtype == np.int32
        assert table.min() >= 0
        assert table.max() < V4.n_routed_experts
        assert (np.sort(table, axis=-1)[..., 1:] != np.sort(table, axis=-1)[..., :-1]).all()


def test_k8_ids_outside_the_vocabulary_are_inert_on_the_device_and_errors_on_the_host():
    table = jnp.arange(12.0).reshape(4, 3) + 1
    rows = embed(table, jnp.array([-1, 0, 3, 4, 2**31 - 1]))
    np.testing.assert_array_equal(rows, np.stack([np.zeros(3), table[0], table[3], np.zeros(3), np.zeros(3)]))
    layer = trunk.nnx.merge(
        params.graphdef(params.layer_module(V4, params.layer_kinds(V4)[0], "float32")),
        jax.tree.map(lambda w: w[0], tiny_model("v4").params["stacks"]["00"]["0"]),
    )
    routed = layer.route(jnp.ones((3, 4, 32)), jnp.array([-1, 96, 5]))
    np.testing.assert_array_equal(routed["chosen"][:2], -1)
    np.testing.assert_array_equal(routed["weights"][:2], 0)
    assert (np.asarray(routed["chosen"][2]) >= 0).all()
    for bad in (-1, 96):
        with pytest.raises(ValueError, match=rf"Expected token ids in 0\.\.95, got {bad}"):
            forward(tiny_model("v4"), np.array([[3, bad]]))


# ---- layers in stacks


def test_layers_are_grouped_as_in_the_published_models():
    flash = dataclasses.replace(
        V4,
        num_hidden_layers=43,
        layer_kinds=("window", "window", "csa", *("hca", "csa") * 20),
        layer_routing=("hash",) * 3 + ("learned",) * 40,
    )
    assert [(s.repeats, len(s.unit), s.first) for s in layer_stacks(flash)] == [(2, 1, 0), (1, 1, 2), (20, 2, 3)]
    pro = dataclasses.replace(
        V4,
        num_hidden_layers=61,
        layer_kinds=("hca", "hca", "csa", *("hca", "csa") * 29),
        layer_routing=("hash",) * 3 + ("learned",) * 58,
    )
    assert [(s.repeats, len(s.unit), s.first) for s in layer_stacks(pro)] == [(2, 1, 0), (1, 1, 2), (29, 2, 3)]
    pair = [(kind.attention, kind.routing) for kind in layer_stacks(pro)[2].unit]
    assert pair == [("hca", "learned"), ("csa", "learned")]
    glm52 = dataclasses.replace(
        GLM,
        num_hidden_layers=78,
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
        indexer_types=tuple("full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78)),
    )
    assert [(s.repeats, len(s.unit), s.first) for s in layer_stacks(glm52)] == [(3, 1, 0), (18, 4, 3), (3, 1, 75)]
    v32 = dataclasses.replace(
        V32, num_hidden_layers=61, mlp_layer_types=("dense",) * 3 + ("sparse",) * 58, indexer_types=("full",) * 61
    )
    assert [(s.repeats, len(s.unit), s.first) for s in layer_stacks(v32)] == [(3, 1, 0), (58, 1, 3)]


@pytest.mark.parametrize("family", ["v4", pytest.param("glm", marks=pytest.mark.slow)])
def test_scanned_layers_equal_unrolled_ones(family, monkeypatch):
    """The same checkpoint tensors, laid out with every layer a stack of its own."""
    model = tiny_model(family)
    expected = forward(model, IDS)
    tensors = collect_tensors(model.config, model.params)

    def unrolled(config):
        return tuple(Stack((kind,), 1, i) for i, kind in enumerate(params.layer_kinds(config)))

    for module in (params, places, trunk):
        monkeypatch.setattr(module, "layer_stacks", unrolled)
    flat = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), params.abstract_params(model.config, "float32"))
    for name, place in placements(model.config).items():
        for piece in place.pieces:
            destination = flat
            for key in piece.path:
                destination = destination[key]
            source = tensors[name] if piece.reshape is None else tensors[name].reshape(piece.reshape)
            destination[piece.index] = source if piece.take is None else source[piece.take]
    spec = dataclasses.replace(model.spec, max_seq_len=model.spec.max_seq_len - 1)  # a trace of its own
    flat_model = dataclasses.replace(model, params=jax.tree.map(jnp.asarray, flat), spec=spec)
    assert len(flat_model.params["stacks"]) == model.config.num_hidden_layers
    np.testing.assert_allclose(forward(flat_model, IDS), expected, atol=1e-5, rtol=0)


def test_compiled_program_does_not_grow_with_the_layers():
    def lines(repeats: int) -> int:
        config = dataclasses.replace(
            V4,
            num_hidden_layers=1 + 2 * repeats,
            layer_kinds=("window", *("csa", "hca") * repeats),
            layer_routing=("hash", *("learned",) * 2 * repeats),
        )
        shapes = params.abstract_params(config, "float32")
        spec = dataclasses.replace(tiny_model("v4").spec, config=config)
        return len(
            steps._forward.lower(spec, shapes, jax.ShapeDtypeStruct((1, 40), jnp.int32), False).as_text().splitlines()
        )

    assert lines(2) == lines(9)


def test_a_step_has_few_leaves():
    model = tiny_model("v4")
    cache = jmla.init_cache(model, 1, 64)
    assert len(jax.tree.leaves((model.params, cache))) <= 100


# ---- gradients


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("v4", marks=pytest.mark.slow), "glm"])
def test_forward_is_differentiable(family):
    """The derivative along a random direction equals a central difference, and reaches the parts of attention."""
    model, ids = tiny_model(family), jnp.asarray(IDS[:, :24])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, 24, 96)), jnp.float32) / 48
    floats, tables = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        (tables if leaf.dtype == jnp.int32 else floats)[jax.tree_util.keystr(path)] = leaf
    structure = jax.tree.structure(model.params)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model.params)]

    @jax.jit
    def loss(floats):
        tree = jax.tree.unflatten(structure, [floats.get(n, tables.get(n)) for n in names])
        return jnp.sum(forward(dataclasses.replace(model, params=tree), ids) * weights)

    grads = jax.grad(loss)(floats)
    rng = np.random.default_rng(2)
    # A short way: routing and selection are steps, which a longer one would cross.
    moved = [n for n in floats if any(part in n for part in ("wkv", "wo", "w_uv", "compressor", "down", "head"))]
    step = {
        n: jnp.asarray(rng.normal(size=x.shape), jnp.float32) * (1e-4 if n in moved else 0) for n, x in floats.items()
    }
    slope = sum(float(jnp.vdot(grads[n], step[n])) for n in floats)
    up, down = (float(loss({n: x + sign * step[n] for n, x in floats.items()})) for sign in (1, -1))
    assert slope == pytest.approx((up - down) / 2, rel=0.05, abs=2e-5)
    for name, gradient in grads.items():
        assert np.isfinite(gradient).all(), name
        used = not any(part in name for part in ("draft", "index_", "indexer"))
        assert bool(jnp.any(gradient)) == used or not used, name
    assert any("compressor" in n for n in moved) == (family == "v4")


# ---- steps


@pytest.mark.parametrize("family", [pytest.param("v4", marks=pytest.mark.slow), "v32"])
def test_steps_make_no_device_to_host_transfer(family, monkeypatch):
    """Prefill, the draft block over it, and decoding, with what they take on the device."""
    model, tokens = tiny_model(family), jnp.array([5, 6])
    ids, lengths, following = jnp.asarray(IDS), jnp.array([40]), jnp.roll(IDS, -1, axis=1)

    def run():
        _, hidden, cache = jmla.prefill(model, ids, lengths, jmla.init_cache(model, 1, 64), return_hidden=True)
        drafted, _, _ = jmla.draft(model, hidden, following, cache, lengths=lengths)
        logits, _ = jmla.decode(model, tokens, jmla.init_cache(model, 2, 64))
        return jax.block_until_ready((drafted, logits))

    run()  # compiles

    def fetched(self):
        raise AssertionError("device-to-host transfer")

    monkeypatch.setattr(ArrayImpl, "_value", property(fetched))
    _, logits = run()
    with pytest.raises(AssertionError, match="device-to-host"):
        float(logits[0, 0])


def test_d6_inactive_rows_give_zeros_and_keep_their_place():
    model = tiny_model("v4")
    cache = jmla.init_cache(model, 2, 64)
    logits, cache = jmla.decode(model, [5, 6], cache, active=[True, False])
    assert np.asarray(logits[0]).any()
    assert not np.asarray(logits[1]).any()
    np.testing.assert_array_equal(cache.lengths, [1, 0])


def test_donated_caches_are_refused_and_kept_ones_are_not():
    model = tiny_model("v4")
    cache = jmla.init_cache(model, 2, 64)
    _, kept = jmla.decode(model, [5, 6], cache, donate=False)
    first, after = jmla.decode(model, [5, 6], cache)
    with pytest.raises(jmla.CacheConsumedError, match=r"jmla\.copy\(cache\).*donate=False"):
        jmla.decode(model, [5, 6], cache)
    with pytest.raises(jmla.CacheConsumedError):
        jmla.copy(cache)
    np.testing.assert_array_equal(kept.lengths, after.lengths)
    assert np.isfinite(first).all()


@pytest.mark.slow
def test_tokens_past_the_capacity_are_padding():
    model = tiny_model("v4")
    cache = jmla.init_cache(model, 1, 10)
    with pytest.raises(ValueError, match=r"lengths of at most 10.*\[40\]"):
        jmla.prefill(model, IDS, [40], cache)
    logits, cache = jmla.prefill(model, IDS, jnp.array([40]), cache, all_logits=True)
    assert int(cache.lengths[0]) == 10
    within, _ = jmla.prefill(model, IDS, [10], jmla.init_cache(model, 1, 10), all_logits=True)
    np.testing.assert_array_equal(logits[0, :10], within[0, :10])
    assert np.asarray(within[0, :10]).any(axis=-1).all()
    assert not np.asarray(logits[0, 10:]).any()
    full, cache = jmla.decode(model, [5], cache)
    assert int(cache.lengths[0]) == 10
    assert not np.asarray(full).any()
    with pytest.raises(jmla.kernels.ValueCheckError, match="max_seq_len=10"), jmla.debug_checks():
        jmla.decode(model, [5], cache)
    with pytest.raises(jmla.kernels.ValueCheckError, match=r"to be in 0\.\.95"), jmla.debug_checks():
        jmla.decode(model, jnp.array([96]), jmla.init_cache(model, 1, 10))


def log_probs(logits) -> np.ndarray:
    logits = np.asarray(logits[0], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence at each position."""
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def choosing_all(model):
    """The same weights with nothing to choose: every key that is visible and every expert."""
    config = model.config
    changes = {"index_topk": 40, "num_experts_per_tok": config.n_routed_experts, "topk_group": config.n_group}
    return dataclasses.replace(
        model, spec=dataclasses.replace(model.spec, config=dataclasses.replace(config, **changes))
    )


def test_double_precision_mode_changes_nothing():
    """Under JAX_ENABLE_X64 arrays made without a dtype are 64 bits wide; ours all have one."""
    model = tiny_model("v4")
    expected = forward(model, IDS)
    with jax.enable_x64(True):
        logits = forward(model, IDS)
        assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in ("v4", "v32", "glm")])
def test_bfloat16_agrees_in_distribution(family):
    """bf16 weights and activations against float32; with the FP8 cache that loading takes by default, too.

    The random V3.2 and GLM models hold close choices of six keys among forty and of two experts among eight, and some
    flip. So what rounding does is measured with nothing to choose; the models that choose are held to less below.
    """
    own = "footer584" if family == "v4" else "inline656"
    variant = (lambda model: model) if family == "v4" else choosing_all
    exact = log_probs(forward(variant(tiny_model(family)), IDS))
    rough = log_probs(forward(variant(tiny_model(family, dtype="bfloat16", deterministic=False)), IDS))
    assert 0 < divergence(exact, rough).mean() < 1e-3
    assert (exact.argmax(-1) == rough.argmax(-1)).mean() >= 0.95
    model = variant(tiny_model(family, kv_layout=own, dtype="bfloat16", deterministic=False))
    packed, _ = jmla.prefill(model, IDS, [40], jmla.init_cache(model, 1, 64), all_logits=True)
    assert np.isfinite(packed).all()
    moved = divergence(rough, log_probs(packed))
    assert 0 < np.median(moved) < 2e-3
    assert moved.mean() < 5e-3


@pytest.mark.parametrize("family", ["v32", pytest.param("glm", marks=pytest.mark.slow)])
def test_bfloat16_with_close_choices(family):
    """Most positions agree closely; those behind a flipped choice of a key or an expert move as far as they like."""
    exact = log_probs(forward(tiny_model(family), IDS))
    rough = log_probs(forward(tiny_model(family, dtype="bfloat16", deterministic=False), IDS))
    assert np.median(divergence(exact, rough)) < 5e-3
    assert divergence(exact, rough).mean() < 0.1
    assert (exact.argmax(-1) == rough.argmax(-1)).mean() > 0.8


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"kv_layout": "footer584"}, "window plain-float32.*got one of .*window footer"),
        ({"drafting": False}, "6 x window.*got one of 5 x window"),
        ({"prefill_chunk": 16}, "chunks of 512.*made for at most 249"),
    ],
)
def test_a6_caches_of_another_kind_are_refused(other, message):
    """A cache of another format, without the draft layer, or with window pages for shorter chunks."""
    model = tiny_model("v4")
    cache = jmla.init_cache(dataclasses.replace(model, spec=dataclasses.replace(model.spec, **other)), 6, 2048)
    with pytest.raises(ValueError, match=message):
        jmla.decode(model, np.full(6, 5), cache)
    assert not cache.lengths.is_deleted()


def test_v6_state_of_another_ratio_is_refused():
    config = dataclasses.replace(V4, hca_ratio=16)
    other = dataclasses.replace(tiny_model("v4"), spec=dataclasses.replace(tiny_model("v4").spec, config=config))
    with pytest.raises(ValueError, match="Expected a cache made by"):
        jmla.decode(tiny_model("v4"), [5], jmla.init_cache(other, 1, 64))


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_a_step_reads_the_chosen_experts_only(family):
    """Experts of 4 MB a layer, two layers scanned: no copy of a layer's experts among a decode step's temporaries."""
    config = dataclasses.replace(CONFIGS[family], n_routed_experts=64, moe_intermediate_size=512)
    shapes = params.abstract_params(config, "float32")
    spec = dataclasses.replace(tiny_model(family).spec, config=config, deterministic=False)
    model = dataclasses.replace(tiny_model(family), params=shapes, spec=spec)
    cache = jax.eval_shape(lambda: jmla.init_cache(model, 1, 64))
    arguments = {"tokens": jax.ShapeDtypeStruct((1, 1), jnp.int32), "counts": jax.ShapeDtypeStruct((1,), jnp.int32)}
    compiled = (
        steps._compiled("advance", True)
        .lower(spec=spec, params=shapes, cache=cache, all_logits=False, return_hidden=False, **arguments)
        .compile()
    )
    one_layer = 64 * 3 * 512 * 32 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer / 2


def test_padding_runs_no_expert():
    model = tiny_model("v4")
    ctx = trunk.make_context(
        model.spec, jmla.init_cache(model, 2, 64), jnp.zeros((2, 3), jnp.int32), jnp.array([1, 3]), jnp.array([0, 0])
    )
    chosen = ctx.without_padding(jnp.arange(12).reshape(6, 2))
    np.testing.assert_array_equal(chosen, [[0, 1], [-1, -1], [-1, -1], [6, 7], [8, 9], [10, 11]])


@pytest.mark.parametrize("family", ["v4", pytest.param("v32", marks=pytest.mark.slow)])
def test_selection_does_not_depend_on_the_width_of_the_cache(family):
    """A cache of more keys than the text has: scores are as wide as the text needs, the choice is the same."""
    config = dataclasses.replace(CONFIGS[family], max_position_embeddings=1 << 16)
    small = tiny_model(family)
    model = dataclasses.replace(small, spec=dataclasses.replace(small.spec, config=config, max_seq_len=1 << 16))
    logits, _ = jmla.prefill(model, IDS, [40], jmla.init_cache(model, 1, 1 << 16))
    expected, _ = jmla.prefill(small, IDS, [40], jmla.init_cache(small, 1, 64))
    np.testing.assert_array_equal(logits, expected)


def test_v32_rotary_magnitude():
    """1 where both magnitudes are set alike, their quotient where they differ, YaRN's default where they are absent."""
    m = lambda scale: 0.1 * scale * np.log(40) + 1  # noqa: E731
    for mscale, all_dim, expected in ((1.0, 1.0, 1.0), (1.0, 0.5, m(1) / m(0.5)), (None, None, m(1))):
        yarn = dataclasses.replace(V32.yarn, mscale=mscale, mscale_all_dim=all_dim)
        assert rotary_magnitude(dataclasses.replace(V32, yarn=yarn)) == pytest.approx(expected)
    assert rotary_magnitude(GLM) == 1.0
    real = dataclasses.replace(V32, qk_nope_head_dim=128, qk_rope_head_dim=64)
    assert softmax_scale(real) == pytest.approx(0.1352338, rel=1e-6)
    assert softmax_scale(dataclasses.replace(GLM, qk_nope_head_dim=192, qk_rope_head_dim=64)) == 0.0625


# ---- drafting


@pytest.mark.parametrize("family", CONFIGS)
def test_drafts_do_not_depend_on_chunks(family):
    model = tiny_model(family)
    cache = jmla.init_cache(model, 1, 64)
    _, hidden, cache = jmla.prefill(model, IDS, [40], cache, return_hidden=True)
    following = np.roll(IDS, -1, axis=1)
    logits, carried, _ = jmla.draft(model, hidden, following, jmla.copy(cache))
    assert logits.shape == (1, 40, 96)
    pieces = []
    for start, stop in ((0, 1), (1, 2), (2, 8), (8, 40)):
        block = np.zeros_like(IDS)
        block[:, : stop - start] = following[:, start:stop]
        states = jnp.zeros_like(hidden).at[:, : stop - start].set(hidden[:, start:stop])
        part, part_carried, cache = jmla.draft(model, states, block, cache, lengths=[stop - start])
        pieces.append(part[0, : stop - start])
    np.testing.assert_array_equal(np.concatenate(pieces), logits[0])
    np.testing.assert_array_equal(part_carried[0, :32], carried[0, 8:])
    np.testing.assert_array_equal(cache.draft_lengths, [40])


def test_g10_what_a_draft_hands_on():
    """GLM carries the normalised rows into the next draft step, DeepSeek-V3.2 the rows as they are."""
    for family, normed in (("glm", True), ("v32", False)):
        model = tiny_model(family)
        block = trunk.draft(model.spec, model.params)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 32)), jnp.float32)
        scale = np.asarray(block.small["norm"], np.float64)
        mean = np.mean(np.asarray(x, np.float64) ** 2, -1, keepdims=True)
        expected = x / np.sqrt(mean + model.config.rms_norm_eps) * scale if normed else x
        np.testing.assert_allclose(block.hidden(x), expected, rtol=1e-5, atol=1e-6)


# ---- sizes


def test_cache_bytes_are_those_of_the_formats():
    """V4-Flash: per 256 raw tokens 37,440 + 8,448 B a CSA layer and 1,728 B an HCA layer; the state is fixed."""
    flash = dataclasses.replace(
        V4,
        num_hidden_layers=43,
        head_dim=512,
        qk_rope_head_dim=64,
        hca_ratio=128,
        sliding_window=128,
        index_head_dim=128,
        layer_kinds=("window", "window", "csa", *("hca", "csa") * 20),
        layer_routing=("hash",) * 3 + ("learned",) * 40,
    )
    spec = dataclasses.replace(tiny_model("v4").spec, config=flash, kv_layout="footer584")
    per_token = jmla.models.bytes_per_token(spec)
    assert per_token == {"csa": 21 * 37440 / 256, "hca": 20 * 1728 / 256, "index": 21 * 8448 / 256}
    per_row = jmla.models.bytes_per_row(spec)
    assert per_row["csa state"] == 21 * 8 * 8192
    assert per_row["index state"] == 21 * 8 * 2048
    assert per_row["hca state"] == 20 * 128 * 4096
    model = dataclasses.replace(tiny_model("v4", kv_layout="footer584"))
    cache = jmla.init_cache(model, 3, 600)
    held = cache.nbytes
    for stream, rate in jmla.models.bytes_per_token(model.spec).items():
        assert held[stream] == 3 * 768 * rate  # whole pages
    for name, size in jmla.models.bytes_per_row(model.spec).items():
        if "state" in name:
            assert held[name] == 3 * size


def test_a10_e8_limits_are_stated():
    model = tiny_model("v4")
    with pytest.raises(ValueError, match=r"max_seq_len=5000.*1\.\.4096"):
        jmla.init_cache(model, 1, 5000)
    with pytest.raises(ValueError, match="slots"):
        jmla.init_cache(model, 2**20, 4096)

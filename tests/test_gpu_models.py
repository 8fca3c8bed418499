"""Whole models on a GPU: the text of the CPU, the loss of its FP8 caches, no copy of a pool, and the operator's switch.

With TRITON_INTERPRET=1 and no GPU the first two run in Triton's interpreter, on fewer tokens.
"""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmla
from jmla import kernels
from jmla.bench.profile import FLASH, random_pool
from jmla.bench.trace import busy_us, traced
from jmla.kernels import dispatch, launch
from jmla.models import make_model
from jmla.models.random import init_random
from tests.kernel_calls import forbid
from tests.tiny import GLM, V32
from training import evaluate

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent
OPS = ("index_scores", "kv_pack", "resolve_slots", "sparse_mla", "top_k")
V4_OPS = ("compress", "sinkhorn")  # further ones of V4
EXACT_OPS = ("kv_pack", "resolve_slots", "top_k")  # those whose kernels take float32; products of it are XLA's
GREEDY = jmla.SamplingParams(temperature=0.0)


def gpus():
    return [device for device in jax.devices() if device.platform == "gpu"]


def interpreted():
    return not gpus() and os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Nothing compiled and no choice made before; skips where no kernel can run."""
    if not gpus() and not interpreted():
        pytest.skip("needs an NVIDIA GPU, or TRITON_INTERPRET=1")
    monkeypatch.delenv("JMLA_DISABLE", raising=False)
    monkeypatch.setattr(dispatch, "_choices", {})
    jax.clear_caches()


@pytest.fixture
def only_gpu():
    if not gpus():
        pytest.skip("needs an NVIDIA GPU")


@contextlib.contextmanager
def on_gpu():
    """Arrays and programs go to the GPU; or kernels to the interpreter."""
    if gpus():
        with jax.default_device(gpus()[0]):
            yield
        return
    from tests import triton_interpreter

    launch.interpreter = triton_interpreter.run
    try:
        with kernels.target(compute_capability=120):
            yield
    finally:
        launch.interpreter = None


def on_cpu():
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def served():
    """Which implementations have served each operation."""
    by_op: dict[str, set[str]] = {}
    for choice in kernels.report():
        by_op.setdefault(choice.op, set()).add(choice.implementation)
    return by_op


def check_kernels_served(ops):
    """Each by its kernel, and chosen before lowering: the device was known."""
    found = served()
    assert {op: found.get(op) for op in ops} == {op: {"triton on cuda"} for op in ops}, str(kernels.report())


# ---- the text of the CPU


def test_bundled_model_says_on_the_gpu_what_it_says_on_the_cpu():
    """Float32 throughout. Products of float32 stay with XLA; packing, selection and slots are kernels."""
    prompts, new = evaluate.prompts()[:8], 64
    if interpreted():
        prompts, new = prompts[:1], 3

    def complete():
        model = jmla.load("jmla-tiny-v4", dtype="float32", kv_layout="float32")
        return [c.token_ids for c in jmla.generate(model, prompts, max_new_tokens=new, sampling=GREEDY)]

    with on_cpu():
        expected = complete()
    assert all(len(ids) == new for ids in expected)
    assert all(names == {"xla"} for names in served().values()), str(kernels.report())
    dispatch._choices.clear()
    with on_gpu():
        assert complete() == expected
    check_kernels_served(EXACT_OPS)


@pytest.mark.parametrize("case", ["v4_small", "v32", "glm", "glm_shared"])
def test_random_models_say_on_the_gpu_what_they_say_on_the_cpu(case, golden_checkpoint):
    """The golden prompt, whose continuation is recorded, and two pieces of it; nothing in them hangs on rounding."""
    golden = golden_checkpoint(case)
    prompt, new = golden.arrays["prompt"], 64
    rows = [prompt, prompt[: len(prompt) // 2], prompt[len(prompt) // 3 :]]
    if interpreted():
        rows, new = [row[:12] for row in rows[:2]], 2
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    lengths = np.array([len(row) for row in rows])
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids

    def complete():
        model = jmla.load(golden.path, dtype="float32", kv_layout="float32")
        out, ends, _ = jmla.generate_tokens(
            model, tokens, lengths, jax.random.key(0), max_new_tokens=new, sampling=GREEDY, eos=()
        )
        assert (np.asarray(ends) == lengths + new).all()
        return [row[n : n + new].tolist() for row, n in zip(np.asarray(out), lengths, strict=True)]

    with on_cpu():
        expected = complete()
    dispatch._choices.clear()
    with on_gpu():
        got = complete()
    check_kernels_served(EXACT_OPS)
    assert got == expected
    if not interpreted():
        assert got[0] == golden.arrays["greedy"].tolist()


# ---- FP8 caches


def loss(dtype, layout, tokens):
    """Nats a token of the bundled model on code of this project, on the device in use: prefill, then single steps."""
    model = jmla.load("jmla-tiny-v4", dtype=dtype, kv_layout=layout)
    text = (ROOT / "kernels" / "dispatch.py").read_text(encoding="utf-8")
    ids = np.array(model.text.tokenizer.encode(text), np.int32)[:tokens]
    steps = 2 if interpreted() else 64
    cache = jmla.init_cache(model, 1, tokens)
    logits, cache = jmla.prefill(model, ids[None, :-steps], [tokens - steps], cache, all_logits=True)
    rows = [np.asarray(logits[0])]
    for token in ids[-steps:]:
        logits, cache = jmla.decode(model, [token], cache)
        rows.append(np.asarray(logits))
    log_probs = np.asarray(jax.nn.log_softmax(np.concatenate(rows), axis=-1))
    return -log_probs[np.arange(tokens - 1), ids[1:]].mean()


def test_fp8_cache_hardly_moves_the_loss():
    """The bound of the CPU path, with kernels serving: within 1 % of a float32 model with a bf16 cache on the CPU."""
    tokens = 24 if interpreted() else 1024
    with on_cpu():
        expected = loss("float32", "bfloat16", tokens)
    dispatch._choices.clear()
    with on_gpu():
        got = loss("bfloat16", "footer584", tokens)
    check_kernels_served((*OPS, *V4_OPS))
    assert 1.0 < expected < 3.5 or interpreted()
    assert got == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("family", ["v32", "glm"])
def test_inline_caches_give_the_logits_of_the_cpu(family):
    """V3.2 and GLM at their published attention widths, bf16 and FP8: kernels against XLA on the CPU.

    All keys and all experts take part, so that no close choice separates the two.
    """
    config = dataclasses.replace(
        {"v32": V32, "glm": GLM}[family],
        num_attention_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_topk=512,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
    )
    prompt, steps = (12, 1) if interpreted() else (300, 8)
    ids = np.random.default_rng(0).integers(2, config.vocab_size, (2, prompt + steps)).astype(np.int32)
    weights = init_random(config, "bfloat16", seed=1, drafting=False)

    def run():
        model = make_model(config, jax.tree.map(jnp.asarray, weights), dtype="bfloat16")
        cache = jmla.init_cache(model, 2, 512)
        logits, cache = jmla.prefill(model, ids[:, :prompt], [prompt, prompt - 7], cache, all_logits=True)
        out = [np.asarray(logits)[:, : prompt - 7]]
        for i in range(steps):
            logits, cache = jmla.decode(model, ids[:, prompt + i], cache)
            out.append(np.asarray(logits)[:, None])
        return np.concatenate(out, axis=1).astype(np.float64)

    with on_cpu():
        want = run()
    dispatch._choices.clear()
    with on_gpu():
        got = run()
    check_kernels_served(OPS)
    assert np.isfinite(got).all()
    assert want.std() > 0.5
    assert 1 - 2 * np.sum(got * want) / np.sum(got**2 + want**2) < 2e-3


# ---- pools are never copied


def narrow_flash(layers, **changes):
    """A random V4 of V4-Flash's attention widths, otherwise narrow, so that little but the pools takes memory."""
    narrow = {
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "layer_kinds": ("window", "window", *("csa", "hca") * (layers // 2 - 1)),
        "layer_routing": ("learned",) * layers,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_nextn_predict_layers": 0,
    }
    config = dataclasses.replace(FLASH, **narrow | changes)
    return make_model(config, jax.tree.map(jnp.asarray, init_random(config, "bfloat16")))


def steps_over_pools(model, sizes, rows=8, context=4096):
    """Decode steps over pools of ``sizes`` bytes in all, one size after another; prints a line of JSON.

    That is, for each size, the bytes of the pools and the milliseconds of a step in which the device works (the clock
    would add the host's part, which varies); and the peak of the process's allocated bytes up to the end of the first
    size, where the device counts them.
    """
    out = {"bytes": [], "device_ms": []}
    for size in sizes:
        loop = Loop(model, scattered(model, rows, context, size))
        out["bytes"].append(sum(pool.nbytes for pool in loop.cache.pools.values()))
        assert np.isfinite(np.asarray(loop.run(2))).all()
        out["device_ms"].append(busy_us(traced(functools.partial(loop.run, 5))) / 5e3)
        del loop
        out.setdefault("peak", (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"))
    out["served"] = {op: sorted(names) for op, names in served().items()}
    print(json.dumps(out))


class Loop:
    """Steps of a model on the one cache, which each of them takes over."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    def run(self, steps):
        """The last logits, when the device has made them."""
        for _ in range(steps):
            logits, self.cache = jmla.decode(self.model, np.zeros(self.cache.batch, np.int32), self.cache)
        return jax.block_until_ready((logits, self.cache))[0]


def scattered(model, rows, context, size):
    """A cache of ``rows`` sequences whose pages lie anywhere in pools of ``size`` bytes in all."""
    cache = jmla.init_cache(model, rows, 2 * context)
    layers, shapes = dict(cache.layers), {name: pool.shape for name, pool in cache.pools.items()}
    factor = size / sum(pool.nbytes for pool in cache.pools.values())
    assert factor >= 1, f"pools of {size} bytes do not hold {rows} sequences"
    cache = cache.replace(pools={})  # frees them before the large ones are made
    pages = {name: int(length // layers[name] * factor) for name, (length, _) in shapes.items()}
    rng = np.random.default_rng(0)
    anywhere, window = (rng.permutation(pages[name]).astype(np.int32) for name in ("csa", "window"))
    return cache.replace(
        pools={name: random_pool(layers[name] * pages[name], stride) for name, (_, stride) in shapes.items()},
        table=jnp.asarray(anywhere[np.asarray(cache.table)]),
        window_table=jnp.asarray(window[np.asarray(cache.window_table)]),
        lengths=jnp.full((rows,), context, jnp.int32),
    )


@pytest.mark.usefixtures("only_gpu")
def test_a_step_of_40_layers_holds_one_pool_and_its_time_does_not_depend_on_it():
    """In a process of its own, as the peak counts from the start of a process: pools of 8 and of 1 GiB."""
    code = "from tests import test_gpu_models as t; t.steps_over_pools(t.narrow_flash(40), [8 << 30, 1 << 30])"
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert all(set(got["served"][op]) <= {"triton on cuda", "cute on cuda"} for op in OPS), got
    assert got["bytes"][0] > 7.9 * 2**30, got
    assert got["peak"] < 8.5 * 2**30, got
    assert got["device_ms"][1] == pytest.approx(got["device_ms"][0], rel=0.05), got


# ---- the operator's switch


def test_switched_off_kernels_leave_a_whole_model_to_xla(monkeypatch):
    """The same logits with kernels and without; the report says which, and no kernel is called that is switched off."""
    ids = np.random.default_rng(0).integers(6, 1024, (2, 16)).astype(np.int32)

    def logits():
        model = jmla.load("jmla-tiny-v4")  # bf16 and FP8, as kernels have it
        logits, cache = jmla.prefill(model, ids, [16, 9], jmla.init_cache(model, 2, 256))
        return np.stack([logits, jmla.decode(model, ids[:, 0], cache)[0]])

    with on_gpu():
        by_kernels = logits()
    check_kernels_served((*OPS, *V4_OPS))
    monkeypatch.setenv("JMLA_DISABLE", "triton,cute")
    jax.clear_caches()
    dispatch._choices.clear()
    for op in (*OPS, *V4_OPS):
        forbid(monkeypatch, op, "triton")
    with on_gpu():
        by_xla = logits()
    assert set(served()) >= set(OPS)
    for choice in kernels.report():
        assert choice.implementation == "xla", str(kernels.report())
        assert choice.op not in OPS or ("triton", "disabled by JMLA_DISABLE") in choice.others
    assert 1 - 2 * np.sum(by_kernels * by_xla) / np.sum(by_kernels**2 + by_xla**2) < 1e-2

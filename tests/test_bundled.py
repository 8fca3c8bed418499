"""The bundled model: real formats on disk, and sense in what it says."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jmla
from jmla import bundled
from training import evaluate

ROOT = Path(__file__).resolve().parent.parent
RECORD = json.loads((ROOT / "docs" / "tiny-v4.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return jmla.load("jmla-tiny-v4")


def test_is_a_published_v4_in_small(model):
    """True geometry of attention, all layer kinds, both routings, a draft block, FP8 blocks and FP4 experts; 5 MiB."""
    folder = bundled.path()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 5 << 20
    config = model.config
    assert (config.head_dim, config.qk_rope_head_dim, config.sliding_window) == (512, 64, 128)
    assert (config.csa_ratio, config.hca_ratio, config.index_head_dim, config.hc_mult) == (4, 128, 128, 4)
    assert set(config.layer_kinds) == {"window", "csa", "hca"}
    assert set(config.layer_routing) == {"hash", "learned"}
    assert model.spec.drafting
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["layers.0.attn.wq_b.weight"]["dtype"] == "F8_E4M3"
    assert header["layers.0.attn.wq_b.scale"]["dtype"] == "F8_E8M0"
    assert header["layers.1.ffn.experts.3.w1.weight"]["dtype"] == "I8"
    assert header["layers.1.ffn.experts.3.w1.scale"]["shape"] == [64, 128 // 32]
    assert header["layers.0.ffn.gate.tid2eid"]["dtype"] == "I64"


@pytest.mark.slow
def test_continues_python_that_tokenizes(model):
    """At least 60 % of the 50 fixed prompts go on to 64 tokens of text that Python's tokenizer accepts as it stands."""
    prompts = evaluate.prompts()
    done = jmla.generate(model, prompts, max_new_tokens=evaluate.CONTINUATION_TOKENS)
    shares = evaluate.acceptance([p + c.text for p, c in zip(prompts, done, strict=True)])
    assert len(prompts) == 50
    assert shares["strict"] >= 0.6
    assert shares["lenient"] >= 0.9


@pytest.mark.slow
def test_fp8_cache_hardly_moves_the_loss():
    """On Python code that it was not trained on (this project's own), as in the record."""
    text = (ROOT / "kernels" / "dispatch.py").read_text(encoding="utf-8")
    losses = {}
    for layout in ("footer584", "bfloat16"):
        model = jmla.load("jmla-tiny-v4", dtype="float32", kv_layout=layout)
        ids = np.array(model.text.tokenizer.encode(text), np.int32)[None, :1024]
        cache = jmla.init_cache(model, 1, 1024)
        logits, _ = jmla.prefill(model, ids, [1024], cache, all_logits=True)
        log_probs = np.asarray(jax.nn.log_softmax(logits[0, :-1], axis=-1))
        losses[layout] = -log_probs[np.arange(1023), ids[0, 1:]].mean()
    assert 1.0 < losses["bfloat16"] < 3.5  # a guess among 1024 tokens would be 6.9
    assert losses["footer584"] == pytest.approx(losses["bfloat16"], rel=0.01)


def test_record_in_docs_states_numbers_within_the_bounds():
    """A check of the record alone: nothing is measured here.

    What training/measure.py wrote down is within the bounds, and docs/tiny-v4.md quotes it. The tests above measure
    the model itself.
    """
    baseline = RECORD["five_gram_bits_per_byte"]["bits_per_byte"]
    fp8, bf16 = RECORD["footer584 cache"], RECORD["bfloat16 cache"]
    assert fp8["bits_per_byte"] <= 0.75 * baseline
    assert fp8["nats_per_token"] == pytest.approx(bf16["nats_per_token"], rel=0.01)
    assert RECORD["acceptance"]["strict"] >= 0.6
    page = (ROOT / "docs" / "tiny-v4.md").read_text(encoding="utf-8")
    for number in (fp8["bits_per_byte"], bf16["bits_per_byte"], baseline, RECORD["draft_acceptance"]):
        assert f"{number:.4f}" in page


@pytest.mark.slow
def test_chunks_around_the_true_window_are_bitwise_equal():
    """Chunks of 127, 128 and 129 tokens, with the true window and ratios, in the FP8 cache too."""
    ids = np.random.default_rng(0).integers(6, 1024, 300).astype(np.int32)
    for layout in ("float32", "footer584"):
        model = jmla.load("jmla-tiny-v4", dtype="float32", kv_layout=layout, deterministic=True)

        def feed(sizes, model=model):
            cache, out, at = jmla.init_cache(model, 1, 512), [], 0
            for size in sizes:
                block = np.zeros((1, 129), np.int32)
                block[0, :size] = ids[at : at + size]
                logits, cache = jmla.prefill(model, block, [size], cache, all_logits=True)
                out.append(np.asarray(logits[0, :size]))
                at += size
            return np.concatenate(out)

        cache = jmla.init_cache(model, 1, 512)
        whole = np.asarray(jmla.prefill(model, ids[None], [300], cache, all_logits=True)[0][0])
        for sizes in ((127, 127, 46), (128, 128, 44), (129, 129, 42), (1, 126, 2, 127, 44)):
            np.testing.assert_array_equal(feed(sizes), whole)

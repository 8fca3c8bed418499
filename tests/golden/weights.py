"""Random weights of the golden models, drawn tensor by tensor from their names.

Every tensor comes from its own generator, so any subset can be drawn alone and in any order. For the tensor `name` of
the case seed `s`:

1. `PCG64(int.from_bytes(sha256(f"{s}:{name}"), "little"))` gives raw 64-bit words; NumPy guarantees that stream.
2. A word w becomes u = (w >> 11) * 2**-52 - 1, uniform in [-1, 1), exact in float64.
3. The value is float32(centre + spread * u), with centre and spread from the tensor's role (see `_draw`). Only IEEE
   multiplication, addition and rounding take part, so the bits do not depend on NumPy's version or on the machine.

Nothing is left at the value that a fresh model has: norms scatter around one, biases, sinks, position biases and the
hyper-connection bases are nonzero, and each row of a hash-routing table holds distinct experts.

Needs NumPy only (and safetensors for `write_checkpoint`).
"""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, np.ndarray]


def shapes(config: Config) -> Shapes:
    """Canonical name and shape of every tensor, the draft (MTP) block included.

    V4 has the names of the original checkpoint, V3.2 and GLM those of the published one; experts are single tensors.
    """
    return _v4_shapes(config) if config["model_type"] == "deepseek_v4" else _dsa_shapes(config)


def make(config: Config, seed: int, names: Iterable[str] | None = None) -> Weights:
    """Draw the tensors `names` (default: all): float32 arrays, int64 for hash-routing tables."""
    every = shapes(config)
    experts = config["n_routed_experts"]
    return {name: _draw(name, every[name], seed, experts) for name in (every if names is None else names)}


def digest(weights: Weights) -> str:
    """SHA-256 over name, dtype, shape and little-endian bytes of all tensors, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(weights):
        array = weights[name]
        total.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes())
    return total.hexdigest()


def write_checkpoint(folder: Path, config: Config, weights: Weights, shards: int = 2) -> None:
    """Write config.json and sharded safetensors with an index, as the published repositories have them."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}  # interleaved: a layer spans the shards
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def prompt(config: Config, seed: int, length: int) -> np.ndarray:
    """Token ids [length] int32 in 2..vocab_size-1 (0 and 1 are the usual begin and end)."""
    return (2 + _raw(seed, "prompt", length) % np.uint64(config["vocab_size"] - 2)).astype(np.int32)


def _raw(seed: int, name: str, count: int) -> np.ndarray:
    entropy = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest(), "little")
    return np.random.PCG64(entropy).random_raw(count)


def _draw(name: str, shape: tuple[int, ...], seed: int, experts: int) -> np.ndarray:
    if name.endswith("tid2eid"):  # distinct experts a row: the first columns of a random permutation
        keys = _raw(seed, name, shape[0] * experts).reshape(shape[0], experts)
        return np.ascontiguousarray(np.argsort(keys, axis=1, kind="stable")[:, : shape[1]]).astype(np.int64)
    centre, spread = _distribution(name, shape)
    words = _raw(seed, name, math.prod(shape)).reshape(shape)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    return (centre + spread * uniform).astype(np.float32)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Centre and half width of the tensor's uniform distribution."""
    if name.endswith(("gate.bias", "e_score_correction_bias")):
        return 0.0, 0.2
    if name.endswith("k_norm.bias"):
        return 0.0, 0.3
    if name.endswith(("attn_sink", ".ape", "_base")):
        return 0.0, 1.0
    if name.endswith("_scale"):  # hc_attn_scale, hc_ffn_scale, hc_head_scale
        return 1.0, 0.5
    if len(shape) == 1:  # the weight of a norm
        return 1.0, 0.3
    fan_in = 1 if name.endswith(("embed.weight", "embed_tokens.weight")) else shape[-1]
    return 0.0, math.sqrt(3.0 / fan_in)  # variance 1 / fan_in


def _v4_shapes(c: Config) -> Shapes:
    hidden, vocab, streams = c["hidden_size"], c["vocab_size"], c["hc_mult"]
    head, lora, experts = c["head_dim"], c["q_lora_rank"], c["n_routed_experts"]
    width, heads, groups = c["moe_intermediate_size"], c["num_attention_heads"], c["o_groups"]
    index_head, index_heads = c["index_head_dim"], c["index_n_heads"]

    def compressor(prefix: str, ratio: int, size: int) -> Shapes:
        columns = 2 * size if ratio == 4 else size
        window = c.get("compress_rate_hca", ratio) if ratio == 128 else ratio
        return {
            prefix + "wkv.weight": (columns, hidden),
            prefix + "wgate.weight": (columns, hidden),
            prefix + "ape": (window, columns),
            prefix + "norm.weight": (size,),
        }

    def swiglu(prefix: str) -> Shapes:
        rows = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
        return {f"{prefix}.{part}.weight": shape for part, shape in rows.items()}

    def hyper_head(prefix: str) -> Shapes:
        return {
            prefix + "hc_head_fn": (streams, streams * hidden),
            prefix + "hc_head_base": (streams,),
            prefix + "hc_head_scale": (1,),
        }

    def block(prefix: str, ratio: int, hashed: bool) -> Shapes:
        out: Shapes = {prefix + "attn_norm.weight": (hidden,), prefix + "ffn_norm.weight": (hidden,)}
        mixes = (2 + streams) * streams
        for part in ("attn", "ffn"):
            out[f"{prefix}hc_{part}_fn"] = (mixes, streams * hidden)
            out[f"{prefix}hc_{part}_base"] = (mixes,)
            out[f"{prefix}hc_{part}_scale"] = (3,)
        attn = prefix + "attn."
        out[attn + "attn_sink"] = (heads,)
        out[attn + "wq_a.weight"] = (lora, hidden)
        out[attn + "q_norm.weight"] = (lora,)
        out[attn + "wq_b.weight"] = (heads * head, lora)
        out[attn + "wkv.weight"] = (head, hidden)
        out[attn + "kv_norm.weight"] = (head,)
        out[attn + "wo_a.weight"] = (groups * c["o_lora_rank"], heads * head // groups)
        out[attn + "wo_b.weight"] = (hidden, groups * c["o_lora_rank"])
        if ratio:
            out |= compressor(attn + "compressor.", ratio, head)
        if ratio == 4:
            out[attn + "indexer.wq_b.weight"] = (index_heads * index_head, lora)
            out[attn + "indexer.weights_proj.weight"] = (index_heads, hidden)
            out |= compressor(attn + "indexer.compressor.", ratio, index_head)
        out[prefix + "ffn.gate.weight"] = (experts, hidden)
        if hashed:
            out[prefix + "ffn.gate.tid2eid"] = (vocab, c["num_experts_per_tok"])
        else:
            out[prefix + "ffn.gate.bias"] = (experts,)
        for expert in range(experts):
            out |= swiglu(f"{prefix}ffn.experts.{expert}")
        return out | swiglu(prefix + "ffn.shared_experts")

    out: Shapes = {"embed.weight": (vocab, hidden), "head.weight": (vocab, hidden), "norm.weight": (hidden,)}
    out |= hyper_head("")
    for layer in range(c["num_hidden_layers"]):
        out |= block(f"layers.{layer}.", c["compress_ratios"][layer], layer < c["num_hash_layers"])
    if c["num_nextn_predict_layers"]:
        out |= block("mtp.0.", 0, False) | hyper_head("mtp.0.")
        out |= {f"mtp.0.{part}_proj.weight": (hidden, hidden) for part in ("e", "h")}
        out |= {f"mtp.0.{part}.weight": (hidden,) for part in ("enorm", "hnorm", "norm")}
    return out


def indexer_kinds(config: Config) -> list[str]:
    """Kind of each trunk layer of a V3.2 or GLM model, "full" or "shared", from index_topk_freq and its offset."""
    freq, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    layers = range(config["num_hidden_layers"])
    return ["full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in layers]


def _dsa_shapes(c: Config) -> Shapes:
    hidden, vocab, heads = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    lora, latent, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, value, experts = c["qk_nope_head_dim"], c["v_head_dim"], c["n_routed_experts"]

    def mlp(prefix: str, width: int) -> Shapes:
        rows = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return {f"{prefix}.{part}.weight": shape for part, shape in rows.items()}

    def block(prefix: str, indexed: bool, dense: bool) -> Shapes:
        attn, moe = prefix + "self_attn.", prefix + "mlp."
        out: Shapes = {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            attn + "q_a_proj.weight": (lora, hidden),
            attn + "q_a_layernorm.weight": (lora,),
            attn + "q_b_proj.weight": (heads * (nope + rope), lora),
            attn + "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
            attn + "kv_a_layernorm.weight": (latent,),
            attn + "kv_b_proj.weight": (heads * (nope + value), latent),
            attn + "o_proj.weight": (hidden, heads * value),
        }
        if indexed:
            out[attn + "indexer.wq_b.weight"] = (c["index_n_heads"] * c["index_head_dim"], lora)
            out[attn + "indexer.wk.weight"] = (c["index_head_dim"], hidden)
            out[attn + "indexer.k_norm.weight"] = (c["index_head_dim"],)
            out[attn + "indexer.k_norm.bias"] = (c["index_head_dim"],)
            out[attn + "indexer.weights_proj.weight"] = (c["index_n_heads"], hidden)
        if dense:
            return out | mlp(prefix + "mlp", c["intermediate_size"])
        out[moe + "gate.weight"] = (experts, hidden)
        out[moe + "gate.e_score_correction_bias"] = (experts,)
        for expert in range(experts):
            out |= mlp(f"{moe}experts.{expert}", c["moe_intermediate_size"])
        return out | mlp(moe + "shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])

    out: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer, kind in enumerate(indexer_kinds(c)):
        out |= block(f"model.layers.{layer}.", kind == "full", layer < c["first_k_dense_replace"])
    if c["num_nextn_predict_layers"]:
        draft = f"model.layers.{c['num_hidden_layers']}."
        out |= block(draft, True, False)
        out[draft + "eh_proj.weight"] = (hidden, 2 * hidden)
        out |= {f"{draft}{part}.weight": (hidden,) for part in ("enorm", "hnorm", "shared_head.norm")}
    return out

"""What a checkpoint is, from its config.json alone."""

import os
from collections import Counter
from typing import Any

import jax
import numpy as np

from jmla import hub
from jmla.models import abstract_params, bytes_per_row, bytes_per_token, make_model
from jmla.models.config import V4Config, read_config
from jmla.models.spec import ModelSpec


def parameter_counts(config: Any) -> dict[str, int]:
    """Parameters in all, those that one token uses, and those of the draft block (not in the other two)."""
    share = config.num_experts_per_tok / config.n_routed_experts
    total = active = draft = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(config, "bfloat16")):
        keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        if np.issubdtype(leaf.dtype, np.integer):
            continue
        size = int(np.prod(leaf.shape))
        if keys[0] == "draft":
            draft += size
            continue
        total += size
        routed = keys[-2] == "moe" and keys[-1] in ("gate_up", "down")  # the stacked experts
        active += int(size * share) if routed else size
    return {"total": total, "active": active, "draft": draft}


def _layers(config: Any) -> str:
    if isinstance(config, V4Config):
        kinds = Counter(config.layer_kinds)
        hashed = config.layer_routing.count("hash")
        names = {"window": "sliding window", "csa": "compressed sparse (CSA)", "hca": "heavily compressed (HCA)"}
        attention = ", ".join(f"{kinds[kind]} {name}" for kind, name in names.items() if kinds[kind])
        return f"{config.num_hidden_layers}: {attention}; {hashed} hash-routed, the others learned"
    shared, dense = config.indexer_types.count("shared"), config.mlp_layer_types.count("dense")
    indexers = f"{config.num_hidden_layers - shared} with an indexer, {shared} sharing one"
    return f"{config.num_hidden_layers}: sparse MLA, {indexers}; {dense} dense, the others mixtures of experts"


def _amount(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:g}"


def _cache_rows(spec: ModelSpec) -> list[tuple[str, str]]:
    growing, fixed = bytes_per_token(spec), bytes_per_row(spec)
    rows = [("cache format", spec.kv_layout)]
    rows += [(f"  {name}", f"{size:,.1f} bytes a token") for name, size in growing.items()]
    rows += [("  together", f"{sum(growing.values()):,.1f} bytes a token, all layers")]
    rows += [(f"  {name}", f"{size:,} bytes a sequence") for name, size in fixed.items()]
    return rows


def describe(path: str | os.PathLike[str], kv_layout: str = "auto") -> str:
    """A table of architecture, parameter counts, cache costs and features of a checkpoint, a line for each.

    Args:
        path: as for ``jmla.load``.
        kv_layout: cache format to compute with.

    Raises:
        As ``jmla.load``.
    """
    directory = hub.resolve(path)
    config = read_config(directory)
    shapes = abstract_params(config, "bfloat16")
    spec = make_model(config, shapes, kv_layout=kv_layout).spec
    counts = parameter_counts(config)
    draft = f" + {_amount(counts['draft'])} in the draft block" if counts["draft"] else ""
    rows = [
        ("checkpoint", str(directory)),
        ("architecture", config.model_type),
        ("layers", _layers(config)),
        ("width", f"{config.hidden_size} hidden, {config.num_attention_heads} heads, {config.vocab_size:,} tokens"),
        (
            "experts",
            f"{config.num_experts_per_tok} of {config.n_routed_experts} routed, {config.n_shared_experts} shared",
        ),
        ("selection", f"{config.index_topk} entries of the index, {config.index_n_heads} heads"),
        ("context", f"{config.max_position_embeddings:,} tokens"),
        ("parameters", f"{_amount(counts['total'])}, {_amount(counts['active'])} active a token{draft}"),
        *_cache_rows(spec),
        ("weights", "bfloat16 or float32 in memory"),
        ("cache formats", f"{make_model(config, shapes).spec.kv_layout}, bfloat16, float32"),
        ("drafting", "yes, if the MTP tensors are there" if "draft" in shapes else "no draft block"),
        ("text", "tokenizer.json" if (directory / "tokenizer.json").is_file() else "none: token ids only"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)

"""Random weights of a configuration: for tests, benchmarks, and trying shapes without a checkpoint."""

from typing import Any

import jax
import numpy as np

from jmla.models.config import DsaConfig, V4Config
from jmla.models.params import abstract_params, draft_kind, draft_module, ends_module, layer_module, layer_stacks


def packed_vectors(config: V4Config | DsaConfig, drafting: bool = True) -> dict[tuple[str, ...], Any]:
    """The modules that pack small vectors, by the path of their owner in the parameters."""
    out: dict[tuple[str, ...], Any] = {("ends",): ends_module(config, "float32").small}
    for number, stack in enumerate(layer_stacks(config)):
        for j, kind in enumerate(stack.unit):
            out["stacks", f"{number:02d}", str(j)] = layer_module(config, kind, "float32").small
    if drafting and config.num_nextn_predict_layers:
        out["draft",] = draft_module(config, "float32").small
        out["draft", "layer"] = layer_module(config, draft_kind(config), "float32").small
    return out


def init_random(
    config: V4Config | DsaConfig, dtype: str = "float32", *, seed: int = 0, drafting: bool = True
) -> dict[str, Any]:
    """Parameters drawn so that activations and logits have a deviation near one, on the host.

    Nothing is left at a value that hides its part: norm weights spread around one, biases, sinks and position biases
    are not zero, and expert tables hold distinct ids of experts that exist.

    Args:
        config: the model's configuration.
        dtype: dtype of the weights that the family does not keep in float32.
        seed: of NumPy's generator.
        drafting: whether to draw the draft block, where the configuration has one.
    """
    rng = np.random.default_rng(seed)

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name, shape = path[-1].key, leaf.shape
        if name == "fixed":
            experts = np.broadcast_to(
                np.arange(config.n_routed_experts, dtype=np.int32), (*shape[:-1], config.n_routed_experts)
            )
            return rng.permuted(experts, axis=-1)[..., : shape[-1]].copy()
        if name == "values":
            return rng.normal(0, 0.2, shape).astype(np.float32)
        scale = 1.0 if name in ("ape", "embed") else shape[-1] ** -0.5
        return (rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(leaf.dtype)

    params: dict[str, Any] = jax.tree_util.tree_map_with_path(one, abstract_params(config, dtype, drafting))
    for path, small in packed_vectors(config, drafting).items():
        owner: Any = params
        for key in path:
            owner = owner[key]
        for name, _ in small.fields:
            if name.endswith("norm"):
                owner["small"]["values"][..., small.place(name)[0]] += 1.0
    return params

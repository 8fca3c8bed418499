"""The parameters of a model: how layers are grouped and stacked, and the shapes that result.

Parameters are one nested dict: ``ends`` (embedding, norm, head), ``stacks`` and ``draft``. A stack is a unit of one or
more layers repeated ``n`` times; its arrays have a leading axis ``n``, and a step scans over it, so that the compiled
program does not grow with the number of layers.
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from jmla.models import dsa, v4
from jmla.models.config import DsaConfig, V4Config

Config = V4Config | DsaConfig
Kind = v4.LayerKind | dsa.LayerKind


@dataclasses.dataclass(frozen=True)
class Stack:
    """``repeats`` copies of the layers ``unit``, the first of which is layer ``first`` of the network."""

    unit: tuple[Kind, ...]
    repeats: int
    first: int


@functools.lru_cache(maxsize=64)
def layer_kinds(config: Config) -> tuple[Kind, ...]:
    """The kind of each layer of the trunk."""
    if isinstance(config, V4Config):
        return tuple(v4.LayerKind(*pair) for pair in zip(config.layer_kinds, config.layer_routing, strict=True))
    return tuple(dsa.LayerKind(*pair) for pair in zip(config.indexer_types, config.mlp_layer_types, strict=True))


def draft_kind(config: Config) -> Kind:
    """The kind of the draft block's layer."""
    if isinstance(config, V4Config):
        return v4.LayerKind(config.draft_kind, "learned")
    return dsa.LayerKind("full", "sparse")


@functools.lru_cache(maxsize=64)
def layer_stacks(config: Config) -> tuple[Stack, ...]:
    """Cuts the layers into repeated units of at most eight, at each place the unit that reaches farthest."""
    kinds = layer_kinds(config)
    stacks, i = [], 0
    while i < len(kinds):
        best = (1, 1)
        for size in range(1, min(8, len(kinds) - i) + 1):
            repeats = 1
            while kinds[i + repeats * size : i + (repeats + 1) * size] == kinds[i : i + size]:
                repeats += 1
            if repeats > 1 and repeats * size > best[0] * best[1]:
                best = (size, repeats)
        size, repeats = best
        stacks.append(Stack(kinds[i : i + size], repeats, i))
        i += size * repeats
    return tuple(stacks)


def streams_of(kind: Kind) -> tuple[str, ...]:
    """Cache streams that a layer writes."""
    if isinstance(kind, v4.LayerKind):
        return {"window": ("window",), "csa": ("window", "csa", "index"), "hca": ("window", "hca")}[kind.attention]
    return ("latent", "index") if kind.indexer == "full" else ("latent",)


def layer_counts(config: Config, drafting: bool) -> dict[str, int]:
    """How many layers write each cache stream."""
    names = ("window", "csa", "hca", "index") if isinstance(config, V4Config) else ("latent", "index")
    kinds = layer_kinds(config) + ((draft_kind(config),) if drafting else ())
    return {name: sum(name in streams_of(kind) for kind in kinds) for name in names}


@functools.lru_cache(maxsize=256)
def layer_module(config: Config, kind: Kind, dtype: str) -> v4.V4Layer | dsa.DsaLayer:
    """The abstract module of one layer."""
    if isinstance(config, V4Config) and isinstance(kind, v4.LayerKind):
        return nnx.eval_shape(lambda: v4.V4Layer(config, kind, dtype))
    if isinstance(config, DsaConfig) and isinstance(kind, dsa.LayerKind):
        return nnx.eval_shape(lambda: dsa.DsaLayer(config, kind, dtype))
    raise TypeError(f"Expected {kind=} to belong to the family of {config.model_type}")


@functools.lru_cache(maxsize=64)
def ends_module(config: Config, dtype: str) -> v4.V4Ends | dsa.DsaEnds:
    """The abstract module of embedding, norm and head."""
    if isinstance(config, V4Config):
        return nnx.eval_shape(lambda: v4.V4Ends(config, dtype))
    return nnx.eval_shape(lambda: dsa.DsaEnds(config, dtype))


@functools.lru_cache(maxsize=64)
def draft_module(config: Config, dtype: str) -> v4.V4Draft | dsa.DsaDraft:
    """The abstract module of the draft block."""
    kind = draft_kind(config)
    if isinstance(config, V4Config) and isinstance(kind, v4.LayerKind):
        return nnx.eval_shape(lambda: v4.V4Draft(config, kind, dtype))
    return nnx.eval_shape(lambda: dsa.DsaDraft(config, kind, dtype))  # type: ignore[arg-type]


def graphdef(module: nnx.Module) -> nnx.GraphDef:
    """The static half of an abstract module."""
    return nnx.split(module)[0]


def _shapes(module: nnx.Module) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.split(module)[1])


def abstract_params(config: Config, dtype: str, drafting: bool = True) -> dict[str, Any]:
    """Shapes and dtypes of all parameters, as the nested dict that a Model holds."""
    stacks = {}
    for number, stack in enumerate(layer_stacks(config)):
        stacks[f"{number:02d}"] = {
            str(j): jax.tree.map(
                lambda x, n=stack.repeats: jax.ShapeDtypeStruct((n, *x.shape), x.dtype),
                _shapes(layer_module(config, kind, dtype)),
            )
            for j, kind in enumerate(stack.unit)
        }
    out = {"ends": _shapes(ends_module(config, dtype)), "stacks": stacks}
    if drafting and config.num_nextn_predict_layers:
        out["draft"] = _shapes(draft_module(config, dtype))
    return out

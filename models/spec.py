"""What a model is: static facts, and a plain dict of arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

from jmla.kernels import dispatch, layouts
from jmla.kernels.layouts import KVLayout
from jmla.models.config import DsaConfig, V4Config
from jmla.models.config.common import shown
from jmla.models.config.v4 import PAGE_TOKENS
from jmla.models.options import check_dtype, check_flag, check_max_seq_len

LATENT_PAGE = 64  # rows of a kernel page of V3.2 and GLM: four of them are one page


def pages_of(tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // PAGE_TOKENS)


def hidden_shape(config: V4Config | DsaConfig) -> tuple[int, ...]:
    """Shape of what the draft block takes over from the trunk for a token: V4's residual streams, or one."""
    if isinstance(config, V4Config):
        return config.hc_mult, config.hidden_size
    return (config.hidden_size,)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Everything static about a loaded model; hashable, the static argument of every compiled step.

    Attributes:
        config: the family's configuration.
        dtype: dtype of weights and activations, "float32" or "bfloat16"; what the family keeps in float32 stays so.
        kv_layout: resolved cache format: "inline656", "footer584", "bfloat16" or "float32".
        implementation: passed to every operation; None lets each choose.
        deterministic: row-tiled execution, bitwise independent of batch mates and chunking.
        max_seq_len: most tokens that a sequence may have.
        drafting: whether the multi-token-prediction block is loaded.
        prefill_chunk: tokens of a row that one pass processes; longer prompts loop inside the compiled step.
    """

    config: V4Config | DsaConfig
    dtype: str = "bfloat16"
    kv_layout: str = "float32"
    implementation: str | None = None
    deterministic: bool = False
    max_seq_len: int = 4096
    drafting: bool = False
    prefill_chunk: int = 512

    @property
    def is_v4(self) -> bool:
        return isinstance(self.config, V4Config)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model: a pytree whose leaves are the weights, everything else static.

    Attributes:
        params: nested dict of arrays, as ``jmla.models.params.abstract_params`` describes it.
        spec: static facts.
        text: tokenizer and generation defaults, compared by identity; None for a model without text.
    """

    params: dict[str, Any]
    spec: ModelSpec = dataclasses.field(metadata={"static": True})
    text: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    def config(self) -> V4Config | DsaConfig:
        return self.spec.config


def check_model(model: Any) -> Model:
    """Refuses what is no model, for instance the path of one.

    Raises:
        TypeError: anything but a ``Model``.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"Expected model to be a jmla.Model, as jmla.load makes one of a path; got {type(model).__name__}"
        )
    return model


def check_implementation(implementation: str | None) -> None:
    """Refuses a name that no implementation of the attention has, before weights are read.

    Raises:
        ValueError: the message lists those that exist; each of them is sparse.
    """
    known = dispatch.implementations("sparse_mla")
    if implementation is not None and (not isinstance(implementation, str) or implementation not in known):
        raise ValueError(f"Expected implementation={shown(implementation)} to be None or one of: {', '.join(known)}")


def resolve_format(config: V4Config | DsaConfig, kv_layout: str) -> str:
    """The cache format that ``kv_layout`` means for this family.

    Raises:
        ValueError: unknown, or of the other family.
    """
    own = "footer584" if isinstance(config, V4Config) else "inline656"
    supported = ("auto", own, "bfloat16", "float32")
    if not isinstance(kv_layout, str) or kv_layout not in supported:
        raise ValueError(f"Expected kv_layout={shown(kv_layout)} to be one of {supported} for {config.model_type}")
    return own if kv_layout == "auto" else kv_layout


def cache_layouts(spec: ModelSpec) -> dict[str, KVLayout]:
    """The byte layout of each stream of the model's cache, by stream name."""
    config, plain = spec.config, spec.kv_layout in ("bfloat16", "float32")
    if isinstance(config, V4Config):
        pages = {"window": PAGE_TOKENS, "csa": PAGE_TOKENS // config.csa_ratio, "hca": PAGE_TOKENS // config.hca_ratio}
        rope, width = config.qk_rope_head_dim, config.head_dim
        out = {
            name: layouts.plain(width, spec.kv_layout, size)
            if plain
            else layouts.footer584(size, nope=width - rope, rope=rope)
            for name, size in pages.items()
        }
        index_page = pages["csa"]
    else:
        rope, width = config.qk_rope_head_dim, config.kv_lora_rank + config.qk_rope_head_dim
        # DeepSeek writes power-of-two scales, GLM arbitrary ones; readers take both as they are.
        scale_form: Literal["power_of_two", "float32"] = "power_of_two"
        if config.model_type == "glm_moe_dsa":
            scale_form = "float32"
        out = {
            "latent": layouts.plain(width, spec.kv_layout, LATENT_PAGE)
            if plain
            else layouts.inline656(LATENT_PAGE, nope=config.kv_lora_rank, rope=rope, scale_form=scale_form)
        }
        index_page = LATENT_PAGE
    dim = config.index_head_dim
    out["index"] = layouts.plain(dim, spec.kv_layout, index_page) if plain else layouts.index132(index_page, width=dim)
    return out


def make_model(
    config: Any,
    params: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    kv_layout: str = "auto",
    implementation: str | None = None,
    deterministic: bool | None = None,
    max_seq_len: int | None = None,
    drafting: bool | None = None,
    text: Any = None,
) -> Model:
    """A model from its configuration and parameters.

    Args:
        config: V4Config or DsaConfig.
        params: nested dict of arrays as ``abstract_params`` describes it.
        dtype: "bfloat16" or "float32", the dtype of the weights.
        kv_layout: cache format; "auto" is the family's FP8 format.
        implementation: passed to every operation.
        deterministic: bitwise independence of batch and chunking; default False.
        max_seq_len: default: the configuration's ``max_position_embeddings``.
        drafting: whether the draft block is there; default: whether ``params`` holds it.
        text: tokenizer and generation defaults.

    Raises:
        TypeError: a configuration, parameters or a flag of another type.
        ValueError: an option that does not exist, or not for this family.
    """
    if not isinstance(config, V4Config | DsaConfig):
        raise TypeError(f"Expected config to be a V4Config or DsaConfig, got {type(config).__name__}")
    if not isinstance(params, Mapping):
        raise TypeError(f"Expected params to be a dict of arrays, got {type(params).__name__}")
    check_implementation(implementation)
    spec = ModelSpec(
        config=config,
        dtype=check_dtype(dtype),
        kv_layout=resolve_format(config, kv_layout),
        implementation=implementation,
        deterministic=deterministic is not None and check_flag("deterministic", deterministic),
        max_seq_len=check_max_seq_len(max_seq_len, config.max_position_embeddings),
        drafting="draft" in params if drafting is None else check_flag("drafting", drafting),
    )
    return Model(dict(params), spec, text)

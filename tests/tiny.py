"""Small models of the three families for tests of the middle floor: every kind of layer, caches that wrap and page."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jmla.models import Model, make_model
from jmla.models.config import DsaConfig, V4Config, Yarn
from jmla.models.random import init_random

V4 = V4Config(
    model_type="deepseek_v4",
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=5,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=8,
    layer_kinds=("window", "csa", "hca", "csa", "hca"),
    csa_ratio=4,
    hca_ratio=8,
    layer_routing=("hash", "learned", "learned", "learned", "learned"),
    index_n_heads=16,
    index_head_dim=16,
    index_topk=4,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    routed_scaling_factor=1.5,
    norm_topk_prob=True,
    swiglu_limit=0.5,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=Yarn(16.0, 32.0, 1.0, 256, None, None),
    max_position_embeddings=4096,
    num_nextn_predict_layers=1,
    draft_kind="window",
    bos_token_id=0,
    eos_token_id=(1,),
    pad_token_id=None,
    torch_dtype="float32",
)

V32 = DsaConfig(
    model_type="deepseek_v32",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    mlp_layer_types=("dense", "sparse", "sparse"),
    num_attention_heads=4,
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-6,
    latent_norm_eps=1e-6,
    rope_theta=10000.0,
    yarn=Yarn(40.0, 32.0, 1.0, 64, 1.0, 1.0),
    index_n_heads=16,
    index_head_dim=16,
    index_topk=6,
    indexer_types=("full",) * 3,
    indexer_rope_interleave=False,
    index_share_for_mtp_iteration=False,
    max_position_embeddings=2560,
    num_nextn_predict_layers=1,
    bos_token_id=0,
    eos_token_id=(1,),
    pad_token_id=None,
    torch_dtype="float32",
)

GLM = dataclasses.replace(
    V32,
    model_type="glm_moe_dsa",
    num_hidden_layers=6,
    mlp_layer_types=("dense",) + ("sparse",) * 5,
    indexer_types=("full", "shared", "full", "shared", "full", "shared"),
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-5,
    yarn=None,
    rope_theta=8e6,
    indexer_rope_interleave=True,
    index_share_for_mtp_iteration=True,
)

CONFIGS = {"v4": V4, "v32": V32, "glm": GLM}


@functools.cache
def tiny_model(
    family: str, kv_layout: str = "float32", deterministic: bool = True, dtype: str = "float32", chunk: int = 512
) -> Model:
    """A random model of a family; the same weights for all options but ``dtype``."""
    params = jax.tree.map(jnp.asarray, init_random(CONFIGS[family], dtype, seed=3))
    model = make_model(CONFIGS[family], params, dtype=dtype, kv_layout=kv_layout, deterministic=deterministic)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, prefill_chunk=chunk))

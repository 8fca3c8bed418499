"""DeepSeek-V3.2 and GLM-5: latent attention over the keys that an indexer selects, dense and MoE feed-forward.

Attention runs in its absorbed form: queries are taken into the latent space and the attended latent back out of it, so
that all heads share one cached row. Formulas: DeepSeek-V3.2-Exp `inference/model.py`, and the `deepseek_v32` and
`glm_moe_dsa` models of transformers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jmla import kernels
from jmla.models import moe
from jmla.models.config import DsaConfig
from jmla.models.context import StepContext, Store
from jmla.models.layers import Packed, einsum, embed, layer_norm, product, rms_norm, swiglu, weight
from jmla.models.rope import rotate_head, rotate_tail
from jmla.models.select import select
from jmla.models.spec import LATENT_PAGE, PAGE_TOKENS

KEY_NORM_EPS = 1e-6  # of the indexer's LayerNorm, in all checkpoints


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What distinguishes layers: ``indexer`` "full" or "shared"; ``mlp`` "dense" or "sparse"."""

    indexer: str
    mlp: str


class Mlp(nnx.Module):
    """Gated feed-forward."""

    def __init__(self, hidden: int, width: int, dtype: str):
        self.gate_up = weight((2 * width, hidden), dtype)
        self.down = weight((hidden, width), dtype)

    def __call__(self, h: jax.Array) -> jax.Array:
        inner = swiglu(product(h, self.gate_up[...], jnp.float32), None).astype(h.dtype)
        return product(inner, self.down[...], jnp.float32)


class Experts(nnx.Module):
    """Router, routed experts, shared expert."""

    def __init__(self, config: DsaConfig, dtype: str):
        width, hidden, count = config.moe_intermediate_size, config.hidden_size, config.n_routed_experts
        self.gate = weight((count, hidden), "float32")
        self.gate_up = weight((count, 2 * width, hidden), dtype)
        self.down = weight((count, hidden, width), dtype)
        self.shared = Mlp(hidden, width * config.n_shared_experts, dtype)


class DsaLayer(nnx.Module):
    """One layer; ``small`` holds its norms and router bias in one array."""

    def __init__(self, config: DsaConfig, kind: LayerKind, dtype: str):
        c = config
        hidden, heads, latent = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
        self.config, self.kind = config, kind
        self.wq_a = weight((c.q_lora_rank, hidden), dtype)
        self.wq_b = weight((heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank), dtype)
        self.wkv_a = weight((latent + c.qk_rope_head_dim, hidden), dtype)
        self.w_uk = weight((heads, c.qk_nope_head_dim, latent), dtype)
        self.w_uv = weight((heads, c.v_head_dim, latent), dtype)
        self.wo = weight((hidden, heads * c.v_head_dim), dtype)
        small: list[tuple[str, tuple[int, ...]]] = [
            ("attn_norm", (hidden,)),
            ("ffn_norm", (hidden,)),
            ("q_norm", (c.q_lora_rank,)),
            ("kv_norm", (latent,)),
        ]
        if kind.indexer == "full":
            self.index_q = weight((c.index_n_heads * c.index_head_dim, c.q_lora_rank), dtype)
            self.index_k = weight((c.index_head_dim, hidden), dtype)
            self.index_weights = weight((c.index_n_heads, hidden), dtype)
            small += [("k_norm", (c.index_head_dim,)), ("k_norm_bias", (c.index_head_dim,))]
        if kind.mlp == "dense":
            self.mlp = Mlp(hidden, c.intermediate_size, dtype)
        else:
            self.moe = Experts(config, dtype)
            small.append(("gate_bias", (c.n_routed_experts,)))
        self.small = Packed(small)

    def project(self, x: jax.Array, table: jax.Array) -> dict[str, jax.Array]:
        """Query in the latent space, the row to cache, and the indexer's query, key and head weights.

        Args:
            x: ``[R, D]``.
            table: ``[R, rope]`` cosines and sines of the rows' positions.
        """
        c, rows = self.config, x.shape[0]
        h = rms_norm(x, self.small["attn_norm"], c.rms_norm_eps)
        latent = rms_norm(product(h, self.wq_a[...]), self.small["q_norm"], c.latent_norm_eps)
        q = rotate_tail(product(latent, self.wq_b[...]).reshape(rows, c.num_attention_heads, -1), table[:, None])
        absorbed = einsum("rhn,hnl->rhl", q[..., : c.qk_nope_head_dim], self.w_uk[...])
        out = {
            "q": jnp.concatenate([absorbed, q[..., c.qk_nope_head_dim :]], axis=-1),
            "kv": product(h, self.wkv_a[...]),
        }
        if self.kind.indexer == "full":
            index_q = product(latent, self.index_q[...]).reshape(rows, c.index_n_heads, c.index_head_dim)
            out["index_q"] = rotate_head(index_q, table[:, None], interleaved=c.indexer_rope_interleave)
            key = layer_norm(
                product(h, self.index_k[...]), self.small["k_norm"], self.small["k_norm_bias"], KEY_NORM_EPS
            )
            out["index_k"] = rotate_head(key, table, interleaved=c.indexer_rope_interleave)
            factor = (c.index_n_heads * c.index_head_dim) ** -0.5
            out["index_weights"] = product(h, self.index_weights[...], jnp.float32) * factor
        return out

    def finish(self, x: jax.Array, out: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """From the attended latent ``[R, H, latent]`` to the residual and the feed-forward up to the experts."""
        c = self.config
        values = einsum("rhl,hvl->rhv", out, self.w_uv[...]).reshape(x.shape[0], -1)
        x = x + product(values, self.wo[...])
        h = rms_norm(x, self.small["ffn_norm"], c.rms_norm_eps)
        if self.kind.mlp == "dense":
            return x + self.mlp(h).astype(x.dtype), {}
        chosen, weights = moe.route_grouped(
            product(h.astype(jnp.float32), self.moe.gate[...]),
            self.small["gate_bias"],
            c.num_experts_per_tok,
            c.n_group,
            c.topk_group,
            c.routed_scaling_factor,
            c.norm_topk_prob,
        )
        return x, {"h": h, "chosen": chosen, "weights": weights, "shared": self.moe.shared(h)}

    def __call__(
        self,
        ctx: StepContext,
        x: jax.Array,
        store: Store,
        at: dict[str, jax.Array],
        carried: jax.Array | None,
        reuse: bool = False,
    ) -> tuple[jax.Array, Store, jax.Array]:
        """Runs the layer over the rows of a pass.

        Args:
            ctx: the pass.
            x: ``[R, D]``.
            store: pools.
            at: this layer's ordinal among the layers of each stream.
            carried: ``[R, k]`` selection of the nearest earlier full layer, used by a shared one.
            reuse: whether a full layer attends it too; its keys are written all the same.

        Returns:
            New rows, new store, and the selection ``[R, k]`` that the layer attended.
        """
        c = self.config
        table = ctx.rotary(ctx.flat_positions, c.qk_rope_head_dim, c.rope_theta, c.yarn, rotary_magnitude(c))
        parts = ctx.rowwise(self.project, x, table)
        pools = dict(store["pools"])
        offset = at["latent"] * ctx.layer_pages("latent", pools) * LATENT_PAGE
        slots = ctx.slots(ctx.positions, ctx.table, PAGE_TOKENS, offset).reshape(-1)
        pools["latent"] = kernels.kv_pack(
            parts["kv"],
            slots,
            pools["latent"],
            layout=ctx.layouts["latent"],
            norm_weight=self.small["kv_norm"],
            eps=c.latent_norm_eps,
            cos_sin=table,
            implementation=ctx.implementation("kv_pack"),
        )
        if self.kind.indexer == "full":
            self.write_keys(ctx, parts, pools, at)
        if self.kind.indexer == "full" and not reuse:
            chosen = self.select(ctx, parts, pools, at)
        elif carried is not None:
            chosen = carried
        else:
            raise ValueError("Expected an earlier layer with a full indexer before a shared one")
        slots, lengths = kernels.resolve_slots(
            chosen, ctx.request, ctx.table, page_size=PAGE_TOKENS, layer_offset=offset
        )
        out, _ = kernels.sparse_mla(
            parts["q"],
            pools["latent"],
            slots,
            lengths,
            layout=ctx.layouts["latent"],
            scale=softmax_scale(c),
            v_dim=c.kv_lora_rank,
            deterministic=ctx.spec.deterministic,
            implementation=ctx.implementation("sparse_mla"),
        )
        x, routed = ctx.rowwise(self.finish, x, out)
        if routed:
            summed = moe.experts(
                routed["h"],
                ctx.without_padding(routed["chosen"]),
                routed["weights"],
                self.moe.gate_up[...],
                self.moe.down[...],
                None,
                at.get("repeat"),
            )
            x = ctx.rowwise(lambda x, a, b: x + (a + b).astype(x.dtype), x, summed, routed["shared"])
        return x, {"pools": pools, "states": store["states"]}, chosen

    def write_keys(
        self, ctx: StepContext, parts: dict[str, jax.Array], pools: dict[str, jax.Array], at: dict[str, jax.Array]
    ) -> None:
        """Writes the rows' index keys."""
        first = at["index"] * ctx.layer_pages("index", pools) * LATENT_PAGE
        pools["index"] = kernels.kv_pack(
            parts["index_k"],
            ctx.slots(ctx.positions, ctx.table, PAGE_TOKENS, first).reshape(-1),
            pools["index"],
            layout=ctx.layouts["index"],
            implementation=ctx.implementation("kv_pack"),
        )

    def select(
        self, ctx: StepContext, parts: dict[str, jax.Array], pools: dict[str, jax.Array], at: dict[str, jax.Array]
    ) -> jax.Array:
        """The ``index_topk`` best keys that each row may see."""
        pages = at["index"] * ctx.layer_pages("index", pools)
        table = ctx.page_table(ctx.table, PAGE_TOKENS // LATENT_PAGE, pages)
        q, weights = parts["index_q"], parts["index_weights"]
        return select(ctx, q, weights, pools["index"], table, ctx.visible(1), self.config.index_topk)


def softmax_scale(config: DsaConfig) -> float:
    """``(nope + rope)^-0.5``, times the square of YaRN's magnitude where the config sets ``mscale_all_dim``."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.yarn
    if yarn is not None and yarn.mscale_all_dim:
        scale *= yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def rotary_magnitude(config: DsaConfig) -> float:
    """Factor on cosines and sines: 1 without YaRN; the quotient of its two magnitudes, or its default without them."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_magnitude(yarn.factor, yarn.mscale) / yarn_magnitude(yarn.factor, yarn.mscale_all_dim)
    return yarn_magnitude(yarn.factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1`` for a factor above one (YaRN, section 3.3)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class DsaEnds(nnx.Module):
    """Embedding, final norm and output head."""

    def __init__(self, config: DsaConfig, dtype: str):
        self.config = config
        self.embed = weight((config.vocab_size, config.hidden_size), dtype)
        self.head = weight((config.vocab_size, config.hidden_size), dtype)
        self.small = Packed([("norm", (config.hidden_size,))])

    def start(self, tokens: jax.Array) -> jax.Array:
        """``[R]`` ids to ``[R, D]``."""
        return embed(self.embed[...], tokens)

    def hidden(self, x: jax.Array) -> jax.Array:
        """What the draft block takes over: the rows after the final norm."""
        return rms_norm(x, self.small["norm"], self.config.rms_norm_eps)

    def logits(self, x: jax.Array) -> jax.Array:
        """``[R, D]`` to ``[R, V]`` float32 logits."""
        return product(self.hidden(x), self.head[...], jnp.float32)


class DsaDraft(nnx.Module):
    """The multi-token-prediction block: a joint projection, one layer with an indexer of its own, a norm."""

    def __init__(self, config: DsaConfig, kind: LayerKind, dtype: str):
        hidden = config.hidden_size
        self.config = config
        self.layer = DsaLayer(config, kind, dtype)
        self.eh_proj = weight((hidden, 2 * hidden), dtype)
        self.small = Packed([("enorm", (hidden,)), ("hnorm", (hidden,)), ("norm", (hidden,))])

    def start(self, hidden: jax.Array, tokens: jax.Array, table: jax.Array) -> jax.Array:
        """Rows ``hidden [R, D]`` and the next tokens ``[R]`` to the block's input, embedding first."""
        eps = self.config.rms_norm_eps
        e = rms_norm(embed(table, tokens), self.small["enorm"], eps)
        h = rms_norm(hidden, self.small["hnorm"], eps)
        return product(jnp.concatenate([e, h], axis=-1), self.eh_proj[...])

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        return product(rms_norm(x, self.small["norm"], self.config.rms_norm_eps), head, jnp.float32)

    def hidden(self, x: jax.Array) -> jax.Array:
        """What a further draft step takes over: GLM carries the normalised rows, DeepSeek the rows as they are."""
        if self.config.model_type == "glm_moe_dsa":
            return rms_norm(x, self.small["norm"], self.config.rms_norm_eps)
        return x

"""DeepSeek-V4: layers of shared-KV attention over a window and compressed entries, hyper-connections, and MoE.

The formulas are those of the published reference (DeepSeek-V4 `inference/model.py`), cross-checked against the
`deepseek_v4` model of transformers. Weights are stored ``[out, in]`` as in the checkpoint.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jmla import kernels
from jmla.models import moe
from jmla.models.config import V4Config
from jmla.models.context import StepContext, Store
from jmla.models.hyper import HyperHead, expand, head_logits, hyper_projection, weighted_sum
from jmla.models.layers import Packed, einsum, embed, product, rms_norm, swiglu, weight
from jmla.models.rope import rotate_tail
from jmla.models.select import select
from jmla.models.spec import PAGE_TOKENS


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What distinguishes layers: ``attention`` "window", "csa" or "hca"; ``routing`` "hash" or "learned"."""

    attention: str
    routing: str


class Compressor(nnx.Module):
    """Projections of a compressor: values and gates of one width, and the position bias of the gates.

    The width is twice the entry's for CSA (halves for the next and the own window), the entry's for HCA.
    """

    def __init__(self, hidden: int, width: int, ratio: int, dtype: str):
        self.proj = weight((2 * width, hidden), dtype)  # values, then gates
        self.ape = weight((ratio, width), "float32")

    def __call__(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, gates = jnp.split(product(h, self.proj[...], jnp.float32), 2, axis=-1)
        return values, gates


class Experts(nnx.Module):
    """Router, routed experts and the shared expert of one layer."""

    def __init__(self, config: V4Config, routing: str, dtype: str):
        width, hidden, count = config.moe_intermediate_size, config.hidden_size, config.n_routed_experts
        shared = width * config.n_shared_experts
        self.gate = weight((count, hidden), "float32")
        self.gate_up = weight((count, 2 * width, hidden), dtype)
        self.down = weight((count, hidden, width), dtype)
        self.shared_gate_up = weight((2 * shared, hidden), dtype)
        self.shared_down = weight((hidden, shared), dtype)
        self.fixed = (
            nnx.Param(jnp.zeros((config.vocab_size, config.num_experts_per_tok), "int32"))
            if routing == "hash"
            else None
        )


class V4Layer(nnx.Module):
    """One layer. ``small`` holds its norms, sinks, hyper-connection offsets and router bias in one array."""

    def __init__(self, config: V4Config, kind: LayerKind, dtype: str):
        c = config
        hidden, dim, heads, streams = c.hidden_size, c.head_dim, c.num_attention_heads, c.hc_mult
        self.config, self.kind = config, kind
        self.wq_a = weight((c.q_lora_rank, hidden), dtype)
        self.wq_b = weight((heads * dim, c.q_lora_rank), dtype)
        self.wkv = weight((dim, hidden), dtype)
        self.wo_a = weight((c.o_groups, c.o_lora_rank, heads * dim // c.o_groups), dtype)
        self.wo_b = weight((hidden, c.o_groups * c.o_lora_rank), dtype)
        self.hc_fn = weight((2, (2 + streams) * streams, streams * hidden), "float32")  # attention, feed-forward
        self.moe = Experts(config, kind.routing, dtype)
        small: list[tuple[str, tuple[int, ...]]] = [
            ("attn_norm", (hidden,)),
            ("ffn_norm", (hidden,)),
            ("q_norm", (c.q_lora_rank,)),
            ("kv_norm", (dim,)),
            ("attn_sink", (heads,)),
            ("hc_base", (2, (2 + streams) * streams)),
            ("hc_scale", (2, 3)),
        ]
        if kind.routing == "learned":
            small.append(("gate_bias", (c.n_routed_experts,)))
        if kind.attention == "csa":
            self.compressor = Compressor(hidden, 2 * dim, c.csa_ratio, dtype)
            self.indexer = Compressor(hidden, 2 * c.index_head_dim, c.csa_ratio, dtype)
            self.index_q = weight((c.index_n_heads * c.index_head_dim, c.q_lora_rank), dtype)
            self.index_weights = weight((c.index_n_heads, hidden), dtype)
            small += [("compressor_norm", (dim,)), ("indexer_norm", (c.index_head_dim,))]
        elif kind.attention == "hca":
            self.compressor = Compressor(hidden, dim, c.hca_ratio, dtype)
            small.append(("compressor_norm", (dim,)))
        self.small = Packed(small)

    # ---- row-wise pieces

    def collapse(
        self, x: jax.Array, sublayer: int, implementation: str | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Hyper-connection before a sublayer (0 attention, 1 feed-forward), all in float32.

        Args:
            x: ``[R, N, D]`` residual streams.
            sublayer: 0 or 1.
            implementation: of the mixing matrices.

        Returns:
            The sublayer's input ``[R, D]``, the output gains ``[R, N]`` and the stream mixing ``[R, N, N]``.
        """
        c, n = self.config, self.config.hc_mult
        fn, base, scale = self.hc_fn[...][sublayer], self.small["hc_base"][sublayer], self.small["hc_scale"][sublayer]
        z = hyper_projection(x, fn, c.rms_norm_eps)
        pre = jax.nn.sigmoid(z[:, :n] * scale[0] + base[:n]) + c.hc_eps
        post = 2 * jax.nn.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (z[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        mix = kernels.sinkhorn(logits, iters=c.hc_sinkhorn_iters, eps=c.hc_eps, implementation=implementation)
        return weighted_sum(pre, x).astype(x.dtype), post, mix

    def project(self, x: jax.Array, table: jax.Array, implementation: str | None = None) -> dict[str, jax.Array]:
        """Everything the attention needs of a row: query, KV, compressor and indexer projections.

        Args:
            x: ``[R, N, D]``.
            table: ``[R, rope]`` cosines and sines of the rows' positions.
            implementation: of the mixing matrices.
        """
        c, rows = self.config, x.shape[0]
        u, post, mix = self.collapse(x, 0, implementation)
        h = rms_norm(u, self.small["attn_norm"], c.rms_norm_eps)
        latent = rms_norm(product(h, self.wq_a[...]), self.small["q_norm"], c.rms_norm_eps)
        q = product(latent, self.wq_b[...]).reshape(rows, c.num_attention_heads, c.head_dim)
        q = rotate_tail(rms_norm(q, None, c.rms_norm_eps), table[:, None])
        out = {"q": q, "kv": product(h, self.wkv[...]), "post": post, "mix": mix}
        if self.kind.attention != "window":
            out["values"], out["gates"] = self.compressor(h)
        if self.kind.attention == "csa":
            index_q = product(latent, self.index_q[...]).reshape(rows, c.index_n_heads, c.index_head_dim)
            out["index_q"] = rotate_tail(index_q, table[:, None])
            factor = (c.index_n_heads * c.index_head_dim) ** -0.5
            out["index_weights"] = product(h, self.index_weights[...], jnp.float32) * factor
            out["index_values"], out["index_gates"] = self.indexer(h)
        return out

    def attention_output(self, out: jax.Array, table: jax.Array) -> jax.Array:
        """Inverse rotation at the query's position (the values carry RoPE), then the grouped projection: ``[R, D]``."""
        c = self.config
        out = rotate_tail(out, table[:, None], inverse=True).reshape(out.shape[0], c.o_groups, -1)
        grouped = einsum("rgi,goi->rgo", out, self.wo_a[...])
        return product(grouped.reshape(out.shape[0], -1), self.wo_b[...])

    def route(self, x: jax.Array, tokens: jax.Array, implementation: str | None = None) -> dict[str, jax.Array]:
        """The feed-forward half up to the experts: normed input, expert choice, and the shared expert's output."""
        c = self.config
        u, post, mix = self.collapse(x, 1, implementation)
        h = rms_norm(u, self.small["ffn_norm"], c.rms_norm_eps)
        logits = product(h.astype(jnp.float32), self.moe.gate[...])
        learned = self.kind.routing == "learned"
        fixed = None
        if self.moe.fixed is not None:
            inside = (tokens >= 0) & (tokens < c.vocab_size)
            fixed = jnp.where(inside[:, None], self.moe.fixed[...][jnp.where(inside, tokens, 0)], -1)
        chosen, weights = moe.route_v4(
            logits,
            self.small["gate_bias"] if learned else None,
            fixed,
            c.num_experts_per_tok,
            c.routed_scaling_factor,
            c.norm_topk_prob,
        )
        hidden = swiglu(product(h, self.moe.shared_gate_up[...], jnp.float32), c.swiglu_limit).astype(h.dtype)
        shared = product(hidden, self.moe.shared_down[...], jnp.float32)
        return {"h": h, "post": post, "mix": mix, "chosen": chosen, "weights": weights, "shared": shared}

    # ---- the layer on a pass

    def __call__(
        self,
        ctx: StepContext,
        x: jax.Array,
        store: Store,
        at: dict[str, jax.Array],
        given: jax.Array | None = None,
    ) -> tuple[jax.Array, Store, jax.Array | None]:
        """Runs the layer over the rows of a pass.

        Args:
            ctx: the pass.
            x: ``[R, N, D]`` residual streams.
            store: pools and compressor states.
            at: this layer's ordinal among the layers of each stream.
            given: ``[R, k]`` entries that a CSA layer attends in place of those that its indexer would choose.

        Returns:
            New streams, new store, and for a CSA layer the selected entries ``[R, k]`` (-1 filled), else None.
        """
        table = self.rotary(ctx, ctx.flat_positions)
        mixing = ctx.implementation("sinkhorn")
        parts = ctx.rowwise(functools.partial(self.project, implementation=mixing), x, table)
        pools, states = dict(store["pools"]), dict(store["states"])
        pages = ctx.layer_pages("window", pools)
        window_offset = at["window"] * pages * PAGE_TOKENS
        if ctx.window_table is None:
            raise ValueError("Expected a cache with a window table, as jmla.init_cache makes for this family")
        slots = ctx.slots(ctx.positions, ctx.window_table, PAGE_TOKENS, window_offset).reshape(-1)
        pools["window"] = self.pack(ctx, "window", parts["kv"], slots, pools["window"], "kv_norm", table)
        chosen, local, stream = None, None, self.kind.attention
        if stream != "window":
            pools[stream], states[stream] = self.compress(
                ctx, stream, parts["values"], parts["gates"], pools, states, at
            )
        if stream == "csa":
            pools["index"], states["index"] = self.compress(
                ctx, "index", parts["index_values"], parts["index_gates"], pools, states, at
            )
            chosen = local = self.choose(ctx, parts, pools["index"], at["csa"]) if given is None else given
        elif stream == "hca":
            entry = jnp.arange(max(ctx.capacity // self.config.hca_ratio, 1), dtype=jnp.int32)
            local = jnp.where(entry < ctx.visible(self.config.hca_ratio)[:, None], entry, -1)
        out = self.attend(ctx, parts["q"], pools, local, window_offset, at)

        def finish(x: jax.Array, out: jax.Array, parts: dict[str, jax.Array], table: jax.Array, tokens: jax.Array):
            x = expand(x, self.attention_output(out, table), parts["post"], parts["mix"])
            return x, self.route(x, tokens, mixing)

        kept = {"post": parts["post"], "mix": parts["mix"]}
        x, routed = ctx.rowwise(finish, x, out, kept, table, ctx.tokens)
        return self.feed_forward(ctx, x, routed, at.get("repeat")), {"pools": pools, "states": states}, chosen

    def choose(self, ctx: StepContext, parts: dict[str, jax.Array], pool: jax.Array, ordinal: jax.Array) -> jax.Array:
        """The entries ``[R, k]`` that the indexer of a CSA layer, the ``ordinal``-th one, chooses from its pool."""
        table = ctx.page_table(ctx.table, 1, ordinal * ctx.layer_pages("index", {"index": pool}))
        visible = ctx.visible(self.config.csa_ratio)
        return select(ctx, parts["index_q"], parts["index_weights"], pool, table, visible, self.config.index_topk)

    def feed_forward(
        self, ctx: StepContext, x: jax.Array, routed: dict[str, jax.Array], repeat: jax.Array | int | None
    ) -> jax.Array:
        """The experts that ``route`` chose, the shared expert, and the hyper-connection after them."""
        summed = moe.experts(
            routed["h"],
            ctx.without_padding(routed["chosen"]),
            routed["weights"],
            self.moe.gate_up[...],
            self.moe.down[...],
            self.config.swiglu_limit,
            repeat,
        )

        def finish(x: jax.Array, summed: jax.Array, shared: jax.Array, post: jax.Array, mix: jax.Array) -> jax.Array:
            return expand(x, (summed + shared).astype(x.dtype), post, mix)

        return ctx.rowwise(finish, x, summed, routed["shared"], routed["post"], routed["mix"])

    def rotary(self, ctx: StepContext, positions: jax.Array) -> jax.Array:
        """Sliding layers use the base theta without YaRN; compressing ones theirs with YaRN, for all of their parts."""
        c = self.config
        if self.kind.attention == "window":
            return ctx.rotary(positions, c.qk_rope_head_dim, c.rope_theta, None)
        return ctx.rotary(positions, c.qk_rope_head_dim, c.compress_rope_theta, c.yarn)

    def pack(
        self,
        ctx: StepContext,
        stream: str,
        rows: jax.Array,
        slots: jax.Array,
        pool: jax.Array,
        norm: str,
        table: jax.Array,
    ) -> jax.Array:
        return kernels.kv_pack(
            rows,
            slots,
            pool,
            layout=ctx.layouts[stream],
            norm_weight=self.small[norm],
            eps=self.config.rms_norm_eps,
            cos_sin=table,
            implementation=ctx.implementation("kv_pack"),
        )

    def compress(
        self,
        ctx: StepContext,
        stream: str,
        values: jax.Array,
        gates: jax.Array,
        pools: dict[str, jax.Array],
        states: dict[str, jax.Array],
        at: dict[str, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Advances the compressor of a stream over the pass and writes the entries it completes.

        Returns:
            The stream's pool and running states after it.
        """
        kind = self.kind.attention
        ratio = self.config.hca_ratio if kind == "hca" else self.config.csa_ratio
        compressor, norm = (self.indexer, "indexer_norm") if stream == "index" else (self.compressor, "compressor_norm")
        batch, tokens = ctx.positions.shape
        entries, state = kernels.compress(
            values.reshape(batch, tokens, -1),
            gates.reshape(batch, tokens, -1),
            states[stream],
            ctx.positions,
            ratio=ratio,
            overlap=kind == "csa",
            ape=compressor.ape[...],
            layer=at[kind],
            implementation=ctx.implementation("compress"),
        )
        closing, size = ctx.closing(ratio), PAGE_TOKENS // ratio
        slots = ctx.slots(closing, ctx.table, size, at[kind] * ctx.layer_pages(stream, pools) * size).reshape(-1)
        rows = entries.reshape(batch * closing.shape[1], -1).astype(self.wkv.dtype)
        table = self.rotary(ctx, jnp.maximum(closing.reshape(-1), 0) * ratio)
        pool = self.pack(ctx, stream, rows, slots, pools[stream], norm, table)
        return pool, state

    def attend(
        self,
        ctx: StepContext,
        q: jax.Array,
        pools: dict[str, jax.Array],
        local: jax.Array | None,
        window_offset: jax.Array,
        at: dict[str, jax.Array],
    ) -> jax.Array:
        """One softmax over the window and, in compressing layers, the entries ``local``; ``[R, H, d]``."""
        c, stream = self.config, self.kind.attention
        window = (ctx.window_table, PAGE_TOKENS, c.sliding_window, ctx.flat_positions, window_offset)
        extra = None
        if stream == "window":
            slots, lengths = kernels.resolve_slots(None, ctx.request, ctx.table, page_size=PAGE_TOKENS, window=window)
        else:
            size = ctx.layouts[stream].page_size
            (slots, lengths), (extra_slots, extra_lengths) = kernels.resolve_slots(
                local,
                ctx.request,
                ctx.table,
                page_size=size,
                layer_offset=at[stream] * ctx.layer_pages(stream, pools) * size,
                window=window,
            )
            extra = (pools[stream], ctx.layouts[stream], extra_slots, extra_lengths)
        out, _ = kernels.sparse_mla(
            q,
            pools["window"],
            slots,
            lengths,
            layout=ctx.layouts["window"],
            scale=c.head_dim**-0.5,
            extra=extra,
            sinks=self.small["attn_sink"],
            deterministic=ctx.spec.deterministic,
            implementation=ctx.implementation("sparse_mla"),
        )
        return out


class V4Ends(nnx.Module):
    """Embedding, the collapse of the streams, final norm and output head."""

    def __init__(self, config: V4Config, dtype: str):
        self.config = config
        self.embed = weight((config.vocab_size, config.hidden_size), dtype)
        self.head = weight((config.vocab_size, config.hidden_size), dtype)
        self.hyper = HyperHead(config)
        self.small = Packed([("norm", (config.hidden_size,)), ("hc_base", (config.hc_mult,)), ("hc_scale", (1,))])

    def start(self, tokens: jax.Array) -> jax.Array:
        """``[R]`` ids to ``[R, N, D]`` streams."""
        x = embed(self.embed[...], tokens)
        return jnp.broadcast_to(x[:, None], (x.shape[0], self.config.hc_mult, x.shape[1]))

    def logits(self, x: jax.Array) -> jax.Array:
        """``[R, N, D]`` streams to ``[R, V]`` float32 logits."""
        small = self.small
        return head_logits(
            self.config, x, self.hyper.fn[...], small["hc_base"], small["hc_scale"], small["norm"], self.head[...]
        )

    def hidden(self, x: jax.Array) -> jax.Array:
        """What the draft block takes over: the streams themselves."""
        return x


class V4Draft(nnx.Module):
    """The multi-token-prediction block: two projections, one layer, and a head of its own norm and collapse."""

    def __init__(self, config: V4Config, kind: LayerKind, dtype: str):
        hidden = config.hidden_size
        self.config = config
        self.layer = V4Layer(config, kind, dtype)
        self.e_proj = weight((hidden, hidden), dtype)
        self.h_proj = weight((hidden, hidden), dtype)
        self.hyper = HyperHead(config)
        self.small = Packed(
            [
                ("enorm", (hidden,)),
                ("hnorm", (hidden,)),
                ("norm", (hidden,)),
                ("hc_base", (config.hc_mult,)),
                ("hc_scale", (1,)),
            ]
        )

    def start(self, hidden: jax.Array, tokens: jax.Array, table: jax.Array) -> jax.Array:
        """Streams ``hidden [R, N, D]`` and the next tokens ``[R]`` to the block's input streams."""
        eps = self.config.rms_norm_eps
        e = product(rms_norm(embed(table, tokens), self.small["enorm"], eps), self.e_proj[...])
        h = product(rms_norm(hidden, self.small["hnorm"], eps), self.h_proj[...])
        return e[:, None] + h

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        small = self.small
        return head_logits(self.config, x, self.hyper.fn[...], small["hc_base"], small["hc_scale"], small["norm"], head)

    def hidden(self, x: jax.Array) -> jax.Array:
        """What a further draft step takes over."""
        return x

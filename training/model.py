"""The training-time forward pass of DeepSeek-V4: the network's own modules, with attention in dense blocks.

Training sequences are short, so attention multiplies whole blocks under masks where inference gathers selected rows;
everything else is the code that serves. The indexer learns by the objective of the DeepSeek-V3.2 paper (section 2.1):
the divergence between the attention that the heads pay to the compressed entries and its own softmax over them, on
inputs through which no gradient flows back.

``forward`` takes positions with gaps, and a ``Guide`` that makes a short sequence stand for a long one and says where
facts lie that are asked for (``training.long_context``).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmla.models import rope
from jmla.models.config import V4Config
from jmla.models.hyper import expand
from jmla.models.layers import product, rms_norm, swiglu
from jmla.models.params import draft_module, ends_module, graphdef, layer_module, layer_stacks
from jmla.models.v4 import V4Layer

NEG = -1e30


@dataclasses.dataclass
class Tally:
    """What the layers report besides their output: index losses, and tokens per expert by parameter path."""

    index_losses: list[jax.Array] = dataclasses.field(default_factory=list)
    loads: dict[tuple[str, ...], jax.Array] = dataclasses.field(default_factory=dict)
    found: list[jax.Array] = dataclasses.field(default_factory=list)  # with a guide: see ``at_questions``
    kept: list[jax.Array] = dataclasses.field(default_factory=list)
    picked: list[jax.Array] = dataclasses.field(default_factory=list)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guide:
    """What a training sequence says of the long text that it stands for, and of the facts in it.

    Attributes:
        spread: each HCA entry counts as so many of its like, ``[]`` float32: in a long text they are that many.
        topk: entries that indexers keep, ``[]`` int32, at most the configuration's.
        crowd: each CSA entry but the fact's counts as so many in the indexers' loss at questions, ``[]`` float32.
        asks: ``[B, n]`` places at which part of a fact's value is to be predicted, -1 filled.
        holds: ``[B, n, c]`` CSA entries with the fact asked for there, -1 filled.
    """

    spread: jax.Array
    topk: jax.Array
    crowd: jax.Array
    asks: jax.Array
    holds: jax.Array


def dense_experts(layer: V4Layer, h: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    """All experts on all rows, weighted by the routing: with a handful of small experts the fastest form to train."""
    count = layer.config.n_routed_experts
    gain = jnp.sum(jax.nn.one_hot(chosen, count, dtype=jnp.float32) * weights[..., None], axis=1)
    hidden = jnp.einsum("rd,efd->ref", h, layer.moe.gate_up[...], preferred_element_type=jnp.float32)
    hidden = (swiglu(hidden, layer.config.swiglu_limit) * gain[..., None]).astype(h.dtype)
    return jnp.einsum("rei,edi->rd", hidden, layer.moe.down[...], preferred_element_type=jnp.float32)


def pool_windows(values: jax.Array, gates: jax.Array, ape: jax.Array, overlap: bool) -> jax.Array:
    """``jmla.kernels.compress`` on whole sequences from their start, without its state: ``[B, S / ratio, d]`` float32.

    With overlap the first half of a token's channels serves the next window, the second half its own.
    """
    batch, length, width = values.shape
    ratio = ape.shape[0]
    values, gates = (x.reshape(batch, length // ratio, ratio, width) for x in (values, gates))
    gates = gates + ape
    if overlap:
        half = width // 2

        def with_previous(x: jax.Array, fill: float) -> jax.Array:
            before = jnp.pad(x[:, :-1, :, :half], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=fill)
            return jnp.concatenate([before, x[..., half:]], axis=2)

        values, gates = with_previous(values, 0.0), with_previous(gates, NEG)
    return jnp.sum(jax.nn.softmax(gates, axis=2) * values, axis=2)


def entries_of(
    layer: V4Layer, values: jax.Array, gates: jax.Array, norm: str, ape: jax.Array, table: jax.Array
) -> jax.Array:
    """All compressed entries of whole sequences ``[B, S / ratio, d]``, normed and rotated at their windows' starts."""
    ratio, length = ape.shape[0], values.shape[1]
    entries = pool_windows(values, gates, ape, overlap=ratio == layer.config.csa_ratio).astype(layer.wkv.dtype)
    entries = rms_norm(entries, layer.small[norm], layer.config.rms_norm_eps)
    return rope.rotate_tail(entries, table[: length // ratio * ratio : ratio])


def window_mask(window: int, blocks: int, positions: jax.Array | None) -> Any:
    """Which keys of its own block and the one before a query sees, ``[blocks, window, 2 * window]``.

    With positions given, distance is that of positions: what a gap separates is out of sight.
    """
    if positions is None:
        offset = np.arange(2 * window)[None, :] - np.arange(window)[:, None]
        inside = (offset > 0) & (offset <= window)
        first = np.arange(2 * window) >= window
        return np.where(np.arange(blocks)[:, None, None] == 0, inside & first[None], inside[None])
    own = positions.reshape(blocks, window)
    before = jnp.concatenate([jnp.full((1, window), -2 * window, own.dtype), own[:-1]])
    behind = own[:, :, None] - jnp.concatenate([before, own], axis=1)[:, None, :]
    return (behind >= 0) & (behind < window)


def attention(
    layer: V4Layer,
    parts: dict[str, jax.Array],
    table: jax.Array,
    tally: Tally,
    positions: jax.Array | None = None,
    guide: Guide | None = None,
) -> jax.Array:
    """Attention of whole sequences: window blocks and compressed entries under one softmax with the sink.

    Args:
        layer: the layer.
        parts: what ``layer.project`` gave, ``[B, S, ...]`` each.
        table: ``[S, rope]`` rotary table of the layer.
        tally: receives the indexer's loss, and with a guide those at questions.
        positions: ``[S]`` ascending, with gaps at multiples of the window; None for 0, 1, ...
        guide: see ``Guide``.

    Returns:
        ``[B, S, H, d]``.
    """
    c, kind = layer.config, layer.kind.attention
    q = parts["q"]
    batch, length, heads, dim = q.shape
    window = c.sliding_window
    blocks = length // window
    kv = rope.rotate_tail(rms_norm(parts["kv"], layer.small["kv_norm"], c.rms_norm_eps), table)
    by_block = kv.reshape(batch, blocks, window, dim)
    before = jnp.pad(by_block, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    keys = jnp.concatenate([before, by_block], axis=2)
    q_blocks = q.reshape(batch, blocks, window, heads, dim)
    scale = dim**-0.5
    local = jnp.einsum("bnqhd,bnkd->bhnqk", q_blocks, keys, preferred_element_type=jnp.float32) * scale
    mask = window_mask(window, blocks, positions)
    scores = [jnp.where(mask, local, NEG).reshape(batch, heads, length, 2 * window)]
    sink = jnp.broadcast_to(layer.small["attn_sink"][None, :, None, None], (batch, heads, length, 1))
    entries = None
    if kind != "window":
        ratio = c.csa_ratio if kind == "csa" else c.hca_ratio
        ape = layer.compressor.ape[...]
        entries = entries_of(layer, parts["values"], parts["gates"], "compressor_norm", ape, table)
        far = jnp.einsum("bqhd,bed->bhqe", q, entries, preferred_element_type=jnp.float32) * scale
        visible = np.arange(length // ratio)[None, :] < (np.arange(length)[:, None] + 1) // ratio
        if kind == "csa":
            chosen = select(layer, parts, table, jnp.where(visible, far, NEG), scores[0], sink, visible, tally, guide)
            far = jnp.where(chosen[:, None], far, NEG)
        else:
            far = jnp.where(visible, far if guide is None else far + jnp.log(guide.spread), NEG)
        scores.append(far)
    logits = jnp.concatenate([*scores, sink], axis=-1)
    probs = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
    near = probs[..., : 2 * window].reshape(batch, heads, blocks, window, 2 * window)
    out = jnp.einsum("bhnqk,bnkd->bnqhd", near, keys, preferred_element_type=jnp.float32)
    out = out.reshape(batch, length, heads, dim)
    if entries is not None:
        out = out + jnp.einsum(
            "bhqe,bed->bqhd", probs[..., 2 * window : -1], entries, preferred_element_type=jnp.float32
        )
    return out.astype(q.dtype)


def select(
    layer: V4Layer,
    parts: dict[str, jax.Array],
    table: jax.Array,
    far: jax.Array,
    near: jax.Array,
    sink: jax.Array,
    visible: np.ndarray,
    tally: Tally,
    guide: Guide | None,
) -> jax.Array:
    """The indexer's choice as a mask ``[B, S, E]``; reports the divergence from the heads' attention to the entries."""
    c = layer.config
    ape = layer.indexer.ape[...]
    keys = entries_of(layer, parts["index_values"], parts["index_gates"], "indexer_norm", ape, table)
    dots = jnp.einsum("bqhd,bed->bqhe", parts["index_q"], keys, preferred_element_type=jnp.float32)
    scores = jnp.einsum("bqhe,bqh->bqe", jax.nn.relu(dots), parts["index_weights"])
    scores = jnp.where(visible, scores, NEG)
    attended = jax.nn.softmax(jax.lax.stop_gradient(jnp.concatenate([near, far, sink], axis=-1)), axis=-1)
    target = jnp.sum(attended[..., near.shape[-1] : -1], axis=1)
    mass = jnp.sum(target, axis=-1, keepdims=True)
    target = target / jnp.maximum(mass, 1e-9)
    log_q = jax.nn.log_softmax(scores, axis=-1)
    divergence = jnp.sum(jnp.where(visible, target * (jnp.log(target + 1e-9) - log_q), 0), axis=-1)
    tally.index_losses.append(jnp.mean(jnp.where(visible.any(-1), divergence, 0)))
    k = min(c.index_topk, visible.shape[1])
    best = jax.lax.top_k(jax.lax.stop_gradient(scores), k)[0]
    if guide is None:
        threshold = best[..., -1:]
    else:
        threshold = jax.lax.dynamic_slice_in_dim(best, jnp.clip(guide.topk, 1, k) - 1, 1, axis=-1)
    chosen = (jax.lax.stop_gradient(scores) >= threshold) & visible
    if guide is not None:
        at_questions(guide, scores, far, near, sink, chosen, tally)
    return chosen


def at_questions(
    guide: Guide, scores: jax.Array, far: jax.Array, near: jax.Array, sink: jax.Array, chosen: jax.Array, tally: Tally
) -> None:
    """Where a fact is asked for: whether heads and indexer find its entry, as losses and as a share.

    ``tally.found`` gets -ln of the attention (mean of the heads, over all visible entries) to the fact's entries,
    ``tally.kept`` -ln of the indexer's softmax at them in a crowd of others, ``tally.picked`` the share of questions
    where the indexer keeps one of them; means over the questions.
    """
    rows = jnp.maximum(guide.asks, 0)
    entry = jnp.arange(scores.shape[-1])
    hold = jnp.any(guide.holds[..., None] == entry, axis=2)  # [B, n, E]
    there = (guide.asks >= 0) & jnp.any(hold, -1)
    count = jnp.maximum(jnp.sum(there), 1)

    def at(x: jax.Array) -> jax.Array:  # [B, S, E] -> [B, n, E]
        return jnp.take_along_axis(x, rows[..., None], axis=1)

    def log_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(jnp.where(mask, x, NEG), axis=-1)

    def mean(loss: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(there, loss, 0)) / count

    by_head = []
    for head in range(far.shape[1]):
        beyond = at(far[:, head])
        rest = jnp.concatenate([beyond, at(near[:, head]), at(sink[:, head])], axis=-1)
        by_head.append(log_sum(beyond, hold) - jax.nn.logsumexp(rest, axis=-1))
    tally.found.append(mean(np.log(len(by_head)) - jax.nn.logsumexp(jnp.stack(by_head), axis=0)))
    index = at(scores)
    right, wrong = log_sum(index, hold), log_sum(index, ~hold) + jnp.log(guide.crowd)
    tally.kept.append(mean(jnp.logaddexp(right, wrong) - right))
    tally.picked.append(mean(jnp.any(at(chosen) & hold, -1)))


def run_layer(
    layer: V4Layer,
    x: jax.Array,
    tokens: jax.Array,
    tables: dict[str, jax.Array],
    path: tuple[str, ...],
    tally: Tally,
    positions: jax.Array | None = None,
    guide: Guide | None = None,
):
    """One layer over whole sequences; ``x [B, S, N, D]``."""
    batch, length = tokens.shape
    table = tables["window" if layer.kind.attention == "window" else "compressed"]
    flat = jnp.broadcast_to(table, (batch, *table.shape)).reshape(batch * length, -1)
    x = x.reshape(batch * length, *x.shape[2:])
    parts = layer.project(x, flat)
    if layer.kind.attention == "csa":
        parts |= index_parts(layer, x, flat)
    shaped = {name: p.reshape(batch, length, *p.shape[1:]) for name, p in parts.items()}
    out = attention(layer, shaped, table, tally, positions, guide).reshape(batch * length, *parts["q"].shape[1:])
    x = expand(x, layer.attention_output(out, flat), parts["post"], parts["mix"])
    routed = layer.route(x, tokens.reshape(-1))
    if layer.kind.routing == "learned":
        count = layer.config.n_routed_experts
        tally.loads[path] = jnp.mean(jax.nn.one_hot(routed["chosen"], count, dtype=jnp.float32), axis=(0, 1))
    summed = dense_experts(layer, routed["h"], routed["chosen"], routed["weights"])
    x = expand(x, (summed + routed["shared"]).astype(x.dtype), routed["post"], routed["mix"])
    return x.reshape(batch, length, *x.shape[1:])


def index_parts(layer: V4Layer, x: jax.Array, table: jax.Array) -> dict[str, jax.Array]:
    """The indexer's projections again, from inputs that let no gradient through."""
    c = layer.config
    u, _, _ = layer.collapse(x, 0)
    h = jax.lax.stop_gradient(rms_norm(u, layer.small["attn_norm"], c.rms_norm_eps))
    latent = product(h, layer.wq_a[...])
    latent = jax.lax.stop_gradient(rms_norm(latent, layer.small["q_norm"], c.rms_norm_eps))
    q = product(latent, layer.index_q[...]).reshape(x.shape[0], c.index_n_heads, c.index_head_dim)
    values, gates = layer.indexer(h)
    factor = (c.index_n_heads * c.index_head_dim) ** -0.5
    return {
        "index_q": rope.rotate_tail(q, table[:, None]),
        "index_weights": product(h, layer.index_weights[...], jnp.float32) * factor,
        "index_values": values,
        "index_gates": gates,
    }


def forward(
    config: V4Config,
    params: dict[str, Any],
    tokens: jax.Array,
    dtype: str,
    positions: jax.Array | None = None,
    guide: Guide | None = None,
) -> tuple[jax.Array, jax.Array, Tally]:
    """Logits of every position and of the draft block, ``[B, S, V]`` and ``[B, S - 1, V]``, and the tally.

    ``positions [S]`` ascending, with gaps only at multiples of the window and of both ratios; None for 0, 1, ...
    """
    length, dims = tokens.shape[1], config.qk_rope_head_dim
    places = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
    tables = {
        "window": rope.cos_sin(places, rope.inverse_frequencies(dims, config.rope_theta, None)),
        "compressed": rope.cos_sin(places, rope.inverse_frequencies(dims, config.compress_rope_theta, config.yarn)),
    }
    tally = Tally()
    ends = nnx.merge(graphdef(ends_module(config, dtype)), params["ends"])
    x = ends.start(tokens.reshape(-1)).reshape(*tokens.shape, config.hc_mult, config.hidden_size)
    for number, stack in enumerate(layer_stacks(config)):
        for repeat in range(stack.repeats):
            for j, kind in enumerate(stack.unit):
                path = ("stacks", f"{number:02d}", str(j))
                weights = jax.tree.map(lambda w, r=repeat: w[r], params["stacks"][path[1]][path[2]])
                layer = nnx.merge(graphdef(layer_module(config, kind, dtype)), weights)
                x = run_layer(layer, x, tokens, tables, (*path, str(repeat)), tally, positions, guide)
    logits = ends.logits(x.reshape(-1, *x.shape[2:])).reshape(*tokens.shape, -1)
    block = nnx.merge(graphdef(draft_module(config, dtype)), params["draft"])
    following = jnp.roll(tokens, -1, axis=1)
    start = block.start(x.reshape(-1, *x.shape[2:]), following.reshape(-1), params["ends"]["embed"])
    y = run_layer(block.layer, start.reshape(x.shape), following, tables, ("draft", "layer"), tally, positions, guide)
    drafted = block.logits(y.reshape(-1, *y.shape[2:]), params["ends"]["head"]).reshape(*tokens.shape, -1)
    return logits, drafted[:, :-1], tally

"""One pass over new tokens: embedding, the stacks of layers, and the draft block, over a cache carried as a value."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jmla.kernels.checks import check_values, checking
from jmla.models.cache import PagedCache
from jmla.models.context import StepContext, Store
from jmla.models.params import (
    Stack,
    draft_module,
    ends_module,
    graphdef,
    layer_counts,
    layer_module,
    layer_stacks,
    streams_of,
)
from jmla.models.spec import ModelSpec

Selected = dict[int, jax.Array]
EXPERTS = ("gate_up", "down")  # the routed experts' parameters, by far the largest


def ends(spec: ModelSpec, params: dict[str, Any]) -> Any:
    """The module of embedding, final norm and head."""
    return nnx.merge(graphdef(ends_module(spec.config, spec.dtype)), params["ends"])


def draft(spec: ModelSpec, params: dict[str, Any]) -> Any:
    """The module of the draft block."""
    return nnx.merge(graphdef(draft_module(spec.config, spec.dtype)), params["draft"])


def run_layers(
    ctx: StepContext, params: dict[str, Any], x: jax.Array, store: Store, keep_selected: bool
) -> tuple[jax.Array, Store, Selected]:
    """All trunk layers over the rows of a pass.

    Args:
        ctx: the pass.
        params: all parameters.
        x: embedded rows.
        store: pools and states of the cache; carried whole, never sliced by the scan.
        keep_selected: also collect the indexer's choice of each layer that has one.

    Returns:
        Rows after the last layer, the new store, and the choices ``[R, k]`` by layer.
    """
    base = dict.fromkeys(layer_counts(ctx.spec.config, False), 0)
    carried: jax.Array | None = None
    selected: Selected = {}
    for number, stack in enumerate(layer_stacks(ctx.spec.config)):
        x, store, carried, chosen = _run_stack(
            ctx, stack, params["stacks"][f"{number:02d}"], x, store, base, carried, keep_selected
        )
        for j, by_repeat in chosen.items():
            for repeat in range(stack.repeats):
                selected[stack.first + repeat * len(stack.unit) + j] = by_repeat[repeat]
        for kind in stack.unit:
            for stream in streams_of(kind):
                base[stream] += stack.repeats
    return x, store, selected


def _run_stack(
    ctx: StepContext,
    stack: Stack,
    params: dict[str, Any],
    x: jax.Array,
    store: Store,
    base: dict[str, int],
    carried: jax.Array | None,
    keep_selected: bool,
) -> tuple[jax.Array, Store, jax.Array | None, dict[int, jax.Array]]:
    config, dtype = ctx.spec.config, ctx.spec.dtype
    params, held = _hold_experts(params)
    in_unit = {name: sum(name in streams_of(kind) for kind in stack.unit) for name in base}

    def unit(x: jax.Array, store: Store, carried: jax.Array | None, weights: dict[str, Any], repeat: Any) -> Any:
        at = {"repeat": repeat} | {name: base[name] + repeat * in_unit[name] for name in base}
        chosen = {}
        for j, kind in enumerate(stack.unit):
            layer = nnx.merge(graphdef(layer_module(config, kind, dtype)), _with_experts(weights[str(j)], held[str(j)]))
            if ctx.spec.is_v4:
                x, store, picked = layer(ctx, x, store, at)
            else:
                x, store, picked = layer(ctx, x, store, at, carried)
                carried = picked
            if keep_selected and picked is not None and "index" in streams_of(kind):
                chosen[j] = picked
            at = {name: ordinal + (name in streams_of(kind)) for name, ordinal in at.items()}
        return x, store, carried, chosen

    if stack.repeats == 1:
        only = jax.tree.map(lambda w: w[0], params)
        x, store, carried, chosen = unit(x, store, carried, only, 0)
        return x, store, carried, {j: picked[None] for j, picked in chosen.items()}

    if not ctx.spec.is_v4 and carried is None:  # the scan's carry needs its final structure from the start
        carried = jnp.full((ctx.tokens.shape[0], config.index_topk), -1, jnp.int32)

    def body(carry: Any, inputs: Any) -> Any:
        weights, repeat = inputs
        x, store, carried = carry
        x, store, carried, chosen = unit(x, store, carried, weights, repeat)
        return (x, store, carried), chosen

    (x, store, carried), chosen = jax.lax.scan(
        body, (x, store, carried), (params, jnp.arange(stack.repeats, dtype=jnp.int32))
    )
    return x, store, carried, chosen


def _hold_experts(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Takes the routed experts out of a stack's parameters: a scan would copy a layer's experts to slice them."""
    held = {j: {name: layer["moe"][name] for name in EXPERTS} if "moe" in layer else {} for j, layer in params.items()}
    rest = {
        j: layer | {"moe": {name: w for name, w in layer["moe"].items() if name not in EXPERTS}} if held[j] else layer
        for j, layer in params.items()
    }
    return rest, held


def _with_experts(layer: dict[str, Any], held: dict[str, Any]) -> dict[str, Any]:
    """A layer's parameters with the experts of its whole stack, among which ``at["repeat"]`` chooses."""
    return layer | {"moe": layer["moe"] | held} if held else layer


def run_draft(
    ctx: StepContext, params: dict[str, Any], hidden: jax.Array, store: Store, chosen: jax.Array | None = None
) -> tuple[jax.Array, Store, Any, jax.Array | None]:
    """The draft block over the rows of a pass: ``hidden`` of each position and the token that follows it.

    With ``chosen [R, k]`` these keys are attended in place of those that its indexer would choose (V3.2, GLM).

    Returns:
        Rows after the block's layer, the new store, the block's module, and the keys attended (None for V4).
    """
    block = draft(ctx.spec, params)
    table = params["ends"]["embed"]
    x = ctx.rowwise(lambda h, t: block.start(h, t, table), hidden, ctx.tokens)
    counts = layer_counts(ctx.spec.config, False)  # the draft layer comes after the trunk's in each of its streams
    at = {name: jnp.int32(count) for name, count in counts.items()}
    if ctx.spec.is_v4:
        x, store, chosen = block.layer(ctx, x, store, at)
    else:
        x, store, chosen = block.layer(ctx, x, store, at, chosen, reuse=chosen is not None)
    return x, store, block, chosen


def make_context(
    spec: ModelSpec, cache: PagedCache, tokens: jax.Array, counts: jax.Array, starts: jax.Array
) -> StepContext:
    """The context of a pass over ``tokens [B, T]``, of which row ``b`` has ``counts[b]`` valid ones from ``starts[b]``.

    Tokens past the cache's capacity are treated as padding; inside ``jmla.debug_checks()`` they are reported, and ids
    outside the vocabulary too.
    """
    if checking():
        room = f"not to pass the cache's max_seq_len={cache.max_seq_len}"
        check_values("step", "lengths after the call", starts + counts > cache.max_seq_len, starts + counts, room)
        vocab = spec.config.vocab_size
        bad = ((tokens < 0) | (tokens >= vocab)) & (jnp.arange(tokens.shape[1]) < counts[:, None])
        check_values("step", "tokens", bad, tokens, f"to be in 0..{vocab - 1}")
    counts = jnp.clip(counts, 0, jnp.minimum(tokens.shape[1], cache.max_seq_len - starts))
    ordinal = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.where(ordinal < counts[:, None], starts[:, None] + ordinal, -1)
    return StepContext(
        spec=spec,
        layouts=dict(cache.layouts),
        layers=layer_counts(spec.config, spec.drafting),
        starts=starts,
        counts=counts,
        positions=positions,
        tokens=tokens.reshape(-1),
        table=cache.table,
        window_table=cache.window_table,
        capacity=cache.max_seq_len,
    )

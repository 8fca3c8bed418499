"""Compiled steps over a cache: prefill, decode, draft, and the cache-free forward pass."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla.kernels import dispatch
from jmla.kernels.rowwise import rowwise
from jmla.models import trunk
from jmla.models.cache import PagedCache, init_cache, unshared
from jmla.models.config import V4Config
from jmla.models.context import StepContext, Store
from jmla.models.inputs import (
    as_array,
    check_active,
    check_cache,
    check_counts,
    check_hidden,
    check_ids,
    check_selected,
    is_host,
)
from jmla.models.options import check_flag
from jmla.models.spec import Model, ModelSpec, check_model, hidden_shape

Array = jax.Array


# ---- traced bodies


def _store(cache: PagedCache) -> Store:
    return {"pools": cache.pools, "states": cache.states}


def _last_valid(rows: Array, ctx: StepContext) -> Array:
    """The row of each request's last valid token, ``[B, ...]``; the first row for a request without one."""
    batch, tokens = ctx.positions.shape
    last = jnp.maximum(ctx.counts - 1, 0) + jnp.arange(batch, dtype=jnp.int32) * tokens
    return rows[last]


def _masked(logits: Array, valid: Array) -> Array:
    """Zeros where there is no token."""
    return jnp.where(valid[:, None], logits, 0)


def _by_token(ctx: StepContext, rows: Array) -> Array:
    """``[B * T, ...]`` to ``[B, T, ...]``."""
    return rows.reshape(*ctx.positions.shape, *rows.shape[1:])


def _pass(
    spec: ModelSpec,
    params: dict[str, Any],
    cache: PagedCache,
    tokens: Array,
    counts: Array,
    keep_selected: bool = False,
) -> tuple[StepContext, Array, PagedCache, trunk.Selected]:
    """One pass of the trunk over ``tokens [B, T]``; rows ``[B * T, ...]`` after the last layer and the next cache."""
    ctx = trunk.make_context(spec, cache, tokens, counts, cache.lengths)
    x = trunk.ends(spec, params).start(ctx.tokens)
    x, store, selected = trunk.run_layers(ctx, params, x, _store(cache), keep_selected)
    return ctx, x, cache.replace(**store, lengths=cache.lengths + ctx.counts), selected


def _chunked(
    one: Callable[..., Any], cache: PagedCache, inputs: Any, counts: Array, chunk: int
) -> tuple[PagedCache, Array, dict[str, Array]]:
    """Runs ``one(cache, inputs, counts) -> (cache, last, outputs)`` over chunks of the token axis.

    Args:
        one: processes up to ``chunk`` tokens of each row; ``last [B, ...]`` is a row's last valid result.
        cache: carried through.
        inputs: pytree of ``[B, T, ...]``.
        counts: ``[B]`` valid tokens.
        chunk: tokens a call.

    Returns:
        The cache, each row's last valid result, and the outputs ``[B, T, ...]``.
    """
    batch, length = jax.tree.leaves(inputs)[0].shape[:2]
    if length <= chunk:
        return one(cache, inputs, counts)
    chunks = -(-length // chunk)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return padded.reshape(batch, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    def body(carry: Any, step: Any) -> Any:
        cache, last = carry
        inputs, number = step
        here = jnp.clip(counts - number * chunk, 0, chunk)
        cache, newest, outputs = one(cache, inputs, here)
        keep = (here > 0).reshape(batch, *(1,) * (last.ndim - 1))
        return (cache, jnp.where(keep, newest, last)), outputs

    pieces = jax.tree.map(split, inputs)
    shape = jax.eval_shape(one, cache, jax.tree.map(lambda x: x[0], pieces), counts)[1]
    (cache, last), stacked = jax.lax.scan(
        body, (cache, jnp.zeros(shape.shape, shape.dtype)), (pieces, jnp.arange(chunks, dtype=jnp.int32))
    )
    outputs = {
        name: y.swapaxes(0, 1).reshape(batch, chunks * chunk, *y.shape[3:])[:, :length] for name, y in stacked.items()
    }
    return cache, last, outputs


def _advance(
    spec: ModelSpec,
    params: dict[str, Any],
    cache: PagedCache,
    tokens: Array,
    counts: Array,
    all_logits: bool,
    return_hidden: bool,
) -> tuple[dict[str, Array], PagedCache]:
    """Prefill and decode alike: processes the tokens chunk by chunk and gathers what was asked for."""
    ends = trunk.ends(spec, params)

    def one(cache: PagedCache, tokens: Array, counts: Array) -> tuple[PagedCache, Array, dict[str, Array]]:
        ctx, x, cache, _ = _pass(spec, params, cache, tokens, counts)
        outputs = {}
        if all_logits:
            outputs["all_logits"] = _by_token(ctx, _masked(ctx.rowwise(ends.logits, x), ctx.flat_positions >= 0))
        if return_hidden:
            outputs["hidden"] = _by_token(ctx, ctx.rowwise(ends.hidden, x))
        return cache, _last_valid(x, ctx), outputs

    before = cache.lengths
    cache, last, outputs = _chunked(one, cache, tokens, counts, spec.prefill_chunk)
    if not all_logits:
        logits = rowwise(ends.logits, last, deterministic=spec.deterministic)
        outputs["logits"] = _masked(logits, cache.lengths > before)
    return outputs, cache


def _draft(
    spec: ModelSpec,
    params: dict[str, Any],
    cache: PagedCache,
    hidden: Array,
    tokens: Array,
    counts: Array,
    selected: Array | None,
    return_selected: bool,
) -> tuple[dict[str, Array], PagedCache]:
    head = params["ends"]["head"]

    def one(cache: PagedCache, inputs: Any, counts: Array) -> tuple[PagedCache, Array, dict[str, Array]]:
        hidden, tokens, *given = inputs
        ctx = trunk.make_context(spec, cache, tokens, counts, cache.draft_lengths)
        keys = given[0].reshape(-1, given[0].shape[-1]) if given else None
        x, store, block, chosen = trunk.run_draft(
            ctx, params, hidden.reshape(-1, *hidden.shape[2:]), _store(cache), keys
        )
        logits = _masked(ctx.rowwise(lambda x: block.logits(x, head), x), ctx.flat_positions >= 0)
        outputs = {"logits": _by_token(ctx, logits), "hidden": _by_token(ctx, ctx.rowwise(block.hidden, x))}
        if return_selected and chosen is not None:
            outputs["selected"] = _by_token(ctx, chosen)
        cache = cache.replace(**store, draft_lengths=cache.draft_lengths + ctx.counts)
        return cache, _last_valid(x, ctx), outputs

    inputs = (hidden, tokens) if selected is None else (hidden, tokens, selected)
    cache, _, outputs = _chunked(one, cache, inputs, counts, spec.prefill_chunk)
    return outputs, cache


@functools.cache
def _compiled(name: str, donate: bool) -> Any:
    donated = ("cache",) if donate else ()
    if name == "draft":
        return jax.jit(_draft, static_argnames=("spec", "return_selected"), donate_argnames=donated)
    return jax.jit(_advance, static_argnames=("spec", "all_logits", "return_hidden"), donate_argnames=donated)


def _launch(name: str, model: Model, cache: PagedCache, donate: Any, inputs: dict[str, Any], **options: bool) -> Any:
    """Runs a compiled step on a cache, which it may take over, and on inputs, which it only reads."""
    donate = check_flag("donate", donate)
    cache = unshared(cache, *inputs.values()) if donate else cache
    with dispatch.following(model.params, cache, inputs):
        return _compiled(name, donate)(spec=model.spec, params=model.params, cache=cache, **inputs, **options)


# ---- public


def prefill(
    model: Model,
    tokens: Any,
    lengths: Any,
    cache: PagedCache,
    *,
    all_logits: bool = False,
    return_hidden: bool = False,
    donate: bool = True,
) -> Any:
    """Appends tokens to the sequences of a cache. Call it again for the next chunk of a prompt.

    The result does not depend on how a prompt is cut into calls, on the other rows, or on page placement. Tokens that
    would pass the cache's ``max_seq_len`` are dropped: the row's length stops there, and their logits are zeros.

    Args:
        model: the loaded model.
        tokens: ``[B, T]`` integer ids, left-aligned; what lies past a row's length is ignored.
        lengths: ``[B]`` valid tokens of this call; 0 leaves a row as it is. Arrays on the device are not looked at:
            the step takes their values into ``0..T``.
        cache: the cache to extend. Its buffers are taken over unless ``donate=False``.
        all_logits: return logits of every token rather than of each row's last.
        return_hidden: also return what the draft block takes over, for every token.
        donate: whether the cache may be updated in place.

    Returns:
        ``(logits, cache)`` or ``(logits, hidden, cache)``: float32 logits ``[B, V]`` or ``[B, T, V]``, zeros where
        there is no token; hidden ``[B, T, N, D]`` (V4's residual streams) or ``[B, T, D]``.

    Raises:
        CacheConsumedError: the cache was donated to an earlier step.
        TypeError, ValueError: no model or no cache, flags that are no bools, shapes or dtypes that do not fit; for
            arrays on the host also ids or lengths out of range. All before anything is compiled.
    """
    check_model(model)
    all_logits, return_hidden = check_flag("all_logits", all_logits), check_flag("return_hidden", return_hidden)
    tokens = check_ids(model.spec, tokens, "[B, T]", lengths)
    batch, length = tokens.shape
    check_cache(model, cache, batch)
    counts = check_counts("lengths", lengths, batch, length)
    if is_host(lengths) and np.max(lengths) > cache.max_seq_len:
        raise ValueError(f"Expected lengths of at most {cache.max_seq_len}, the cache's max_seq_len; got {lengths}")
    outputs, cache = _launch(
        "advance",
        model,
        cache,
        donate,
        {"tokens": tokens, "counts": counts},
        all_logits=all_logits,
        return_hidden=return_hidden,
    )
    logits = outputs["all_logits" if all_logits else "logits"]
    return (logits, outputs["hidden"], cache) if return_hidden else (logits, cache)


def decode(
    model: Model,
    tokens: Any,
    cache: PagedCache,
    *,
    active: Any = None,
    return_hidden: bool = False,
    donate: bool = True,
) -> Any:
    """Appends one token to each sequence of a cache; a full row stays as it is, and its logits are zeros.

    Args:
        model: the loaded model.
        tokens: ``[B]`` integer ids.
        cache: the cache to extend. Its buffers are taken over unless ``donate=False``.
        active: ``[B]`` bool; rows that are False are left as they are. Default: all.
        return_hidden: also return what the draft block takes over.
        donate: whether the cache may be updated in place.

    Returns:
        ``(logits [B, V], cache)`` or ``(logits, hidden [B, ...], cache)``; zeros for inactive rows.

    Raises:
        As ``prefill``.
    """
    check_model(model)
    return_hidden = check_flag("return_hidden", return_hidden)
    tokens = check_ids(model.spec, tokens, "[B]")
    batch = tokens.shape[0]
    check_cache(model, cache, batch)
    inputs = {"tokens": tokens[:, None], "counts": check_active(active, batch)}
    outputs, cache = _launch("advance", model, cache, donate, inputs, all_logits=False, return_hidden=return_hidden)
    if return_hidden:
        return outputs["logits"], outputs["hidden"][:, 0], cache
    return outputs["logits"], cache


def draft(
    model: Model,
    hidden: Any,
    tokens: Any,
    cache: PagedCache,
    *,
    lengths: Any = None,
    selected: Any = None,
    return_selected: bool = False,
    donate: bool = True,
) -> Any:
    """Runs the multi-token-prediction block, which predicts the token after next.

    It keeps its own place in the cache (``cache.draft_lengths``), so feed it every position once, in order: the hidden
    rows of positions ``0..n-1`` with the tokens ``1..n``.

    Args:
        model: a model loaded with its draft block.
        hidden: ``[B, T, ...]`` or ``[B, ...]``, from ``prefill`` or ``decode`` with ``return_hidden=True``, or from
            this function for a further draft step.
        tokens: ``[B, T]`` or ``[B]``: the token that follows each position.
        cache: the cache; its buffers are taken over unless ``donate=False``.
        lengths: ``[B]`` valid tokens of this call, as for ``prefill``; default all.
        selected: ``[B, T, k]`` or ``[B, k]`` int32 positions, -1 for none, to attend in place of those that the block's
            indexer would choose: where the config's ``index_share_for_mtp_iteration`` says so, the first step's choice
            for the further ones. Not for V4, whose block has a window alone.
        return_selected: also return what was attended.
        donate: whether the cache may be updated in place.

    Returns:
        ``(logits, hidden, cache)`` or ``(logits, hidden, selected, cache)``, with the leading axes of ``tokens``.

    Raises:
        As ``prefill``; also ValueError if the model has no draft block, or none with an indexer.
    """
    if not check_model(model).spec.drafting:
        raise ValueError("Expected a model with a draft (MTP) block; this checkpoint was loaded without one")
    return_selected = check_flag("return_selected", return_selected)
    config = model.spec.config
    if isinstance(config, V4Config) and (return_selected or selected is not None):
        raise ValueError("Expected no selected and no return_selected: V4's draft block attends a window alone")
    tokens = as_array("tokens", tokens)
    single = tokens.ndim == 1
    tokens = check_ids(model.spec, tokens, "[B]" if single else "[B, T]", None if single else lengths)
    shape = tokens.shape
    tokens = tokens[:, None] if single else tokens
    batch, length = tokens.shape
    check_cache(model, cache, batch)
    width = hidden_shape(config)
    hidden = check_hidden(hidden, (*shape, *width)).reshape(batch, length, *width)
    counts = check_counts("lengths", np.full(batch, length) if lengths is None else lengths, batch, length)
    inputs = {"hidden": hidden, "tokens": tokens, "counts": counts, "selected": None}
    if selected is not None and not isinstance(config, V4Config):
        wanted = (*shape, config.index_topk)
        inputs["selected"] = check_selected(selected, wanted, cache.max_seq_len).reshape(batch, length, -1)
    outputs, cache = _launch("draft", model, cache, donate, inputs, return_selected=return_selected)
    if single:
        outputs = {name: output[:, 0] for name, output in outputs.items()}
    if return_selected:
        return outputs["logits"], outputs["hidden"], outputs["selected"], cache
    return outputs["logits"], outputs["hidden"], cache


@functools.partial(jax.jit, static_argnames=("spec", "return_selected"))
def _forward(spec: ModelSpec, params: dict[str, Any], tokens: Array, return_selected: bool) -> Any:
    batch, length = tokens.shape
    model = Model(params, spec)
    cache = init_cache(model, batch, length, whole_window=True, dtype=spec.dtype)
    counts = jnp.full((batch,), length, jnp.int32)
    ctx, x, _, selected = _pass(spec, params, cache, tokens, counts, keep_selected=return_selected)
    logits = ctx.rowwise(trunk.ends(spec, params).logits, x).reshape(batch, length, -1)
    return logits, {layer: chosen.reshape(batch, length, -1) for layer, chosen in selected.items()}


def forward(model: Model, tokens: Any, *, return_selected: bool = False) -> Any:
    """Logits of whole sequences, without a cache to keep; differentiable with respect to the weights.

    Keys and values stay in the model's dtype, whatever its cache format. For gradients, JAX must be told that V4's
    parameters hold integers too (its hash routing tables, whose gradient is of dtype float0):
    ``jax.grad(lambda params: loss(jmla.forward(dataclasses.replace(model, params=params), tokens)),
    allow_int=True)(model.params)``.

    Args:
        model: the model.
        tokens: ``[B, T]`` integer ids.
        return_selected: also return what each indexer selected.

    Returns:
        Float32 logits ``[B, T, V]``, or ``(logits, selected)`` with ``selected`` a dict from layer number to the chosen
        positions (V3.2, GLM) or compressed entries (V4) ``[B, T, k]`` int32, -1 filled.

    Raises:
        TypeError, ValueError: no model, a flag that is no bool, tokens of another shape or dtype, or on the host out
            of range.
    """
    check_model(model)
    return_selected = check_flag("return_selected", return_selected)
    tokens = check_ids(model.spec, tokens, "[B, T]")
    if tokens.shape[1] > model.spec.max_seq_len:
        raise ValueError(f"Expected 1..{model.spec.max_seq_len} tokens a row, got {tokens.shape[1]}")
    with dispatch.following(model.params, tokens):
        logits, selected = _forward(model.spec, model.params, tokens, return_selected)
    return (logits, selected) if return_selected else logits

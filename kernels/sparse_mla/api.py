"""Public function of the sparse attention: checks, then the implementation."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import dispatch, launch, launch_cute
from ..checks import check_dtype, check_kv_scale, check_pool, check_shape, check_values, checking, int32_array
from ..layouts import KVLayout
from . import choice, cute_plan, xla
from .epilogue import Epilogue, check_epilogue
from .forms import refuses
from .source import Source

launch_cute.register(
    "sparse_mla",
    f"{__package__}.cute",
    cute_plan.refuses,
    rival=dispatch.Rival("triton", choice.slower, choice.faster),
)
launch.register("sparse_mla", f"{__package__}.triton", refuses)
# On sm_90 "triton" is a kernel of its own where that fits. This is the one that serves elsewhere, to test and time it.
launch.register_module(
    "sparse_mla",
    "portable",
    f"{__package__}.triton",
    launch.unavailable,
    refuses,
    function="portable_sparse_mla",
    named_only=True,
)
dispatch.register("sparse_mla", "xla", xla.sparse_mla)


def sparse_mla(
    q: jax.Array,
    pool: jax.Array,
    indices: jax.Array,
    lengths: jax.Array | None = None,
    *,
    layout: KVLayout,
    scale: float,
    extra: tuple[jax.Array, KVLayout, jax.Array, jax.Array | None] | None = None,
    sinks: jax.Array | None = None,
    q_scale: jax.Array | float | None = None,
    kv_scale: Any = None,
    out_scale: jax.Array | float | None = None,
    v_dim: int | None = None,
    epilogue: Epilogue | None = None,
    validate: bool = False,
    deterministic: bool | None = None,
    implementation: str | None = None,
) -> tuple[Any, jax.Array]:
    """Attention of each query row over the cache slots that it names, in one or two pools under one softmax.

    All heads share one key row k_j a slot, and its leading ``v_dim`` values are the value v_j:

        s_j = scale * q . k_j;  Z = sum_j exp(s_j);  out = sum_j exp(s_j) v_j / (Z + exp(sink));  lse = log Z

    A column takes part if it lies before its row's length and its index is a slot of the pool; -1 is a hole anywhere,
    and so is whatever else is out of range. A slot named twice counts twice. What takes no part never matters, even
    where it is NaN. A row in which nothing takes part gives 0 and lse -inf.

    A row's result is bitwise the same whatever rows stand beside it and, with "xla", however wide its index row is
    padded. With "triton" and "cute" that takes ``deterministic``, and index rows of the same widths; else it holds up
    to rounding.

    "triton" multiplies bfloat16 values, and leaves float32 queries and pools to "xla". On sm_90 it has a kernel of its
    own for the rows of the released models and more than 16 heads. That one reads the scales of inline layouts whose
    ``scale_form`` is "power_of_two" in bfloat16, which is exact for such scales, and rounds dequantised keys under
    "float32" ones to bfloat16, as FlashMLA does. A NaN code under a finite scale, which no writer makes, it may read as
    480. "portable", which serves where it is named, is the kernel of the other GPUs there too, and rounds no key.
    "cute" is another one for sm_90, chosen for shapes like those on which it was measured to be faster; what is said of
    that kernel is true of it too, and the parts of a row that several CTAs share are added up from float16.
    Differentiable in ``q``, ``sinks`` and typed plain pools. ``jax.vmap`` works.

    Args:
        q: ``[R, H, D]``, or dense ``[B, T, H, D]``; bfloat16, float32 or float8_e4m3fn; D is ``layout.width``.
        pool: a pool of ``layout``, bytes or typed.
        indices: ``[R, K]`` or ``[B, T, K]`` int32 slots.
        lengths: ``[R]`` or ``[B, T]`` int32 leading columns that count (a bound, not a number of slots); None: all.
        layout: of the pool.
        scale: factor of the logits.
        extra: a second source ``(pool, layout, indices, lengths)`` of the same width.
        sinks: ``[H]`` float, natural logits that take part in the denominator only and are not scaled; -inf: none.
        q_scale: factor of e4m3 q, broadcast to ``[..., H]``.
        kv_scale: factor of plain e4m3 pools; a pair for pools that differ.
        out_scale: factor of the output before it is rounded.
        v_dim: width of the values; default: ``layout.nope`` for inline rows, else D.
        epilogue: makes the output a ``Quantised`` of the rows in order, see ``Epilogue``.
        validate: check values too: indices that are neither -1 nor slots, lengths past K, NaN among the sinks.
        deterministic: whether a row is always cut into shares of 512 columns ("triton"), or of what its columns ask for
            ("cute"); else the number of shares depends on the shapes, and their size on the row's lengths. Either way
            results repeat bitwise. "xla" has no shares. Where none is named, "cute" does not serve deterministic rows.
        implementation: "cute", "triton", "portable" or "xla", or None for the best.

    Returns:
        ``(out, lse)``: out ``[..., H, v_dim]`` of q's dtype (bfloat16 for e4m3), and natural lse ``[..., H]`` float32,
        without the sink.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape other than stated, or layouts that do not fit each other.
        ValueCheckError: ``validate`` found a value.
    """
    check_dtype("q", q, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn)
    if q.ndim not in (3, 4):
        raise ValueError(f"Expected {q.shape=} to be [R, H, D] or [B, T, H, D]")
    *lead, heads, dim = q.shape
    rows = math.prod(lead)
    v_dim = _value_width(layout, v_dim)
    given = [(pool, layout, indices, lengths)] + ([] if extra is None else [extra])
    scales = kv_scale if isinstance(kv_scale, tuple) else (kv_scale,) * len(given)
    if len(scales) != len(given):
        raise ValueError(f"Expected kv_scale to be a scalar or {len(given)} of them, got {len(scales)}")
    prefixes = ("", "extra ")
    sources = tuple(
        _source(prefix, *source, factor, tuple(lead), dim, v_dim)
        for prefix, source, factor in zip(prefixes, given, scales, strict=False)
    )
    if sinks is not None:
        check_shape("sinks", sinks, (heads,), "[H]")
        check_dtype("sinks", sinks, jnp.float32, jnp.bfloat16)
        sinks = jnp.asarray(sinks, jnp.float32)
    if q_scale is not None:
        if q.dtype != jnp.float8_e4m3fn:
            raise ValueError(f"Expected q_scale only with float8_e4m3fn q, got {q.dtype}")
        q_scale = jnp.broadcast_to(jnp.asarray(q_scale, jnp.float32), (*lead, heads)).reshape(rows, heads)
    if out_scale is not None and jnp.ndim(out_scale):
        raise ValueError(f"Expected out_scale to be a scalar, got shape {list(jnp.shape(out_scale))}")
    if epilogue is not None:
        check_epilogue(epilogue, tuple(lead), heads, v_dim)
        epilogue = epilogue.flatten()
    if validate or checking():
        _check_values(sources, sinks)
    shapes = {
        "R": rows,
        "H": heads,
        "K": "+".join(str(source.indices.shape[1]) for source in sources),
        "layout": "+".join(source.layout.name for source in sources),
        "q": q.dtype.name,
        "epilogue": epilogue is not None,
        "v_dim": v_dim,
        "_layouts": tuple(source.layout for source in sources),
        "_columns": tuple(source.indices.shape[1] for source in sources),
        "_deterministic": bool(deterministic),
    }
    out, lse = dispatch.call(
        "sparse_mla",
        implementation,
        shapes,
        jnp.asarray(q).reshape(rows, heads, dim),
        sources,
        sinks,
        q_scale,
        out_scale,
        epilogue,
        scale=scale,
        v_dim=v_dim,
        out_dtype=jnp.bfloat16 if q.dtype == jnp.float8_e4m3fn else q.dtype,
        deterministic=deterministic,
    )
    if epilogue is None:
        out = out.reshape(*lead, heads, v_dim)
    return out, lse.reshape(*lead, heads)


def _value_width(layout: KVLayout, v_dim: int | None) -> int:
    fixed = {"inline": layout.nope, "footer": layout.width}.get(layout.kind)
    if layout.kind == "index":
        raise ValueError(
            f"Expected layout {layout.name} to be of attended rows; supported kinds: inline, footer, plain"
        )
    if v_dim is None:
        return layout.width if fixed is None else fixed
    if v_dim != fixed and (fixed is not None or not 0 < v_dim <= layout.width):
        raise ValueError(f"Expected {v_dim=} to be {fixed or f'in 1..{layout.width}'} for layout {layout.name}")
    return v_dim


def _source(
    prefix: str,
    pool: jax.Array,
    layout: KVLayout,
    indices: jax.Array,
    lengths: jax.Array | None,
    kv_scale: Any,
    lead: tuple[int, ...],
    dim: int,
    v_dim: int,
) -> Source:
    axes = "[R" if len(lead) == 1 else "[B, T"
    check_pool(pool, layout, f"{prefix}pool")
    if layout.width != dim:
        raise ValueError(
            f"Expected q's last axis, {dim}, to be the width {layout.width} of {prefix}layout {layout.name}"
        )
    if _value_width(layout, v_dim if layout.kind == "plain" else None) != v_dim:
        raise ValueError(f"Expected {prefix}layout {layout.name} to have values of width {v_dim}, as the other has")
    check_kv_scale(kv_scale, layout, f"{prefix}kv_scale")
    indices = int32_array(f"{prefix}indices", indices)
    check_shape(f"{prefix}indices", indices, (*lead, None), f"{axes}, K]")
    if lengths is not None:
        lengths = int32_array(f"{prefix}lengths", lengths)
        check_shape(f"{prefix}lengths", lengths, lead, f"{axes}]")
        lengths = lengths.reshape(-1)
    flat = indices.reshape(math.prod(lead), indices.shape[-1])
    return Source(jnp.asarray(pool), flat, lengths, kv_scale, layout)


def _check_values(sources: tuple[Source, ...], sinks: jax.Array | None) -> None:
    for name, source in zip(("", "extra "), sources, strict=False):
        bad = source.counted() & ~source.exists() & (source.indices != -1)
        capacity = source.pool.shape[0] * source.layout.page_size
        check_values("sparse_mla", f"{name}indices", bad, source.indices, f"to be -1 or in [0, {capacity})")
        if source.lengths is not None:
            width = source.indices.shape[1]
            bad = source.lengths > width
            check_values("sparse_mla", f"{name}lengths", bad, source.lengths, f"to be at most {width}")
    if sinks is not None:
        check_values("sparse_mla", "sinks", jnp.isnan(sinks), sinks, "to hold no NaN")

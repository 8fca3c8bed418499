"""Public functions of the packer: checks, then the implementation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import dispatch, launch, launch_cute, launch_pallas
from ..checks import (
    check_dtype,
    check_float,
    check_kv_scale,
    check_pool,
    check_shape,
    check_values,
    checking,
    int32_array,
)
from ..layouts import KVLayout, gather_rows, unrotate
from ..quant import ScaleForm
from . import plan, xla

launch_cute.register(
    "kv_pack",
    f"{__package__}.cute",
    plan.refuses_cute,
    capabilities=launch_cute.FROM_HOPPER,
    rival=dispatch.Rival("triton", lambda _: "was not measured to be faster than triton"),
)
launch.register("kv_pack", f"{__package__}.triton", plan.refuses)
launch_pallas.register("kv_pack", f"{__package__}.pallas", plan.refuses_pallas)
dispatch.register("kv_pack", "xla", xla.kv_pack)
dispatch.register("kv_unpack", "xla", gather_rows)


def kv_pack(
    rows: jax.Array,
    slots: Any,
    pool: jax.Array,
    *,
    layout: KVLayout,
    norm_weight: jax.Array | None = None,
    eps: float = 1e-6,
    cos_sin: jax.Array | None = None,
    scale_form: ScaleForm | None = None,
    kv_scale: jax.Array | float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Writes rows into the cache: RMSNorm, rotation, quantisation and the store, each where asked.

    In float32: the first ``norm_weight.size`` values become ``x * rsqrt(mean(x^2) + eps) * norm_weight``; the last
    ``cos_sin.shape[-1]`` values are rotated as interleaved pairs, ``(e * cos - o * sin, o * cos + e * sin)``; index
    rows are rotated by the Hadamard matrix if the layout says so; then the row is stored as the layout describes. Codes
    are ``e4m3(x * (1 / scale))``, saturated at +-448. A finite row gives no NaN code; an infinity or a NaN spoils its
    own tile only. The pad byte of a footer is written as 0; bytes between pages and other rows are not touched.

    Under jit with the pool donated the rows are written in place. Differentiable for typed plain pools of bf16 or f32.

    Args:
        rows: ``[R, width]`` float.
        slots: ``[R]`` int32, distinct; a row whose slot is negative or past the pool is skipped. Of rows with the same
            slot an unspecified one is kept, and its scale may be that of another.
        pool: uint8 ``[pages, page_stride]``, or ``[pages, page_size * width]`` of a plain layout's dtype.
        layout: where the bytes go.
        norm_weight: ``[n]`` float, n at most width.
        eps: of the norm.
        cos_sin: ``[R, n]`` float32, n/2 cosines then n/2 sines.
        scale_form: overrides ``layout.scale_form`` (``min_amax`` stays that of the layout).
        kv_scale: float32 scalar, the scale of plain e4m3 rows.
        implementation: "triton", "cute", "pallas", "xla", or None for the best.

    Returns:
        The pool with the rows in it.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape other than stated, a pool that does not fit the layout, host slots beyond int32, footer
            scales that are not powers of two, an implementation that cannot run.
    """
    slots = int32_array("slots", slots)
    check_pool(pool, layout)
    check_float("rows", rows)
    check_shape("rows", rows, (None, layout.width), "[R, width]")
    check_shape("slots", slots, (rows.shape[0],), "[R]")
    if norm_weight is not None:
        check_float("norm_weight", norm_weight)
        check_shape("norm_weight", norm_weight, (None,), "[n]")
        if norm_weight.size > layout.width:
            raise ValueError(f"Expected {norm_weight.size=} to be at most {layout.width=}")
    if cos_sin is not None:
        check_dtype("cos_sin", cos_sin, jnp.float32)
        check_shape("cos_sin", cos_sin, (rows.shape[0], None), "[R, n]")
        if cos_sin.shape[1] % 2 or cos_sin.shape[1] > layout.width:
            raise ValueError(f"Expected {cos_sin.shape[1]=} to be even and at most {layout.width=}")
    check_kv_scale(kv_scale, layout)
    if scale_form is not None:
        layout = dataclasses.replace(layout, scale_form=scale_form)
    if checking():
        _check_values(rows, slots, pool, layout, kv_scale)
    shapes = {
        "layout": layout.name,
        "page_size": layout.page_size,
        "_layout": layout,
        "_turned": 0 if cos_sin is None else cos_sin.shape[1],
        "_pool": jax.ShapeDtypeStruct(pool.shape, pool.dtype),
    }
    return dispatch.call(
        "kv_pack", implementation, shapes, rows, slots, pool, norm_weight, cos_sin, kv_scale, layout=layout, eps=eps
    )


def _check_values(rows: jax.Array, slots: jax.Array, pool: jax.Array, layout: KVLayout, kv_scale: Any) -> None:
    capacity = pool.shape[0] * layout.page_size
    check_values("kv_pack", "slots", (slots < -1) | (slots >= capacity), slots, f"to be -1 or in [0, {capacity})")
    ordered = jnp.sort(slots)
    check_values(
        "kv_pack", "sorted slots", (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0), ordered[1:], "to be distinct"
    )
    check_values("kv_pack", "rows", ~jnp.isfinite(rows) & (slots >= 0)[:, None], rows, "to be finite")
    if kv_scale is not None:
        scale = jnp.asarray(kv_scale, jnp.float32).reshape(1)
        check_values("kv_pack", "kv_scale", ~((scale > 0) & jnp.isfinite(scale)), scale, "to be positive and finite")


def kv_unpack(
    pool: jax.Array,
    slots: Any,
    *,
    layout: KVLayout,
    kv_scale: jax.Array | float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Reads rows from the cache: the inverse of ``kv_pack`` up to rounding.

    Scales are read as full float32. The Hadamard rotation of index rows is undone (operations that meet stored rows
    with rotated queries use ``layouts.gather_rows``, which leaves it).

    Args:
        pool: uint8 ``[pages, page_stride]``, or ``[pages, page_size * width]`` of a plain layout's dtype.
        slots: ``[...]`` int32; one that is negative or past the pool gives zeros, whatever the pool holds.
        layout: where the bytes are.
        kv_scale: float32 scalar, the scale of plain e4m3 rows.
        implementation: None or "xla".

    Returns:
        ``[..., width]`` float32.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a pool that does not fit the layout, host slots beyond int32, an implementation that cannot run.
    """
    slots = int32_array("slots", slots)
    check_pool(pool, layout)
    check_kv_scale(kv_scale, layout)
    shapes = {"layout": layout.name, "page_size": layout.page_size}
    rows = dispatch.call("kv_unpack", implementation, shapes, pool, slots, layout=layout, kv_scale=kv_scale)
    if checking():
        capacity = pool.shape[0] * layout.page_size
        check_values("kv_unpack", "slots", (slots < -1) | (slots >= capacity), slots, f"to be -1 or in [0, {capacity})")
        check_values("kv_unpack", "rows", ~jnp.isfinite(rows), rows, "to be finite (codes and scales)")
    return unrotate(rows, layout)

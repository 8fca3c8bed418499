"""Sparse attention through the CuTe DSL kernel, see ``cute_kernel.py``."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import launch_cute
from ..fallback import with_xla_rules
from . import cute_plan, xla
from .cute_kernel import build
from .epilogue import Epilogue, Quantised
from .source import Source


def _sparse_mla(
    q: jax.Array,
    sources: tuple[Source, ...],
    sinks: jax.Array | None,
    q_scale: jax.Array | None,
    out_scale: Any,
    epilogue: Epilogue | None,
    *,
    scale: Any,
    v_dim: int,
    out_dtype: Any,
    deterministic: bool | None = None,
    tuning: cute_plan.Tuning | None = None,
    shares: tuple[int, ...] | None = None,
) -> tuple[Any, jax.Array]:
    rows, heads, _ = q.shape
    some = [source for source in sources if source.indices.shape[1]]
    if rows == 0 or heads == 0 or not some:
        options: dict[str, Any] = {"scale": scale, "v_dim": v_dim, "out_dtype": out_dtype}
        return xla.sparse_mla(q, sources, sinks, q_scale, out_scale, epilogue, **options)
    if isinstance(scale, jax.Array):  # an array cannot be compiled in
        q_scale = jnp.broadcast_to(scale * (1.0 if q_scale is None else q_scale), (rows, heads)).astype(jnp.float32)
        scale = 1.0
    scalar = None if out_scale is None else jnp.asarray(out_scale, jnp.float32).reshape(1)
    ending, cos_sin = None, None
    if epilogue is not None:
        cos_sin = epilogue.cos_sin
        powers = epilogue.scale_form == "ue8m0"
        ending = cute_plan.Ending(epilogue.groups, epilogue.block, powers, cos_sin.shape[1])
    profile = cute_plan.profile(
        [source.layout for source in some],
        [source.pool.shape[0] for source in some],
        [source.indices.shape[1] for source in some],
        [source.lengths is not None for source in some],
        rows,
        heads,
        scale=float(scale),
        sinks=sinks is not None,
        q_codes=q.dtype == jnp.float8_e4m3fn,
        q_scale=q_scale is not None,
        out_scale=scalar is not None,
        ending=ending,
        deterministic=deterministic,
        tuning=tuning,
        shares=shares,
    )
    operands: list[Any] = [q]
    for i in range(2):
        operands += [some[i].pool, some[i].indices, some[i].lengths] if i < len(some) else [None] * 3
    outputs = [
        jax.ShapeDtypeStruct((rows, heads, v_dim), out_dtype),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
    ]
    if profile.partial:
        kinds = ((v_dim, jnp.float16), (profile.marks, jnp.float32))
        outputs += [jax.ShapeDtypeStruct((rows, profile.groups, heads, n), kind) for n, kind in kinds]
    if ending is not None:
        each = heads // ending.groups
        outputs[0] = jax.ShapeDtypeStruct((ending.groups, rows, each * v_dim), jnp.float8_e4m3fn)
        blocks, dtype = each * v_dim // ending.block, jnp.float32
        if ending.powers:
            blocks, dtype = blocks // 4, jnp.int32
        outputs.append(jax.ShapeDtypeStruct((ending.groups, blocks, -(-rows // 4) * 4), dtype))
    inputs = [*operands, sinks, q_scale, scalar, cos_sin]
    out, lse, *rest = launch_cute.call(build, profile, inputs, outputs, pools=(1, 4))
    return (out if ending is None else Quantised(out, rest[-1])), lse


sparse_mla = with_xla_rules(_sparse_mla, xla.sparse_mla)

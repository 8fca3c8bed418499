"""What may follow the attention in one kernel: inverse rotation and blockwise E4M3 for a grouped projection."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..checks import check_dtype
from ..quant import ScaleForm, quantise
from ..rotary import rotate_tail

MIN_AMAX = 1e-4
SCALE_FORMS: dict[str, ScaleForm] = {"fp32": "float32", "ue8m0": "power_of_two"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Inverse rotation of the output's trailing values, then E4M3 codes with one scale a block.

    The normalised float32 output is rotated back at the position of its query (interleaved pairs: even' = e cos + o
    sin, odd' = o cos - e sin), and only then quantised: a block holds rotated and other values alike.

    Attributes:
        cos_sin: ``[..., rope]`` float32, one row a query row: rope / 2 cosines, then rope / 2 sines of the *forward*
            rotation at the query's position.
        groups: G, consecutive heads are divided into so many groups (static).
        block: values under one scale, 32 or 128 (static).
        scale_form: "fp32": max(amax, 1e-4) / 448; "ue8m0": that, rounded up to a power of two (static).
    """

    cos_sin: jax.Array
    groups: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(default=128, metadata={"static": True})
    scale_form: Literal["fp32", "ue8m0"] = dataclasses.field(default="fp32", metadata={"static": True})

    def flatten(self) -> "Epilogue":
        """The same for rows in one axis."""
        return dataclasses.replace(self, cos_sin=self.cos_sin.reshape(-1, self.cos_sin.shape[-1]))


class Quantised(NamedTuple):
    """Output of an ``Epilogue``, laid out for a grouped FP8 product of T rows.

    Attributes:
        codes: ``[G, T, (H / G) * D]`` float8_e4m3fn.
        scales: with C = (H / G) * D / block and Tpad = T rounded up to 4. "fp32": ``[G, C, Tpad]`` float32. "ue8m0":
            ``[G, ceil(C / 4), Tpad]`` int32, four exponent bytes each, the block of lowest index in the low byte. Rows
            past T, and blocks past C, are zero.
    """

    codes: jax.Array
    scales: jax.Array


def check_epilogue(epilogue: Epilogue, rows: tuple[int, ...], heads: int, v_dim: int) -> None:
    """Raises ValueError or TypeError where ``epilogue`` does not fit an output ``[*rows, heads, v_dim]``."""
    check_dtype("epilogue.cos_sin", epilogue.cos_sin, jnp.float32)
    shape, rope = epilogue.cos_sin.shape, epilogue.cos_sin.shape[-1] if epilogue.cos_sin.ndim else 0
    if shape != (*rows, rope) or rope % 2 or not 0 < rope <= v_dim:
        raise ValueError(
            f"Expected epilogue.cos_sin.shape={shape} to be {(*rows, 'rope')} with an even rope <= {v_dim}"
        )
    if epilogue.block not in (32, 128) or v_dim % epilogue.block:
        raise ValueError(f"Expected epilogue.block={epilogue.block} to divide {v_dim=}; supported: 32, 128")
    if epilogue.groups < 1 or heads % epilogue.groups:
        raise ValueError(f"Expected epilogue.groups={epilogue.groups} to divide {heads=}")
    if epilogue.scale_form not in SCALE_FORMS:
        raise ValueError(f"Expected epilogue.scale_form={epilogue.scale_form!r} to be 'fp32' or 'ue8m0'")


def finish(out: jax.Array, out_scale: Any, epilogue: Epilogue | None, cos_sin: jax.Array | None, dtype: Any) -> Any:
    """Output ``[R, H, D]`` float32 -> scaled and cast; or, with ``epilogue``, (codes, scales) ``[R, H, D / block]``."""
    if out_scale is not None:
        out = out * out_scale
    if epilogue is None or cos_sin is None:
        return out.astype(dtype)
    out = rotate_tail(out, cos_sin[:, None], inverse=True)
    return quantise(out, epilogue.block, SCALE_FORMS[epilogue.scale_form], MIN_AMAX)


def assemble(codes: jax.Array, scales: jax.Array, epilogue: Epilogue) -> Quantised:
    """Codes ``[R, H, D]`` and scales ``[R, H, D / block]`` -> the stored forms of ``Quantised``."""
    rows, groups = codes.shape[0], epilogue.groups
    codes = codes.reshape(rows, groups, -1).swapaxes(0, 1)
    scales = jnp.transpose(scales.reshape(rows, groups, -1), (1, 2, 0))
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -rows % 4)))
    if epilogue.scale_form == "ue8m0":
        exponents = jax.lax.bitcast_convert_type(scales, jnp.int32) >> 23
        exponents = jnp.pad(exponents, ((0, 0), (0, -exponents.shape[1] % 4), (0, 0)))
        quads = exponents.reshape(groups, -1, 4, exponents.shape[-1])
        scales = sum((quads[:, :, i] << (8 * i) for i in range(1, 4)), quads[:, :, 0])
    return Quantised(codes, scales)

"""Launches of Pallas kernels, lowered through Triton, and whether they can run."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from . import dispatch
from .launch import MIN_CAPABILITY, local_capability, register_module, whole

interpreting = False  # set by the tests to run kernels on the CPU, as XLA programs
# Offsets into arrays of up to 4 GiB have 32 bits and a sign: elements of one byte lie beyond them from 2 GiB on.
WIDE_OFFSETS = 2**32


def unavailable(target: dispatch.Target) -> str | None:
    """Why Pallas kernels cannot serve a target, or None."""
    if interpreting:
        return None
    known = target.compute_capability
    if known is not None and known < MIN_CAPABILITY:
        return f"needs compute capability {MIN_CAPABILITY / 10} or later, the target has {known / 10}"
    named = jax.sharding.get_abstract_mesh().abstract_device
    gpu = (local_capability() or 0) >= MIN_CAPABILITY if named is None else named.platform == "gpu"
    return None if gpu else "needs a GPU, or an abstract mesh that names one, to lower for"


def register(op: str, module: str, refuses: Callable[[Mapping[str, Any]], str | None] | None = None) -> None:
    """Registers the Pallas implementation of an operation, which serves where it is named; see ``launch.register``."""
    register_module(op, "pallas", module, unavailable, refuses, named_only=True)


def offsets_overflow(array: jax.ShapeDtypeStruct) -> bool:
    """Whether Pallas would reach some elements of an array by offsets that do not fit; see ``WIDE_OFFSETS``."""
    return array.size > 2**31 and array.size * array.dtype.itemsize <= WIDE_OFFSETS


def launch(
    kernel: Callable[..., None],
    *operands: Any,
    out: Any,
    grid: tuple[int, ...],
    aliases: Mapping[int, int],
    num_warps: int,
    **constants: Any,
) -> Any:
    """Calls a Pallas kernel on whole arrays.

    Args:
        kernel: takes references to the operands (None where an operand is None), then to the outputs, then constants.
        operands: arrays.
        out: a ``jax.ShapeDtypeStruct`` or a sequence of them.
        grid: programs along each axis.
        aliases: operand index, Nones not counted -> index of the output that is the operand, updated in place.
        num_warps: warps of a program.
        constants: keyword arguments of the kernel.

    Returns:
        What ``out`` describes.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    single = hasattr(out, "shape")
    present = [i for i, x in enumerate(operands) if x is not None]
    updated = {present[i] for i in aliases}
    operands = tuple(whole(x) if i in updated else x for i, x in enumerate(operands))
    call = pl.pallas_call(
        functools.partial(kernel, **constants),
        out_shape=out,
        grid=grid,
        input_output_aliases=dict(aliases),
        interpret=interpreting,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        name=kernel.__name__,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of the backend, at lowering outside of jit
        results = call(*operands)
    if single:
        return whole(results) if aliases else results
    return tuple(whole(x) if i in aliases.values() else x for i, x in enumerate(results))


# What kernels do in one way on the GPU and in another one in the interpreter.


def store(ref: Any, index: tuple[jax.Array, ...], values: jax.Array, mask: jax.Array) -> None:
    """Stores where ``mask`` says so, at ``index``, whose last array has the shape of ``values``."""
    from jax.experimental.pallas import triton as plgpu

    if interpreting:  # writes all of them, the masked ones with what it has read: these must meet no others
        index = (*index[:-1], jnp.where(mask, index[-1], ref.shape[-1]))
    plgpu.store(ref.at[index], values, mask=mask)


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """Products of float32 arrays, rounded before they enter a sum."""
    return jax.lax.optimization_barrier(x * y) if interpreting else _rounded("mul", x, y)


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """Correctly rounded quotients of float32 arrays."""
    if interpreting:  # a divisor that is not constant: XLA multiplies by rounded reciprocals of constants
        return x / jnp.where(jnp.isnan(x), x, y)
    return _rounded("div", x, y)


def _rounded(operation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    from jax.experimental.pallas import triton as plgpu

    x, y = jnp.broadcast_arrays(x, y)
    (result,) = plgpu.elementwise_inline_asm(
        f"{operation}.rn.f32 $0, $1, $2;",
        args=[x, y],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result


def barrier() -> None:
    """Lets the threads of a program wait for each other."""
    from jax.experimental.pallas import triton as plgpu

    if not interpreting:
        plgpu.debug_barrier()

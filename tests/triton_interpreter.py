"""Runs Triton kernels on the CPU, in Triton's interpreter, as if they were launched from JAX.

Only in a process that was started with TRITON_INTERPRET=1, which Triton reads when a kernel is defined.
"""

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl

POISON = 0xFF  # of the bytes of outputs: NaN in every float format, -1 in every integer
_RAW = {  # NumPy has no name for these; Triton goes by the name of the dtype
    np.dtype(ml_dtypes.bfloat16): "torch.bfloat16",
    np.dtype(ml_dtypes.float8_e4m3fn): "torch.float8_e4m3fn",
}


def _mend() -> None:
    """Gives the interpreter of Triton 3.9 what it gets wrong of bf16.

    It multiplies the bits of bf16 operands of a dot as integers, and rounds float32 to bf16 towards zero.
    """
    from triton.runtime import interpreter

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply, cast = builder.create_dot, builder.cast_impl

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return handle_of((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle_of(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, source, target)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_trunc = cast_impl


_mend()


class _Memory:
    """The little of a torch tensor that the interpreter touches, over a NumPy array."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _RAW.get(array.dtype, f"torch.{array.dtype.name}")

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Memory":
        return self

    def cpu(self) -> "_Memory":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_Memory":
        return _Memory(np.empty(0, self.array.dtype))

    def set_(self, storage: "_Memory", *_: Any) -> None:
        self.array, self.dtype = storage.array, storage.dtype

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, other: "_Memory") -> None:
        if self.array is not other.array:
            raise RuntimeError("Expected memory that is not copied")


def run(
    kernel: Any,
    operands: Sequence[Any],
    out: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: dict[int, int],
    constants: dict[str, Any],
) -> list[jax.Array]:
    """See ``jmla.kernels.launch``."""
    traced = [i for i, x in enumerate(operands) if isinstance(x, np.ndarray | jax.Array)]

    def host(*arrays: Any) -> list[np.ndarray]:
        values: list[Any] = list(operands)
        for i, array in zip(traced, arrays, strict=True):
            values[i] = np.array(array)  # a copy: kernels may write into aliased operands
        outs = [
            np.frombuffer(bytearray([POISON]) * (int(np.prod(o.shape)) * np.dtype(o.dtype).itemsize), np.dtype(o.dtype))
            .reshape(o.shape)
            .copy()
            for o in out
        ]
        for operand, index in aliases.items():
            outs[index] = values[operand]
        memory = [_Memory(v) if isinstance(v, np.ndarray) else v for v in values]
        fresh = [_Memory(o) for i, o in enumerate(outs) if i not in aliases.values()]
        kernel[grid](*memory, *fresh, **constants)
        return outs

    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in out]
    return list(jax.pure_callback(host, shapes, *(operands[i] for i in traced)))

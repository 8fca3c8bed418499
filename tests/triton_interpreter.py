"""Runs Triton kernels on the CPU, in Triton's interpreter, as if they were launched from JAX.

Only in a process that was started with TRITON_INTERPRET=1, which Triton reads when a kernel is defined.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Gives the interpreter what it gets wrong of narrow floats (3.6, 3.9) and of loops with tensors as bounds (3.6).

    It multiplies the bits of bf16 operands of a dot as integers, rounds float32 to bf16 towards zero, and cuts what
    does not fit e4m3, where the hardware rounds to even and saturates.
    """
    from triton.runtime import interpreter

    builder, handle_of, patch = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._patch_lang_tensor
    multiply, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return handle_of((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if handle.dtype.scalar == tl.float8e4nv:
            return handle_of(handle.data.view(ml_dtypes.float8_e4m3fn).astype(np.float32), tl.float32)
        return handle

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle_of(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source.dtype.scalar, target.scalar):
            return convert(self, source, target, rounding)
        source = widen(source)
        if target.scalar == tl.float8e4nv:
            codes = source.data.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
            return handle_of(codes.view(np.uint8), tl.float8e4nv)
        return source if target.scalar == tl.float32 else cast_impl(self, source, target)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    builder.create_fp_trunc = cast_impl
    interpreter._patch_lang_tensor = patch_tensor


_mend()
# Kernels run in a thread of their own: in those of XLA on the CPU the smallest numbers are zeros for NumPy. It is
# started here, so that it takes its modes from a thread of Python.
_thread = ThreadPoolExecutor(1)
_thread.submit(int).result()


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

    def elsewhere(*arrays: Any) -> list[np.ndarray]:
        return _thread.submit(host, *arrays).result()

    return list(jax.pure_callback(elsewhere, shapes, *(operands[i] for i in traced)))

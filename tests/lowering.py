"""Lowers jitted functions for NVIDIA GPUs on a machine without one, and reads what the compilers say of the kernels."""

import contextlib
import dataclasses
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jmla import kernels
from jmla.kernels import launch

for needed in ("triton", "jax_triton", "jax_cuda13_plugin"):
    pytest.importorskip(needed, reason="the extra 'lowering' is not installed")

CAPABILITIES = (90, 100, 120)
SHARED_MEMORY = {90: 232_448, 100: 232_448, 120: 101_376}  # bytes that a program can have


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One Triton kernel: shared memory of a program in bytes, registers and spilled bytes of a thread."""

    name: str
    shared: int
    registers: int
    spills: int


def cases(names: Iterable[str], usual: Iterable[str]) -> list[Any]:
    """Parameters for tests: of the names, those that are not usual are slow."""
    names, usual = list(names), set(usual)
    if unknown := usual - set(names):
        raise ValueError(f"Expected usual cases among {names}, got {sorted(unknown)}")
    return [name if name in usual else pytest.param(name, marks=pytest.mark.slow) for name in names]


def lower(fn: Callable[..., Any], *args: Any, capability: int) -> list[Compiled]:
    """Lowers ``fn(*args)`` (arrays or their shapes) for a compute capability; the Triton kernels that this compiled."""
    fresh = jax.jit(lambda *xs: fn(*xs))
    with kernels.target(compute_capability=capability), _recorded() as results:
        text = fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = [_assemble(name, shared, ptx, capability) for name, shared, ptx in results]
    for kernel in found:
        if kernel.shared > SHARED_MEMORY[capability]:
            raise AssertionError(f"{kernel} has more than {SHARED_MEMORY[capability]} bytes of shared memory")
    if "triton_kernel_call" not in text:
        raise AssertionError("Expected the lowered program to call a Triton kernel")
    return found


@contextlib.contextmanager
def _recorded() -> Iterator[list[tuple[str, int, str]]]:
    import jax_triton.triton_lib as lib

    launch.mend_jax_triton()  # which wraps the same function, once and for all
    results: list[tuple[str, int, str]] = []
    compile_kernel, find = lib.compile_ttir_to_ptx_inplace, lib.TritonFunction.get_or_create_kernel

    @functools.wraps(compile_kernel)
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = compile_kernel(*args, **kwargs)
        results.append((result.name, result.shared_mem_bytes, result.binary))
        return result

    def afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.fn._jT_kernel_cache.clear()
        return find(self, *args, **kwargs)

    lib.compile_ttir_to_ptx_inplace, lib.TritonFunction.get_or_create_kernel = recording, afresh
    once = lib.TritonFunction._compile_kernel
    lib.TritonFunction._compile_kernel = once.__wrapped__  # which knows kernels of before
    try:
        yield results
    finally:
        lib.compile_ttir_to_ptx_inplace, lib.TritonFunction.get_or_create_kernel = compile_kernel, find
        lib.TritonFunction._compile_kernel = once


def _assemble(name: str, shared: int, ptx: str, capability: int) -> Compiled:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = max(folder.glob("ptxas*"), key=lambda path: len(path.name))  # ptxas-blackwell, the newer, where there is one
    arch = re.search(r"\.target (sm_\w+)", ptx)
    if arch is None:
        raise AssertionError(f"Expected a target in the PTX of {name}")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", f"--gpu-name={arch[1]}", str(source), "-o", str(Path(scratch) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stderr + done.stdout
        if done.returncode:
            raise AssertionError(f"ptxas refuses {name}: {said}")
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    if registers is None or spills is None:
        raise AssertionError(f"Expected ptxas to state registers and spills of {name}: {said}")
    return Compiled(name, shared, int(registers[1]), int(spills[1]))

"""Launches of Triton kernels inside JAX programs, and whether they can run."""

import concurrent.futures
import contextlib
import contextvars
import functools
import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from . import dispatch

MIN_CAPABILITY = 90
# Set by the tests to run kernels in Triton's interpreter: takes the arguments of ``launch``, ``out`` as a list.
interpreter: Callable[..., Sequence[jax.Array]] | None = None

_kept = contextvars.ContextVar("kept", default=False)
_ours = contextvars.ContextVar("ours", default=False)  # while jax-triton compiles a kernel of this package


@functools.cache
def _broken() -> str | None:
    """Why jax-triton cannot be used, or None."""
    if importlib.util.find_spec("jax_triton") is None or importlib.util.find_spec("triton") is None:
        return "jax-triton is not installed (it comes with the extras cuda13 and cuda12)"
    try:
        importlib.import_module("jax_triton")
    except Exception as error:  # a version of Triton that it does not fit must not stop what runs without it
        return f"jax-triton cannot be imported: {type(error).__name__}: {error}"
    return None


def unavailable(target: dispatch.Target) -> str | None:
    """Why Triton kernels cannot serve a target, or None."""
    if reason := _broken():
        return reason
    known = target.compute_capability
    if known is None:  # under jit, without a mesh: what is there will be the target
        known = _first_gpu()
    if known < MIN_CAPABILITY:
        return f"needs compute capability {MIN_CAPABILITY / 10} or later, the target has {known / 10}"
    return None


@functools.cache
def local_capability() -> int | None:
    """Compute capability of the first GPU of the process, None where there is no NVIDIA GPU."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    return dispatch.gpu_target(getattr(device, "compute_capability", None)).compute_capability


def _first_gpu() -> int:
    """``local_capability``, or ``MIN_CAPABILITY`` where there is none."""
    return local_capability() or MIN_CAPABILITY


def capability() -> int:
    """Compute capability that a kernel is being made for: the target's, else that of the first GPU, else 90."""
    stated = dispatch.current_target().compute_capability
    return _first_gpu() if stated is None else stated


def register(op: str, module: str, refuses: Callable[[Mapping[str, Any]], str | None] | None = None) -> None:
    """Registers the Triton implementation of an operation: the function of the operation's name in ``module``.

    The module, and Triton with it, is imported at the first call.

    Args:
        op: the operation.
        module: full name of the module.
        refuses: gives the reason why the implementation cannot serve the shapes that the operation states, or None.
    """

    register_module(op, "triton", module, unavailable, refuses)


def register_module(
    op: str,
    name: str,
    module: str,
    unavailable: Callable[[dispatch.Target], str | None],
    refuses: Callable[[Mapping[str, Any]], str | None] | None,
    *,
    function: str | None = None,
    named_only: bool = False,
    rival: dispatch.Rival | None = None,
    broken: Callable[[], str | None] | None = None,
) -> None:
    """Registers a CUDA implementation whose module is imported at its first call.

    Args:
        op: the operation.
        name: of the implementation.
        module: full name of the module.
        unavailable: gives the reason why no kernel of this kind can serve a target, or None.
        refuses: gives the reason why this one cannot serve the shapes that the operation states, or None.
        function: the name of its function in the module, that of the operation where none is given.
        named_only, rival, broken: see ``dispatch.Implementation``.
    """

    def why_not(target: dispatch.Target, shapes: Mapping[str, Any]) -> str | None:
        return unavailable(target) or (refuses(shapes) if refuses else None)

    def call(*arrays: Any, **static: Any) -> Any:
        return getattr(importlib.import_module(module), function or op)(*arrays, **static)

    dispatch.register(
        op, name, call, platform="cuda", why_not=why_not, named_only=named_only, rival=rival, broken=broken
    )


@functools.cache
def mend_jax_triton() -> None:
    """Mends jax-triton 0.4.1: Gluon kernels whose warps have roles, and operands that start anywhere.

    It sends Gluon kernels through the stages of Triton kernels, whose passes choose layouts anew and do not end on such
    kernels; and it launches as many warps as it was asked for, where the compiler has added those of the other roles.

    A kernel that several threads need at a time is compiled by one of them, for which the others wait.

    It also takes every array to start at a multiple of 16 bytes. Of the operands of this package's kernels only those
    are taken to that ``keeps_aligned`` names.
    """
    import jax_triton.triton_lib as lib

    compile_kernel, runtime = lib.compile_ttir_to_ptx_inplace, lib.triton_kernel_call_lib

    class Stages:
        def __init__(self, backend: Any):
            self.backend = backend

        def make_ttir(self, module: Any, *_: Any) -> Any:
            return module

        def make_ttgir(self, module: Any, metadata: Any, options: Any, capability: Any) -> Any:
            return self.backend.gluon_to_ttgir(module, metadata, options, capability)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

    class Runtime:
        def TritonKernel(self, name: str, warps: int, ctas: int, shared: int, ptx: str, *rest: Any) -> Any:
            if threads := re.search(r"\.reqntid (\d+)", ptx):
                warps = int(threads[1]) // 32
            return runtime.TritonKernel(name, warps, ctas, shared, ptx, *rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

    @functools.wraps(compile_kernel)
    def compile_either(module: Any, backend: Any, options: Any, capability: Any) -> Any:
        gluon = "ttg.num-warps" in str(module)  # a Triton kernel has no number of warps yet
        return compile_kernel(module, Stages(backend) if gluon else backend, options, capability)

    build, find = lib.KernelSpecialization.build, lib.TritonFunction.get_or_create_kernel
    compile_one = lib.TritonFunction._compile_kernel
    compiling: dict[Any, concurrent.futures.Future[Any]] = {}

    @functools.wraps(compile_one)
    def compile_once(self: Any, spec: Any, target: Any, backend: Any, options: Any) -> Any:
        mine: concurrent.futures.Future[Any] = concurrent.futures.Future()
        known = compiling.setdefault(self._make_cache_key(spec, target, options), mine)  # of one thread it is its own
        if known is mine:
            try:
                mine.set_result(compile_one(self, spec, target, backend, options))
            except BaseException as error:
                mine.set_exception(error)
        return known.result()

    @functools.wraps(build)
    def build_unaligned(arg_names: Any, args: Any, *rest: Any) -> Any:
        made = build(arg_names, args, *rest)
        for i, arg in enumerate(args):
            if _ours.get() and isinstance(arg, jax.core.ShapedArray) and not keeps_aligned(arg):
                made.specialization[i] = (made.specialization[i][0], "")
                made.attrs[rest[2][i]] = []
        return made

    @functools.wraps(find)
    def find_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _ours.set(self.fn.fn.__module__.startswith("jmla."))
        try:
            return find(self, *args, **kwargs)
        finally:
            _ours.reset(token)

    lib.KernelSpecialization.build = build_unaligned
    lib.TritonFunction._compile_kernel = compile_once
    lib.TritonFunction.get_or_create_kernel = find_ours
    lib.compile_ttir_to_ptx_inplace = compile_either
    if runtime is not None:
        lib.triton_kernel_call_lib = Runtime()


def keeps_aligned(array: Any) -> bool:
    """Whether an array in a buffer of its own, or whole rows of one, start at multiples of 16 bytes.

    Vectors are taken to start anywhere: slices of them are given by address, which is cheaper than a copy.
    """
    return len(array.shape) > 1 and array.shape[-1] * jax.numpy.dtype(array.dtype).itemsize % 16 == 0


def whole(x: jax.Array) -> jax.Array:
    """An operand of a kernel, or what it has become, in a buffer of its own.

    XLA gives a kernel the addresses of slices that it reads, or that its result is written into, rather than copies.
    Such a slice may start anywhere; and where the kernel updates it in place, the operand and the result may be two
    places.
    """
    return jax.lax.optimization_barrier(x)


def keeping() -> bool:
    """Whether launches are traced inside ``kept()``."""
    return _kept.get()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside it, traced launches stay in their program even where nothing uses their results, as timing needs."""
    token = _kept.set(True)
    try:
        yield
    finally:
        _kept.reset(token)


def launch(
    kernel: Any,
    *operands: Any,
    out: Any,
    grid: tuple[int, ...],
    aliases: Mapping[int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    options: Mapping[str, Any] | None = None,
    pools: Collection[int] = (),
    **constants: Any,
) -> Any:
    """Calls a Triton kernel.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``: pointers of the operands, then of the outputs that
            replace no operand, then constants.
        operands: arrays and Python numbers; of the latter 1 and multiples of 16 are compiled into the kernel as such.
        out: a ``jax.ShapeDtypeStruct`` or a sequence of them.
        grid: programs along each of up to three axes.
        aliases: operand index -> output index: that output is the operand, updated in place; the kernel has no
            parameter of its own for it.
        num_warps: warps of a program.
        num_stages: stages of software pipelines.
        options: further options of the compiler, such as ``maxnreg``.
        pools: operands whose slices are whole pages, and may be given by address; those of others are copied.
        constants: the kernel's ``constexpr`` parameters.

    Returns:
        What ``out`` describes.
    """
    aliases = dict(aliases or {})
    single = hasattr(out, "shape")
    outs = [out] if single else list(out)
    if interpreter is not None:
        results = interpreter(kernel, operands, outs, grid, aliases, constants)
        return results[0] if single else tuple(results)
    import jax_triton

    mend_jax_triton()
    with warnings.catch_warnings():
        # The Refs that the warning recommends cannot be made inside a branch of platform_dependent.
        warnings.filterwarnings("ignore", message="input_output_aliases is deprecated", category=DeprecationWarning)
        operands = tuple(
            whole(x) if i in aliases or (isinstance(x, jax.Array) and i not in pools and keeps_aligned(x)) else x
            for i, x in enumerate(operands)
        )
        # jax-triton passes the outputs' buffers in order, and takes those that replace operands to be the last.
        order = sorted(range(len(outs)), key=lambda i: i in aliases.values())
        results = jax_triton.triton_call(
            *operands,
            kernel=kernel,
            out_type=[outs[i] for i in order],
            grid=grid,
            name=kernel.fn.__name__,
            input_output_aliases={operand: order.index(i) for operand, i in aliases.items()},
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=capability(),
            backend_options={"enable_fp_fusion": True} | dict(options or {}),
            has_side_effect=_kept.get(),
            **constants,
        )
    results = [results[order.index(i)] for i in range(len(outs))]
    results = [whole(x) if i in aliases.values() or keeps_aligned(x) else x for i, x in enumerate(results)]
    return results[0] if single else tuple(results)

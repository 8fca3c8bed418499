"""Launches of CuTe DSL kernels inside JAX programs, and whether they can run.

A kernel is compiled while the call is traced, or found in the cache of ``cute_cache``; the program holds its bytes.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from . import dispatch
from .launch import capability, keeping, keeps_aligned, local_capability, register_module, whole

HOPPER = (90,)  # has the warpgroup products that the kernels of attention are made of
FROM_HOPPER = (90, 100, 103, 120)

# Part of jit's cache key: what is traced for its kernels has them compiled when it is lowered.
_collected = jax.make_user_context(None)


@functools.cache
def _broken() -> str | None:
    """Why CuTe DSL cannot be used, or None."""
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed (it comes with the extras cuda13 and cuda12)"
    try:
        importlib.import_module("cutlass.jax.ffi")
    except Exception as error:  # a version that does not fit must not stop what runs without it
        return f"nvidia-cutlass-dsl cannot be imported: {type(error).__name__}: {error}"
    return None


def unwritten(target: dispatch.Target, capabilities: Collection[int] = HOPPER) -> str | None:
    """Why kernels written for some compute capabilities are not for a target, or None.

    Where neither a target nor a GPU says what to compile for, they are not: CuTe DSL is not imported there.
    """
    known = local_capability() if target.compute_capability is None else target.compute_capability
    if known is None:
        return "needs a GPU, or a target that names one, to compile for"
    if known not in capabilities:
        written = ", ".join(str(c / 10) for c in capabilities)
        return f"is written for compute capability {written}; the target has {known / 10}"
    return None


def register(
    op: str,
    module: str,
    refuses: Callable[[Mapping[str, Any]], str | None] | None = None,
    *,
    capabilities: Collection[int] = HOPPER,
    named_only: bool = False,
    rival: dispatch.Rival | None = None,
) -> None:
    """Registers the CuTe DSL implementation of an operation: the function of the operation's name in ``module``.

    The module is imported at the first call, and CuTe DSL before it, when there are shapes that it is to serve.

    Args:
        op: the operation.
        module: full name of the module.
        refuses: gives the reason why the implementation cannot serve the shapes that the operation states, or None.
        capabilities: compute capabilities that its kernels are written for.
        named_only, rival: see ``dispatch.Implementation``.
    """
    why_not = functools.partial(unwritten, capabilities=tuple(capabilities))
    register_module(op, "cute", module, why_not, refuses, named_only=named_only, rival=rival, broken=_broken)


class Jobs(list[Any]):
    """The ``cute_cache.Job`` of each call, in order; as an identity it is part of jit's cache key."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


@contextlib.contextmanager
def collecting() -> Iterator[Jobs]:
    """Inside it, tracing lists the kernels of a program instead of compiling them.

    They are then compiled when the program is lowered, unless they are there by then, as ``cute_workers.warm`` makes
    them. No other implementation can serve in their place any more.
    """
    jobs = Jobs()
    with _collected(jobs):
        yield jobs


@dataclasses.dataclass(frozen=True)
class _Later:
    """An attribute of a call that is known when the call is lowered: a kernel, or its digest."""

    job: Any
    digest: bool

    def __jax_array__(self) -> bytes:  # which is what JAX asks for the value of an attribute of an unknown type
        from . import cute_cache

        module = cute_cache.module(self.job)
        return cute_cache.digest(module) if self.digest else module


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What ``jax.export`` must be told to let CuTe DSL kernels pass (``disabled_checks``)."""
    from cutlass.jax.ffi import get_export_disabled_safety_checks

    return list(get_export_disabled_safety_checks())


def enable() -> str:
    """Makes programs with CuTe DSL kernels runnable in this process, as before an exported one is loaded.

    Returns:
        The name of the XLA FFI target.
    """
    from cutlass.jax import ffi

    ffi.register_ffi()
    return ffi.get_cutlass_call_ffi_name(True, ffi.get_cutlass_call_ffi_version())


def call(
    build: Callable[[Any], Callable[..., None]],
    profile: Hashable,
    inputs: Sequence[jax.Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
    *,
    pools: Collection[int] = (),
    dynamic: bool = False,
) -> tuple[jax.Array, ...]:
    """Calls a CuTe DSL kernel.

    It is compiled once for each ``build``, ``profile``, operands' shapes and dtypes, and architecture. Inputs that are
    updated in place, and tensors of two and more axes whose rows are multiples of 16 bytes, start at multiples of 16
    bytes; others may start anywhere.

    Args:
        build: a function of a module; ``build(profile)`` gives the launcher under ``cute.jit``, which takes the stream,
            the inputs (None where one is None), and the outputs that replace no input.
        profile: a frozen dataclass of all that the kernel is compiled for; its ``repr`` says everything.
        inputs: arrays, and None for those that the kernel goes without.
        outputs: shapes and dtypes.
        aliases: input index -> output index: that output is the input, updated in place.
        pools: inputs whose slices are whole pages, and may be given by address; those of others are copied.
        dynamic: whether leading axes are left to the run, so that kernels do not depend on them; else all shapes are
            static.

    Returns:
        The outputs.

    Raises:
        Declined: the kernel could not be compiled, and another implementation may serve, as none was named.
        Uncompiled: it could not, and this one was named, or settings are strict (see ``cute_cache.Settings``).
    """
    from . import cute_cache

    aliases = dict(aliases or {})
    job = cute_cache.Job.of(build, profile, inputs, outputs, aliases, capability(), dynamic)
    module: Any
    key: Any
    if (jobs := _collected.value) is not None:
        jobs.append(job)
        module, key = _Later(job, False), _Later(job, True)
    else:
        try:
            module = cute_cache.module(job)
        except cute_cache.Uncompiled as error:
            if cute_cache.settings.strict or not dispatch.choosing():
                raise
            cute_cache.note_fallback(job, error)
            raise dispatch.Declined(textwrap.shorten(f"could not be compiled: {error}", 200)) from error
        key = cute_cache.digest(module)
    present = [i for i, x in enumerate(inputs) if x is not None]
    operands = [
        whole(x) if i in aliases or (i not in pools and keeps_aligned(x)) else x
        for i, x in enumerate(inputs)
        if x is not None
    ]
    axes = frozenset[Any]().union(*(_axes(x) for x in operands))
    results = jax.ffi.ffi_call(
        enable(),
        list(outputs),
        has_side_effect=keeping(),
        input_output_aliases={present.index(i): o for i, o in aliases.items()},
    )(*(_over(x, axes) for x in operands), module=module, key=key)
    results = [_over(x, axes) for x in results]
    return tuple(whole(x) if i in aliases.values() or keeps_aligned(x) else x for i, x in enumerate(results))


def _axes(x: jax.Array) -> frozenset[Any]:
    """The axes of ``jax.shard_map`` over which an array counts as different."""
    return jax.typeof(x).manual_axis_type.varying


def _over(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = tuple(axes - _axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

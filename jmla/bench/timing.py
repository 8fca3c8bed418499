"""Device time of one call of a function, from chains of calls inside one compiled program.

The program calls the function on one input set after another (together larger than the L2 cache where that is asked
for). The profiler says when the first kernel of the program began and the last one ended; that span, gaps between
kernels included, divided by the number of calls is the time of a call. What the host takes to launch does not count as
long as it keeps ahead of the device, which ``XLA_FLAGS`` are for.
"""

import contextlib
import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jmla.kernels import launch

# Kernels launched by custom calls become part of CUDA graphs, as in serving; must be in XLA_FLAGS before JAX starts.
XLA_FLAGS = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"

L2_BYTES = 64 << 20  # more than the L2 cache of an H200 holds


def chained(fn: Callable[..., Any], calls: int, *, kernels: bool) -> Callable[..., Any]:
    """A function of input sets that calls ``fn`` on them in turn, ``calls`` times one behind the other.

    With ``kernels`` every launch of a kernel is kept in the program. Plain XLA operations have no such mark: there each
    call's first floating-point input is made to depend on the result before it, at the cost of one pass over it.
    """

    def run(sets: Sequence[Any], shared: Any) -> Any:
        last = None
        for i in range(calls):
            inputs = sets[i % len(sets)]
            if last is not None and not kernels:
                inputs = _depending(inputs, jax.tree.leaves(last)[0].ravel()[0])
            with launch.kept() if kernels else contextlib.nullcontext():
                last = fn(*inputs, *shared)
        return last

    return run


def _depending(inputs: Any, value: jax.Array) -> Any:
    leaves, tree = jax.tree.flatten(inputs)
    at = next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating))
    nothing = jax.lax.optimization_barrier(value.astype(jnp.float32) * 0)
    leaves[at] = leaves[at] + jnp.where(jnp.isnan(nothing), 0, nothing).astype(leaves[at].dtype)
    return jax.tree.unflatten(tree, leaves)


def time_call(
    fn: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    shared: tuple[Any, ...] = (),
    *,
    kernels: bool = True,
    calls: int = 40,
    repeats: int = 3,
) -> float:
    """Microseconds of one call ``fn(*inputs, *shared)``, the median of ``repeats`` programs.

    Args:
        fn: traceable.
        sets: input tuples that the calls take in turn.
        shared: inputs that all calls share.
        kernels: whether ``fn`` consists of kernel launches, see ``chained``.
        calls: of a program.
        repeats: how often the program is timed.
    """
    program = jax.jit(chained(fn, calls, kernels=kernels)).lower(list(sets), shared).compile()
    for _ in range(2):
        jax.block_until_ready(program(list(sets), shared))
    spans = [_span(lambda: program(list(sets), shared))[0] for _ in range(repeats)]
    return statistics.median(spans) / calls


def time_update(
    fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]], state: Any, *, calls: int = 40, repeats: int = 3
) -> tuple[float, Any]:
    """As ``time_call`` for ``state = fn(*inputs, state)``, whose state is donated and updated in place.

    Returns:
        Microseconds of one call, and the last state.
    """

    def run(sets: Sequence[Any], state: Any) -> Any:
        for i in range(calls):
            state = fn(*sets[i % len(sets)], state)
        return state

    program = jax.jit(run, donate_argnums=1).lower(list(sets), state).compile()
    for _ in range(2):
        state = jax.block_until_ready(program(list(sets), state))
    spans = []
    for _ in range(repeats):
        span, state = _span(functools.partial(program, list(sets), state))
        spans.append(span)
    return statistics.median(spans) / calls, state


def _span(run: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds from the first to the last moment that the device works on a program, and its result."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = jax.block_until_ready(run())
        begins, ends = [], []
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if "GPU" in plane.name else ():
                    for event in line.events if "Stream" in (line.name or "") else ():
                        begins.append(event.start_ns)
                        ends.append(event.start_ns + event.duration_ns)
    if not begins:
        raise RuntimeError("Expected the profiler to have seen kernels on a GPU, got none")
    return (max(ends) - min(begins)) / 1e3, result

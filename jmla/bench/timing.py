"""Device time of one call of a function, from chains of calls inside one compiled program.

The program calls the function on one input set after another (together larger than the L2 cache where that is asked
for). The profiler says when the first kernel of the program began and the last one ended; that span, gaps between
kernels included, divided by the number of calls is the time of a call. What the host takes to launch does not count as
long as it keeps ahead of the device, which ``XLA_FLAGS`` are for.
"""

import contextlib
import fcntl
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmla.bench.trace import traced
from jmla.kernels import launch

# Kernels launched by custom calls become part of CUDA graphs, as in serving; must be in XLA_FLAGS before JAX starts.
XLA_FLAGS = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"

L2_BYTES = 64 << 20  # more than the L2 cache of an H200 holds

_turns: str | None = None  # file whose lock says which process may use the device


def take_turns(path: str) -> None:
    """From now on this process shares the device with those that name the same file: it is alone while it times."""
    global _turns
    _turns = path


@contextlib.contextmanager
def device(*, alone: bool) -> Iterator[None]:
    """The device is used within, beside other processes or alone."""
    if _turns is None:
        yield
        return
    with open(_turns, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield  # closing the file gives the lock back


def chained(fn: Callable[..., Any], calls: int, *, kernels: bool) -> Callable[..., Any]:
    """A function of input sets that calls ``fn`` on them in turn, ``calls`` times one behind the other.

    With ``kernels`` every launch of a kernel is kept in the program. Plain XLA operations have no such mark: there one
    input of each call, floating-point where there is one, is made to depend on the result before it, at the cost of one
    pass over it.
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
    at = next((i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)), 0)
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
    lowered = jax.jit(chained(fn, calls, kernels=kernels)).lower(list(sets), shared)
    with contextlib.nullcontext() if kernels else device(alone=False):  # XLA tries products out while it compiles
        program = lowered.compile()
    return _span(lambda: program(list(sets), shared), repeats) / calls


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

    with device(alone=False):
        program = jax.jit(run, donate_argnums=1).lower(list(sets), state).compile()

    def again() -> Any:
        nonlocal state
        state = program(list(sets), state)
        return state

    return _span(again, repeats) / calls, state


def _span(run: Callable[[], Any], repeats: int) -> float:
    """Microseconds from the first to the last moment that the device works on ``run()``: the median of warm runs."""
    with device(alone=True):
        for _ in range(2):
            jax.block_until_ready(run())
        runs = [traced(run) for _ in range(repeats)]
    if not all(runs):
        raise RuntimeError("Expected the profiler to have seen kernels on a GPU, got none")
    return statistics.median(
        (max(e.start_ns + e.duration_ns for e in seen) - min(e.start_ns for e in seen)) / 1e3 for seen in runs
    )

"""The compiled steps of an engine: each made when it is first needed, or all of them before anything runs."""

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from jmla.engine.stored import ProgramStore
from jmla.kernels import dispatch, launch_cute

Key = tuple[Any, ...]
Job = tuple[Any, Key, tuple[Any, ...]]  # a jitted function, what its programs differ in, and arguments


class Programs:
    """Programs by function and key.

    Those that ``compile`` has made are called directly; others are left to ``jax.jit``, which makes them on the way.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, Key], Any] = {}

    def run(self, function: Any, key: Key, *args: Any) -> Any:
        """Calls a jitted function; all arguments that give one ``key`` have the same shapes."""
        return self._made.get((function, key), function)(*args)

    def has(self, function: Any, key: Key) -> bool:
        """Whether a program is there, so that calling it neither traces nor compiles."""
        return (function, key) in self._made

    def compile(self, jobs: Sequence[Job], workers: int | None, progress: bool) -> None:
        """Loads or compiles what is not there yet; executes nothing, donates nothing.

        Args:
            jobs: the programs.
            workers: threads, and processes for CuTe DSL kernels; None for as many as fit.
            progress: whether a bar is drawn.
        """
        jobs = [job for job in jobs if job[:2] not in self._made]
        store = ProgramStore.open()
        names = [store.name(*job) if store else "" for job in jobs]
        bar = Progress(console=Console(stderr=True), disable=not progress, transient=True)
        threads = concurrent.futures.ThreadPoolExecutor(default_workers() if workers is None else workers)
        with _everything_is_cached(), bar, threads as pool:
            task = bar.add_task("Compiling", total=len(jobs))
            stored = pool.map(store.load, names) if store else [None] * len(jobs)
            missing = []
            for job, name, program in zip(jobs, names, stored, strict=True):
                if program is None:
                    missing.append((job, name))
                else:
                    self._made[job[:2]] = program
                    bar.advance(task)
            # Tracing holds Python's lock and follows this thread's contexts, so that it goes ahead here. Lowering
            # compiles kernels, and goes to the threads with what follows; CuTe DSL kernels are there before.
            waiting: dict[concurrent.futures.Future[Any], Any] = {}
            behind = []
            with _listed_kernels() as kernels:
                for (fn, key, args), name in missing:
                    before = len(kernels)
                    with dispatch.noting() as choices:
                        traced = fn.trace(*args)
                    if len(kernels) > before:
                        behind.append(((fn, key, args), name, traced, choices))
                    else:
                        waiting[pool.submit(_finish, traced, store, name, choices)] = fn, key
            failed = bool(kernels) and _make_kernels(kernels, workers)
            for (fn, key, args), name, traced, choices in behind:
                if failed:  # other implementations are to serve, which is for today only
                    waiting[pool.submit(_finish, fn.trace(*args), None, name, choices)] = fn, key
                else:
                    waiting[pool.submit(_finish, traced, store, name, choices)] = fn, key
            for done in concurrent.futures.as_completed(waiting):
                self._made[waiting[done]] = done.result()
                bar.advance(task)


def _listed_kernels() -> contextlib.AbstractContextManager[list[Any]]:
    """Inside it, tracing lists CuTe DSL kernels rather than compiling them, where there may be any."""
    may_be = dispatch.current_target().platform in (None, "cuda")
    return launch_cute.collecting() if may_be else contextlib.nullcontext([])


def _make_kernels(kernels: Sequence[Any], workers: int | None) -> bool:
    """Has processes compile what there is not yet; whether some of it failed."""
    from jmla.kernels import cute_workers

    return bool(cute_workers.warm(kernels, workers))


def _finish(traced: Any, store: ProgramStore | None, name: str, choices: Sequence[dispatch.Choice]) -> Any:
    program = traced.lower().compile()
    if store is not None:
        store.save(name, program, choices)
    return program


def default_workers() -> int:
    """Threads that compile at a time."""
    return min(os.cpu_count() or 1, 16)


@contextlib.contextmanager
def _everything_is_cached() -> Iterator[None]:
    """Inside it JAX's persistent compilation cache, where one is set up, takes programs that compile quickly too."""
    names = ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name in names:
            jax.config.update(name, 0)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)

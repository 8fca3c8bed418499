"""The compiled steps of an engine: each made when it is first needed, or all of them before anything runs."""

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

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

    def compile(self, jobs: Sequence[Job], workers: int, progress: bool) -> None:
        """Compiles what is not there yet, in ``workers`` threads; nothing is executed, and no argument is donated."""
        jobs = [job for job in jobs if job[:2] not in self._made]
        bar = Progress(console=Console(stderr=True), disable=not progress, transient=True)
        with _everything_is_cached(), bar, concurrent.futures.ThreadPoolExecutor(workers) as pool:
            task = bar.add_task("Compiling", total=len(jobs))
            # Tracing holds Python's lock, so that it goes ahead of the compiler here.
            waiting = {pool.submit(fn.lower(*args).compile): (fn, key) for fn, key, args in jobs}
            for done in concurrent.futures.as_completed(waiting):
                self._made[waiting[done]] = done.result()
                bar.advance(task)


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

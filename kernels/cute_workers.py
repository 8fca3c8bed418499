"""Worker processes that compile CuTe DSL kernels ahead of their use."""

import contextlib
import os
import pickle
import queue
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import cute_cache

WORKERS_A_PROCESS = 4  # at most, unless a number is asked for
WORKERS_A_HOST = 16
ATTEMPTS = 2  # at a kernel whose worker ends by itself
WORK = "from jmla.kernels import cute_workers; cute_workers.work()"

Waiting = queue.SimpleQueue[tuple[cute_cache.Job, bytes, int]]  # kernels, what is sent to workers of them, attempts


def warm(jobs: Iterable[cute_cache.Job], workers: int | None = None) -> dict[cute_cache.Job, str]:
    """Compiles the kernels that are neither in memory nor in the directory, in worker processes.

    A worker that ends before its kernel is done is replaced, and the kernel tried once more; one that takes too long is
    ended. What failed is not tried again by ``module``.

    Args:
        jobs: such as ``launch_cute.collecting`` lists.
        workers: processes, however many; None for what the settings say.

    Returns:
        For each kernel that there is none of, the reason.
    """
    missing = [job for job in dict.fromkeys(jobs) if not cute_cache.known(job)]
    if missing and not cute_cache.settings.compiling:
        return dict.fromkeys(missing, "compiling is off (compiling=False)")
    random.Random(os.getpid()).shuffle(missing)  # processes that start together begin at different ends
    waiting: Waiting = queue.SimpleQueue()
    for job in missing:
        waiting.put((job, pickle.dumps(job), 1))
    asked = cute_cache.settings.workers if workers is None else workers
    count = min(len(missing), asked or min(WORKERS_A_PROCESS, os.cpu_count() or 1))
    reasons: dict[cute_cache.Job, str] = {}
    threads = [threading.Thread(target=_serve, args=(waiting, reasons, asked is None)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cute_cache.failed.update((job.key, reason) for job, reason in reasons.items())
    return reasons


def _serve(waiting: Waiting, reasons: dict[cute_cache.Job, str], shared: bool) -> None:
    """Has one worker at a time compile what waits."""
    with contextlib.ExitStack() as stack:
        if shared:
            folder = Path(tempfile.gettempdir()) / f"jmla-compiling-{os.getuid()}"
            cute_cache.lock_one(stack, [folder / str(i) for i in range(WORKERS_A_HOST)], float("inf"))
        worker: subprocess.Popen[bytes] | None = None
        while not waiting.empty():
            with contextlib.suppress(queue.Empty):
                job, sent, attempt = waiting.get_nowait()
                with cute_cache.locked(job):
                    if cute_cache.known(job):  # another process was faster
                        continue
                    if worker is None or worker.poll() is not None:
                        worker = stack.enter_context(_worker())
                    reason = _ask(worker, job, sent)
                if reason is None and attempt < ATTEMPTS:
                    waiting.put((job, sent, attempt + 1))
                elif reason != "":
                    reasons[job] = reason or f"the worker process ended {attempt} times while it compiled"


@contextlib.contextmanager
def _worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs ``work`` and sees no GPU."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
    )
    with contextlib.suppress(BrokenPipeError), worker:  # which may say at its end that nobody listens
        try:
            yield worker
        finally:
            worker.kill()


def _ask(worker: subprocess.Popen[bytes], job: cute_cache.Job, sent: bytes) -> str | None:
    """Has a worker compile a kernel, and keeps it.

    Returns:
        Nothing (""), or why not; None where the worker ended by itself.
    """
    into, out = worker.stdin, worker.stdout
    if into is None or out is None:
        raise ValueError(f"Expected {worker=} to have pipes to ask by and to answer by")
    late, seconds = threading.Event(), cute_cache.settings.timeout

    def end() -> None:
        late.set()
        worker.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        into.write(sent)
        into.flush()
        made, reason = pickle.load(out)
    except (EOFError, OSError, pickle.UnpicklingError):
        worker.kill()
        worker.wait()
        return f"took more than {seconds} s to compile" if late.is_set() else None
    finally:
        timer.cancel()
    if made:
        cute_cache.keep(job, made)
    return reason


def work() -> None:
    """What a worker process does: compiles the jobs that come in, and sends each kernel, or why there is none."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    while True:
        try:
            answer = cute_cache.compile_here(pickle.load(sys.stdin.buffer)), ""
        except EOFError:
            return
        except Exception as error:
            answer = b"", cute_cache.reason_of(error)
        pickle.dump(answer, answers)
        answers.flush()

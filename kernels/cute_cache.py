"""Compiled CuTe DSL kernels, in memory and in a directory that processes share.

What is kept of a kernel is the object file that XLA's FFI target takes: the launcher for the host with the GPU's binary
in it. A file of the directory is a line that names the format, the SHA-256 of the rest, and the rest; it appears under
its name at once, and one that is not whole counts as none.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import platform
import re
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .launch import keeps_aligned

logger = logging.getLogger("jmla.kernels")

FORMAT = b"jmla-cute 1\n"  # of files; a change of it leaves older ones unread
_ARCHITECTURES = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a"}


class Uncompiled(RuntimeError):
    """There is no compiled kernel, and none was made."""


def _default_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jmla" / "cute"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How kernels come to be.

    Attributes:
        directory: where they are kept, shared by processes; None keeps them in memory only. Its files are run: no
            one else should be able to write into it.
        compiling: whether kernels that are not there are compiled; else they are refused.
        strict: whether a kernel that cannot be compiled is an error, where another implementation could serve.
        workers: processes that compile at a time in ``warm``; None for at most 4, and 16 of all processes of the host.
        timeout: seconds that a worker may take for a kernel, and that a process waits for another one to make it.
    """

    directory: Path | None = dataclasses.field(default_factory=_default_directory)
    compiling: bool = True
    strict: bool = False
    workers: int | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"Expected {self.workers=} to be at least 1, or None")
        if not self.timeout > 0:
            raise ValueError(f"Expected {self.timeout=} to be positive")


settings = Settings()


def configure(**changes: Any) -> Settings:
    """Changes the settings of the process; returns the former ones."""
    global settings
    former, settings = settings, dataclasses.replace(settings, **changes)
    return former


@dataclasses.dataclass(frozen=True)
class Operand:
    """Shape, dtype and alignment in bytes of a tensor; an axis whose size is left to the run has size 0."""

    shape: tuple[int, ...]
    dtype: str
    align: int


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel to compile; see ``launch_cute.call``.

    Attributes:
        build: "module:name" of the function that gives the launcher.
        profile: its argument.
        inputs: None for one that the kernel goes without.
        outputs: those that replace inputs included.
        aliases: pairs of input and output.
        capability: compute capability.
        dynamic: whether leading axes are left to the run.
    """

    build: str
    profile: Hashable
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    aliases: tuple[tuple[int, int], ...]
    capability: int
    dynamic: bool

    @classmethod
    def of(
        cls,
        build: Callable[[Any], Any],
        profile: Hashable,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        aliases: Mapping[int, int],
        capability: int,
        dynamic: bool,
    ) -> "Job":
        """The job of a call; inputs and outputs are arrays or their shapes."""
        if isinstance(profile, type) or not dataclasses.is_dataclass(profile):
            raise TypeError(f"Expected {profile=} to be a dataclass, whose repr names every field")
        if "<" in build.__qualname__:
            raise ValueError(f"Expected {build=} to be a function of a module, which other processes can import")

        def operand(x: Any, replaced: bool) -> Operand:
            shape, dtype = tuple(x.shape), x.dtype
            aligned = replaced or keeps_aligned(x)
            return Operand((0, *shape[1:]) if dynamic else shape, dtype.name, 16 if aligned else dtype.itemsize)

        return cls(
            f"{build.__module__}:{build.__qualname__}",
            profile,
            tuple(None if x is None else operand(x, i in aliases) for i, x in enumerate(inputs)),
            tuple(operand(x, i in aliases.values()) for i, x in enumerate(outputs)),
            tuple(sorted(aliases.items())),
            capability,
            dynamic,
        )

    def __str__(self) -> str:
        return f"{self.build} for {self.architecture}"

    @property
    def architecture(self) -> str:
        return _ARCHITECTURES.get(self.capability, f"sm_{self.capability}")

    def function(self) -> Callable[[Any], Any]:
        """``build`` itself."""
        module, _, names = self.build.partition(":")
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        return found

    @functools.cached_property
    def key(self) -> str:
        """Names the kernel among those of all versions."""
        environment = sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_"))
        described = dataclasses.replace(self, profile=None), repr(self.profile)
        text = repr((FORMAT, _versions(), environment, _sources(self.build.partition(":")[0]), described))
        return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    names = ("nvidia-cutlass-dsl", "jax", "jaxlib")
    return (*(importlib.metadata.version(name) for name in names), platform.python_version(), platform.machine())


@functools.cache
def _sources(module: str) -> str:
    """A digest of what a kernel of a module may be made of: its file, and all of this package."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    if found := getattr(importlib.import_module(module), "__file__", None):
        files.append(Path(found))
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1024)
def digest(module: bytes) -> bytes:
    """By which the FFI target tells kernels apart."""
    return hashlib.sha256(module).digest()


_memory: dict[str, bytes] = {}
failed: dict[str, str] = {}
_said: set[str] = set()
_compiling = threading.RLock()  # CuTe DSL compiles one kernel at a time


def forget() -> None:
    """Forgets kernels and failures of this process; what the directory holds stays."""
    for known in (_memory, failed, _said):
        known.clear()


def note_fallback(job: Job, error: Uncompiled) -> None:
    """Says once for each kernel why another implementation serves."""
    _say(f"Another implementation serves instead of {job}: {error}", job.key)


def _say(message: str, key: str = "") -> None:
    if (key or message) not in _said:
        _said.add(key or message)
        logger.warning("%s", message)


def module(job: Job) -> bytes:
    """The object file of a kernel: from memory, else from the directory, else compiled here.

    Raises:
        Uncompiled: it cannot be compiled, or is not to be.
    """
    if found := known(job):
        return found
    if reason := failed.get(job.key):
        raise Uncompiled(reason)
    if not settings.compiling:
        where = settings.directory or "memory"
        raise Uncompiled(f"compiling is off (compiling=False), and {where} holds no {job}; warm it up where it is on")
    with _compiling, locked(job):
        if found := known(job):  # another thread or process was faster
            return found
        try:
            made = compile_here(job)
        except Exception as error:
            failed[job.key] = reason_of(error)
            raise Uncompiled(failed[job.key]) from error
        keep(job, made)
        return made


def reason_of(error: Exception) -> str:
    """One line, without the colours of terminals."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())}"


def known(job: Job) -> bytes | None:
    found = _memory.get(job.key) or _read(job)
    if found:
        _memory[job.key] = found
        failed.pop(job.key, None)
    return found


def _file(job: Job) -> Path | None:
    return None if settings.directory is None else Path(settings.directory) / f"{job.key}.bin"


def _read(job: Job) -> bytes | None:
    if (file := _file(job)) is None:
        return None
    try:
        content = file.read_bytes()
    except OSError:
        return None
    stated, rest = content[len(FORMAT) : len(FORMAT) + 32], content[len(FORMAT) + 32 :]
    if content.startswith(FORMAT) and rest and hashlib.sha256(rest).digest() == stated:
        return rest
    _say(f"{file} is not whole, and is made again")
    return None


def keep(job: Job, made: bytes) -> None:
    _memory[job.key] = made
    if (file := _file(job)) is None:
        return
    scratch = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with scratch.open("xb") as stream:
                stream.write(FORMAT + hashlib.sha256(made).digest() + made)
                stream.flush()
                os.fsync(stream.fileno())
            scratch.replace(file)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        _say(f"Compiled kernels are not kept: {error}", str(file.parent))


@contextlib.contextmanager
def locked(job: Job) -> Iterator[None]:
    """Keeps other processes from compiling the same kernel; without a lock where there can be none."""
    file = _file(job)
    with contextlib.ExitStack() as stack:
        if file is not None:
            lock_one(stack, [file.with_suffix(".lock")], settings.timeout)
        yield


def lock_one(stack: contextlib.ExitStack, files: Sequence[Path], seconds: float) -> None:
    """Locks one of the files until the stack is closed; gives up after a while, or where files cannot be locked."""
    deadline = time.monotonic() + seconds
    while True:
        for file in files:
            try:
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                stream = file.open("ab")
            except OSError:
                return
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.close()
                continue
            except OSError:
                stream.close()
                return
            stack.enter_context(stream)  # closing it ends the lock, as the end of the process does
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def compile_here(job: Job) -> bytes:
    """Compiles a kernel in this process, on any machine."""
    import jax
    from cutlass.cutlass_dsl.cutlass import CuTeDSL
    from cutlass.jax.compile import Arg, FunctionSpec, get_or_compile_kernel
    from cutlass.jax.types import TensorSpec

    def argument(index: int, x: Operand) -> Any:
        ones = (1,) * len(x.shape) if job.dynamic else None
        order = tuple(reversed(range(len(x.shape))))
        spec = TensorSpec(layout=order, static=not job.dynamic, ptr_assumed_align=x.align, divisibility=ones)
        return Arg(index, x.shape, jax.numpy.dtype(x.dtype), spec)

    def flat(arguments: Iterable[Any]) -> tuple[tuple[Any, ...], Any]:
        leaves, tree = jax.tree.flatten(tuple(arguments), is_leaf=lambda x: isinstance(x, Arg))
        return tuple(leaves), tree

    numbers = iter(range(len(job.inputs)))
    ins, in_tree = flat(None if x is None else argument(next(numbers), x) for x in job.inputs)
    outs = tuple(argument(i, x) for i, x in enumerate(job.outputs))
    replacing = dict(job.aliases)
    _, out_tree = flat(x for x in outs if x.idx not in replacing.values())
    present = [i for i, x in enumerate(job.inputs) if x is not None]
    aliases = tuple((present.index(i), o) for i, o in job.aliases)
    specs = tuple(x.spec for x in ins), tuple(x.spec for x in outs)
    spec = FunctionSpec(ins, in_tree, outs, out_tree, aliases, *specs, None, not job.dynamic, ())
    with _compiling, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This static loop has")  # which is meant to be unrolled
        dsl = CuTeDSL._get_dsl()
        dsl.envar.arch = job.architecture
        try:
            made = get_or_compile_kernel(job.function()(job.profile), spec, compile_key=job.key)
        finally:
            del dsl.envar.arch  # which is then again that of the environment
    return bytes(made.module)

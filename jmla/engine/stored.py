"""Compiled programs on disk, so that a second start neither traces, lowers nor compiles anything.

JAX's persistent compilation cache spares the compiler alone: to ask it, a program has to be traced and lowered first,
and that is most of a start where kernels are many. Here a program is found by what it is made from: this package's
sources, the versions of the compilers, the device, JAX's options, and the function's arguments up to their values.
What cannot be read is compiled again. Files are pickles, as in JAX: a directory that others can write is not for them.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import pickle
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jmla.kernels import checks, dispatch, launch_cute

logger = logging.getLogger("jmla.engine")

FOLDER = "jmla-programs"
PACKAGES = ("jax", "jaxlib", "flax", "jax-triton", "triton", "nvidia-cutlass-dsl", "tokamax", "ml-dtypes")
PARTS = ("jax-cuda", "nvidia-")  # how the names of a GPU's plugins and libraries begin
# Modules that compiled programs may need where they were imported, and what makes such programs loadable elsewhere.
CALLED: dict[str, Callable[[], Any]] = {
    "jax_triton": functools.partial(importlib.import_module, "jax_triton"),
    "cutlass.jax": launch_cute.enable,
    "tokamax": functools.partial(importlib.import_module, "tokamax"),
}
ELSEWHERE = r"_cache|^jax_log_|_logging_|_dir$|_dump_|_mock_|_timeout_"  # JAX's options that change no program
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JMLA_DISABLE", "CUTE_DSL_", "TRITON_", "JAX_TRITON_")  # beginnings
OBJECTS = b"\x7fELF", b"\xcf\xfa\xed\xfe"  # how machine code for a CPU begins: Linux, macOS
DIGEST = 32  # bytes in front of a file's content


def _read_sources() -> str:
    """A hash of the package's sources as they are now."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for folder in (root, root / "kernels", root / "models"):  # links, which rglob does not follow
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()


SOURCES = _read_sources()  # as they were imported, or will be: where they have changed since, nothing is stored


@functools.cache
def _versions() -> str:
    """Of what compiles, and of the machine's processor."""
    found = [sys.version, platform.machine()]
    for package in importlib.metadata.distributions():
        name = (package.name or "").lower()
        if name in PACKAGES or name.startswith(PARTS):
            found.append(f"{name} {package.version}")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        found += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return "\n".join(sorted(found))


def _options() -> list[tuple[str, str]]:
    """What may change a program beside its arguments."""
    config = [(name, str(getattr(jax.config, name, value))) for name, value in jax.config.values.items()]
    config = [pair for pair in config if not re.search(ELSEWHERE, pair[0])]
    return sorted(config) + sorted(pair for pair in os.environ.items() if pair[0].startswith(ENVIRONMENT))


def _device(args: Any) -> str:
    devices = sorted({d for x in jax.tree.leaves(args) if isinstance(x, jax.Array) for d in x.devices()}, key=str)
    kinds = [(str(d), d.device_kind, getattr(d, "compute_capability", "")) for d in devices]
    return f"{kinds} {[d.client.platform_version for d in devices[:1]]}"


def _is_whole(program: Any, serialized: bytes) -> bool:
    """Whether a program can be run from what it was serialized to.

    XLA's CPU programs keep their machine code only where they were compiled: one that was loaded, as from JAX's
    persistent compilation cache, is serialized without it, and then fails when it is loaded or called. Those of a GPU
    keep it. Nothing else tells where a program is from: JAX keeps loaded ones in memory too.
    """
    on_cpu = program.runtime_executable().client.platform == "cpu"
    return not on_cpu or any(beginning in serialized for beginning in OBJECTS)


class ProgramStore:
    """Programs in a directory."""

    def __init__(self, directory: Path):
        self._directory = directory

    @classmethod
    def open(cls) -> "ProgramStore | None":
        """Beside JAX's persistent compilation cache; None where that is not set up, is remote, or checks are on."""
        place = jax.config.jax_compilation_cache_dir
        if not place or "://" in place or not jax.config.jax_enable_compilation_cache or checks.checking():
            return None
        return cls(Path(place) / FOLDER)

    def name(self, function: Any, key: tuple[Any, ...], args: tuple[Any, ...]) -> str:
        """Names a program by all that it is made from; "" for one that another process would not find."""
        leaves, tree = jax.tree.flatten(args)
        shapes = [
            (x.shape, str(x.dtype), bool(getattr(x, "weak_type", False)), str(getattr(x, "sharding", "")))
            for x in leaves
        ]
        target = dispatch.current_target()
        if re.search(r" at 0x[0-9a-f]+", str(tree)):
            logger.warning("%s is not stored: static parts of its arguments are known by address", function.__name__)
            return ""
        made_from = SOURCES, _versions(), _options(), target, _device(args)
        parts = *made_from, function.__module__, function.__qualname__, key, str(tree), shapes
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def load(self, name: str) -> Any:
        """The program, or None if it is not there or cannot be used; the choices of kernels are noted as made."""
        if not name:
            return None
        path = self._directory / name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        try:
            if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
                raise ValueError("it is not what was written")
            program, modules, choices = pickle.loads(content[DIGEST:])
            for module in modules:
                CALLED[module]()
            loaded = serialize_executable.deserialize_and_load(*program)
        except Exception as error:  # of whatever kind: it is compiled again, and written anew
            logger.warning("A stored program cannot be used and is compiled again: %s: %s", path, error)
            return None
        dispatch.note(choices)
        return loaded

    def save(self, name: str, program: Any, choices: Sequence[dispatch.Choice] = ()) -> None:
        """Writes a program, whole or not at all; where it cannot, that is logged.

        One that has lost its machine code is not written: each start takes it from JAX's cache, where it came from.

        Args:
            name: as ``name`` gives it.
            program: compiled.
            choices: of kernels, that were made when it was traced.
        """
        if not name or _read_sources() != SOURCES:
            return
        modules = [module for module in CALLED if module in sys.modules]
        written = None
        try:
            serialized = serialize_executable.serialize(program)
            if not _is_whole(program, serialized[0]):
                return
            content = pickle.dumps((serialized, modules, list(choices)))
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                written = file.name
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(written, self._directory / name)
        except Exception as error:  # a full or read-only disk, or no form to be written in
            logger.warning("A compiled program could not be stored in %s: %s", self._directory, error)
            if written is not None:
                with contextlib.suppress(OSError):
                    os.unlink(written)

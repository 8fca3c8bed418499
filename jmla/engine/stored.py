"""Compiled programs on disk, so that a second start neither traces, lowers nor compiles anything.

JAX's persistent compilation cache spares the compiler alone: to ask it, a program has to be traced and lowered first,
and that is most of a start where kernels are many. Here a program is found by what it is made from: this package's
sources, the versions of the compilers, the device, JAX's options, and the function's arguments up to their values.
What cannot be read is compiled again. Files are pickles, as in JAX: a directory that others can write is not for them.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jmla.kernels import checks, dispatch, launch_cute

logger = logging.getLogger("jmla.engine")

FOLDER = "jmla-programs"
PACKAGES = ("jax", "jaxlib", "flax", "jax-triton", "triton", "nvidia-cutlass-dsl", "tokamax", "ml-dtypes")
# Modules that compiled programs may need where they were imported, and what makes such programs loadable elsewhere.
CALLED: dict[str, Callable[[], Any]] = {
    "jax_triton": functools.partial(importlib.import_module, "jax_triton"),
    "cutlass.jax": launch_cute.enable,
    "tokamax": functools.partial(importlib.import_module, "tokamax"),
}
ELSEWHERE = ("cache", "log", "dir", "mock", "timeout")  # parts of names of JAX's options that change no program
DIGEST = 32  # bytes in front of a file's content


@functools.cache
def _sources() -> str:
    """A hash of the package's sources, and the versions of what compiles them."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for folder in (root, root / "kernels", root / "models"):  # links, which rglob does not follow
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    for name in PACKAGES:
        try:
            found.update(f"{name} {importlib.metadata.version(name)}\n".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return found.hexdigest() + sys.version


def _options() -> list[tuple[str, str]]:
    """What may change a program beside its arguments."""
    config = [(name, str(getattr(jax.config, name, value))) for name, value in jax.config.values.items()]
    config = [pair for pair in config if not any(part in pair[0] for part in ELSEWHERE)]
    names = {"XLA_FLAGS", "LIBTPU_INIT_ARGS", "JMLA_DISABLE"} | {n for n in os.environ if n.startswith("CUTE_DSL_")}
    return sorted(config) + [(name, os.environ.get(name, "")) for name in sorted(names)]


def _device(args: Any) -> str:
    places = {str(x.sharding) for x in jax.tree.leaves(args) if isinstance(x, jax.Array)}
    devices = sorted({d for x in jax.tree.leaves(args) if isinstance(x, jax.Array) for d in x.devices()}, key=str)
    kinds = [(str(d), d.device_kind, getattr(d, "compute_capability", "")) for d in devices]
    return f"{sorted(places)} {kinds} {[d.client.platform_version for d in devices[:1]]}"


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
        shapes = [(x.shape, str(x.dtype), bool(getattr(x, "weak_type", False))) for x in leaves]
        target = dispatch.current_target()
        if re.search(r" at 0x[0-9a-f]+", str(tree)):
            logger.warning("%s is not stored: static parts of its arguments are known by address", function.__name__)
            return ""
        parts = (_sources(), _options(), function.__module__, function.__qualname__, key, target, _device(args))
        return hashlib.sha256(repr((*parts, str(tree), shapes)).encode()).hexdigest()

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

    def save(self, name: str, program: Any) -> None:
        """Writes a program, whole or not at all; where it cannot, that is logged."""
        if not name:
            return
        modules = [module for module in CALLED if module in sys.modules]
        try:
            content = pickle.dumps((serialize_executable.serialize(program), modules, list(dispatch.report())))
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, self._directory / name)
        except Exception as error:  # a full or read-only disk, or no form to be written in
            logger.warning("A compiled program could not be stored in %s: %s", self._directory, error)

"""Safetensors files: headers, and tensors as NumPy views of the mapped file.

Format: eight bytes with the length of the header (little-endian), the header (JSON: name -> dtype, shape and offsets
into what follows it), and the data.

The safetensors library is not used to read: its NumPy interface raises on the FP8 and E8M0 dtypes (as of 0.8), for
which NumPy has no names, and it hands out copies where a loader needs rows of the mapped file to dequantise into place.
Views here go through ml_dtypes.
"""

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jmla.models.checkpoint.errors import listed
from jmla.models.config.files import parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NAME_LIMIT = 255  # bytes, of file systems
HEADER_LIMIT = 1 << 30  # bytes; the largest published header has some ten million

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
BITS = {code: 8 * np.dtype(dtype).itemsize for code, dtype in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class HeaderError(ValueError):
    """A file that is not a whole safetensors file."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        name: as in the file.
        code: safetensors' name of the dtype.
        shape: as in the file; that of F4 counts values, two a byte.
        file: where it lies, from byte ``start`` to ``stop``.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file.

    Raises:
        HeaderError: truncated, or contradicting itself.
        OSError: the file cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        if len(first) < 8:
            raise HeaderError(f"{size} bytes are too few for a safetensors file")
        (length,) = struct.unpack("<Q", first)
        if length > min(HEADER_LIMIT, size - 8):
            raise HeaderError(f"a header of {length} bytes in a file of {size}: truncated, or not safetensors")
        text = stream.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise HeaderError(f"a header that cannot be read as JSON ({error})") from error
    if not isinstance(header, dict):
        raise HeaderError("a header that is not an object")
    header.pop("__metadata__", None)
    base, out = 8 + length, {}
    for name, entry in header.items():
        out[name] = _entry(file, name, entry, base)
    position = base
    for stored in sorted(out.values(), key=lambda s: (s.start, s.stop)):
        if stored.start != position:
            raise HeaderError(f"tensors that overlap or leave a gap at {stored.name}")
        position = stored.stop
    if position != size:
        raise HeaderError(f"{size} bytes where its header describes {position}: truncated, or damaged")
    return out


def _entry(file: Path, name: str, entry: Any, base: int) -> Stored:
    try:
        code, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop)) and isinstance(code, str)
    except (TypeError, KeyError, ValueError) as error:
        raise HeaderError(f"no dtype, shape and offsets of {name}") from error
    if not whole or stop < start:
        raise HeaderError(f"no dtype, shape and offsets of {name}")
    if code in BITS and 8 * (stop - start) != BITS[code] * prod(shape):
        raise HeaderError(f"{stop - start} bytes for {name}, {code} {list(shape)}")
    return Stored(name, code, shape, file, base + start, base + stop)


def _is_name(file: str) -> bool:
    """Whether a string can name a file in a directory, and leads nowhere else."""
    try:
        encoded = os.fsencode(file)
    except UnicodeEncodeError:
        return False
    return Path(file).name == file and file not in ("", "..") and b"\0" not in encoded and len(encoded) <= NAME_LIMIT


class Checkpoint:
    """The tensors of a checkpoint directory: a single file, or shards and their index.

    Args:
        path: the directory.

    Attributes:
        tensors: by name.
        problems: what is wrong with the files.
        lost: names of tensors that the index promises but no readable file has.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self.problems: list[str] = []
        self.lost: set[str] = set()
        self._maps: dict[Path, mmap.mmap] = {}
        if (path / INDEX).is_file():
            self._read_shards()
            return
        files = sorted(path.glob("*.safetensors"))
        if (path / SINGLE) in files:
            files = [path / SINGLE]
        if not files:
            self.problems.append(f"no {SINGLE}, {INDEX} or other *.safetensors file in {path}")
        elif len(files) > 1:
            self.problems.append(f"{len(files)} *.safetensors files but no {INDEX} that tells what they hold")
        else:
            self.tensors = self._header(files[0]) or {}

    def _header(self, file: Path) -> dict[str, Stored] | None:
        try:
            return read_header(file)
        except HeaderError as error:
            self.problems.append(f"file {file.name}: {error}")
        except OSError as error:
            self.problems.append(f"file {file.name}: cannot be read ({error.strerror or error})")
        return None

    def _weight_map(self) -> dict[str, str]:
        """Tensor to file names of the index; empty, with a problem noted, if it has none."""
        try:
            index = parse_json((self.path / INDEX).read_bytes())
        except ValueError as error:
            self.problems.append(f"file {INDEX}: cannot be read as JSON ({error})")
        except OSError as error:
            self.problems.append(f"file {INDEX}: cannot be read ({error.strerror or error})")
        else:
            found = index.get("weight_map") if isinstance(index, dict) else None
            if isinstance(found, dict) and found and all(isinstance(file, str) for file in found.values()):
                return found
            self.problems.append(f"file {INDEX}: no JSON object with a weight_map from tensor to file names")
        return {}

    def _read_shards(self) -> None:
        weight_map = self._weight_map()
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(file, []).append(name)
        for file, names in sorted(by_file.items()):
            header = None
            if not _is_name(file):
                self.problems.append(f"file {file!r}: not the name of a file beside {INDEX}")
            elif not (self.path / file).exists():
                self.problems.append(f"file {file}: missing")
            else:
                header = self._header(self.path / file)
            held = header or {}
            absent = [name for name in names if name not in held]
            if header is None:
                self.problems[-1] += f"; the index says that it holds {listed(absent)}"
            elif absent:
                self.problems.append(f"file {file}: lacks {listed(absent)} that the index says it holds")
            self.lost.update(absent)
            self.tensors |= {name: held[name] for name in names if name in held}
            for name, stored in held.items():
                other = stored if name in weight_map else self.tensors.setdefault(name, stored)
                if other is not stored:
                    self.problems.append(f"{name}: in {file} and in {other.file.name}, but not in the index")

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]

    def view(self, stored: Stored) -> np.ndarray:
        """The tensor as a read-only array over the mapped file; F4 as its bytes, ``[..., n / 2]`` uint8.

        Raises:
            TypeError: a dtype that NumPy and ml_dtypes lack.
        """
        shape, dtype = stored.shape, np.dtype(np.uint8)
        if stored.code == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        elif stored.code in DTYPES:
            dtype = np.dtype(DTYPES[stored.code])
        else:
            raise TypeError(f"Expected {stored.name} to have one of the dtypes {', '.join(DTYPES)}, got {stored.code}")
        if stored.nbytes == 0:
            return np.empty(shape, dtype)
        raw = np.frombuffer(self._map(stored.file), np.uint8, stored.nbytes, stored.start)
        if stored.start % dtype.itemsize:  # custom dtypes need aligned data
            raw = raw.copy()
        return raw.view(dtype).reshape(shape)

    def forget(self, stored: Stored | Iterable[Stored]) -> None:
        """Lets the system drop the pages of tensors that have been read, so that only results stay in memory."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for one in (stored,) if isinstance(stored, Stored) else stored:
            start = -(-one.start // mmap.PAGESIZE) * mmap.PAGESIZE  # a page shared with a neighbour stays
            if one.stop - start >= mmap.PAGESIZE:
                length = (one.stop - start) // mmap.PAGESIZE * mmap.PAGESIZE
                self._map(one.file).madvise(mmap.MADV_DONTNEED, start, length)

"""Loading: from a checkpoint in any dialect and number format straight into a model's parameters."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmla.models.checkpoint.dequant import read_rows
from jmla.models.checkpoint.dialects import Names, dialect
from jmla.models.checkpoint.errors import CheckpointError, CheckpointWarning
from jmla.models.checkpoint.places import Placement, placements
from jmla.models.checkpoint.reader import Checkpoint
from jmla.models.checkpoint.resolve import Job, Output, finite, resolve
from jmla.models.config import DsaConfig, V4Config
from jmla.models.options import check_dtype
from jmla.models.params import abstract_params

CHUNK = 1 << 23  # values that are dequantised at a time
ALIGNMENT = 64  # bytes; XLA takes host arrays that begin at a multiple of it as they are, others it copies
WORKERS = 4  # NumPy lets go of the interpreter lock while it converts


@dataclass(frozen=True)
class LoadReport:
    """What was found in a checkpoint.

    Attributes:
        drafting: the draft block is there.
        warnings: what was unusual.
        dialect: "original" (DeepSeek's names), "transformers" or "hybrid".
        formats: tensors by number format: "plain", "integer", "fp8", "fp8_tensor", "fp4", "nvfp4".
    """

    drafting: bool
    warnings: tuple[str, ...]
    dialect: str
    formats: Mapping[str, int]


def load_params(
    path: str | os.PathLike[str],
    config: V4Config | DsaConfig,
    dtype: str = "bfloat16",
    progress: Callable[[int, int], Any] | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Reads a checkpoint directory into the parameters of a model, on the host.

    Weights are dequantised piece by piece from the mapped files into their destinations; no second copy of the whole
    exists at any time. What the model keeps in float32 stays so whatever the stored dtype, and integers stay integers.
    Number formats are decided tensor by tensor, from the stored dtype and the scales beside it.

    Args:
        path: directory with model.safetensors, or shards and model.safetensors.index.json.
        config: as read from the directory's config.json.
        dtype: "bfloat16" or "float32", of all other weights.
        progress: called with the bytes done and the bytes in all.

    Returns:
        The nested dict of arrays that ``jmla.models.params.abstract_params`` describes, aligned for JAX, without the
        draft block if the checkpoint has none; and what was found.

    Raises:
        CheckpointError: lists everything that is missing, unknown, misshapen, damaged or out of range.
        NotADirectoryError: ``path`` is no directory.
        ValueError: an unknown ``dtype``.
    """
    check_dtype(dtype)
    directory = Path(path)
    if not directory.is_dir():
        raise NotADirectoryError(f"Expected {directory} to be a checkpoint directory")
    checkpoint = Checkpoint(directory)
    names = Names(config, placements(config))
    found = resolve(checkpoint, names)
    if found.problems:
        raise CheckpointError(directory, found.problems)
    for message in found.warnings:
        warnings.warn(f"{directory}: {message}", CheckpointWarning, stacklevel=2)
    params = jax.tree.map(lambda x: _empty(x.shape, x.dtype), abstract_params(config, dtype, found.drafting))
    total = sum(part.nbytes for job in found.jobs for part in job.source.parts)
    done, problems = 0, []
    jobs = sorted(found.jobs, key=lambda job: (str(job.source.weight.file), job.source.weight.start))
    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        places = {name: place for name, place in names.places.items() if found.drafting or not place.optional}
        for job, wrong in zip(jobs, pool.map(lambda job: _place(checkpoint, job, places, params), jobs), strict=True):
            problems += wrong
            done += sum(part.nbytes for part in job.source.parts)
            if progress is not None:
                progress(done, total)
    if problems:
        raise CheckpointError(directory, problems)
    formats = Counter(job.source.form for job in found.jobs)
    report = LoadReport(found.drafting, tuple(found.warnings), dialect(config, checkpoint.tensors), dict(formats))
    return params, report


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """As ``np.empty``, which gives large arrays a start 16 bytes into a page, but aligned."""
    size = prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _place(checkpoint: Checkpoint, job: Job, places: Mapping[str, Placement], params: dict[str, Any]) -> list[str]:
    """Reads one source into its destinations; returns what is wrong with its values."""
    sound = [_write(checkpoint, job, output, places[output.name], params) for output in job.outputs]
    checkpoint.forget(job.source.parts)
    return [] if all(sound) else [f"{job.source.weight.name}: NaN or infinite values"]


def _write(checkpoint: Checkpoint, job: Job, output: Output, place: Placement, params: dict[str, Any]) -> bool:
    """Writes one canonical tensor into its destinations, in chunks of rows where those are rows there too."""
    width = int(np.prod(place.shape[1:], dtype=np.int64))
    whole = any(piece.reshape is not None or piece.take is not None for piece in place.pieces)
    rows = output.stop - output.start
    step = rows if whole else max(1, CHUNK // max(width, 1))
    sound = True
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = read_rows(checkpoint, job.source, output.expert, output.start + start, output.start + stop)
        sound = sound and (job.source.form == "integer" or finite(values))
        for piece in place.pieces:
            target: Any = params
            for key in piece.path:
                target = target[key]
            if whole:
                part = values if piece.reshape is None else values.reshape(piece.reshape)
                target[piece.index] = part if piece.take is None else part[piece.take]
            else:
                target[piece.index][start:stop] = values
    return sound

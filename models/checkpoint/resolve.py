"""What each canonical tensor is made of: a checkpoint's tensors, sorted by name and checked without reading weights."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jmla.models.checkpoint.dequant import FP4_GROUP, NVFP4_GROUP, Source, fit_block, read_scales
from jmla.models.checkpoint.dialects import DSPARK, SCALE_NAMES, Names
from jmla.models.checkpoint.reader import DTYPES, Checkpoint, Stored
from jmla.models.config.files import read_object

FLOATS = ("F32", "BF16", "F16", "F64")
INTEGERS = ("I64", "I32", "I16", "U32", "U16", "U64")
PACKED = ("I8", "U8", "F4")
SMALL = 1 << 20  # values of a plain tensor up to which it is read in advance
SINGLE_PRECISION = ("attn_sink", ".ape", "_fn", "_base", "_scale", "gate.bias", "e_score_correction_bias")


class Problem(ValueError):
    """One thing wrong with one tensor."""


@dataclass(frozen=True)
class Output:
    """A canonical tensor inside a source: the whole, or rows ``start..stop`` of one matrix of a fused one."""

    name: str
    expert: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Job:
    """A source to read and the canonical tensors to write from it."""

    source: Source
    outputs: tuple[Output, ...]


@dataclass
class Resolved:
    """Everything known about a checkpoint before its weights are read.

    Attributes:
        jobs: what to read and where it goes.
        problems: what is wrong.
        warnings: what is unusual.
        drafting: the draft block is there.
    """

    jobs: list[Job] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    drafting: bool = False


def resolve(checkpoint: Checkpoint, names: Names) -> Resolved:
    """Sorts a checkpoint's tensors by what they are, and collects every problem that needs no weights to be read."""
    out = Resolved(problems=list(checkpoint.problems))
    lost = _lost(checkpoint, names)
    groups = _group(checkpoint, names, out)
    made: dict[str, str] = {}  # canonical name -> the tensor it comes from
    hint = _declared_block(checkpoint.path)
    for name, parts in groups.items():
        fused = names.fused.get(name)
        if fused is None:
            covered = [Output(name, None, 0, names.places[name].shape[0])]
        else:
            covered = [Output(s.name, s.expert, s.start, s.stop) for s in fused.slices]
        for output in covered:
            if output.name in made:
                out.problems.append(f"{output.name}: both from {made[output.name]} and from {_shown(parts)}")
            made[output.name] = _shown(parts)
        if name in lost:  # what is left of it says nothing
            continue
        shape = names.places[name].shape if fused is None else fused.shape
        integer = fused is None and names.places[name].integer
        try:
            out.jobs.append(Job(_source(parts, shape, integer, hint), tuple(covered)))
        except Problem as problem:
            out.problems.append(str(problem))
    _check_complete(checkpoint, names, {*made, *lost}, out)
    for job in out.jobs:
        out.problems += _check_values(checkpoint, job, names)
    _note_precision(out)
    return out


def _group(checkpoint: Checkpoint, names: Names, out: Resolved) -> dict[str, dict[str, Stored]]:
    """Canonical name -> role -> tensor; notes tensors that nothing takes."""
    groups: dict[str, dict[str, Stored]] = {}
    unknown, dspark, drafts = [], [], 0
    for key, stored in checkpoint.tensors.items():
        found = names.locate(key)
        if DSPARK.search(key):
            dspark.append(key)
        elif found is None:
            unknown.append(f"{key}: {stored.code} {list(stored.shape)} has no place in this model")
        elif found[1] == "draft":
            drafts += 1
        elif found[1] != "ignored":
            name, role = found
            other = groups.setdefault(name, {}).setdefault(role, stored)
            if other is not stored:
                out.problems.append(f"{key}: the same as {other.name}, the {role} of {name}")
    if dspark:
        out.problems.append(
            f"{dspark[0]} and {len(dspark) - 1} more: a DSpark draft, which is not supported; supported: the draft "
            "block of the first release (mtp.0 with e_proj and h_proj), or none"
        )
        unknown = [line for line in unknown if not line.startswith("mtp.")]
    if drafts:
        out.warnings.append(f"the draft block is not used: {drafts} tensors, but num_nextn_predict_layers is 0")
    out.problems += unknown
    return groups


def _shown(parts: Mapping[str, Stored]) -> str:
    return parts["value"].name if "value" in parts else next(iter(parts.values())).name


def _declared_block(path: Path) -> tuple[int, int] | None:
    """The FP8 block that config.json declares; only a hint, since tensors decide for themselves."""
    try:
        rows, columns = read_object(path / "config.json")["quantization_config"]["weight_block_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    positive = all(type(n) is int and n > 0 for n in (rows, columns))
    return (rows, columns) if positive else None


def _source(parts: dict[str, Stored], shape: tuple[int, ...], integer: bool, hint: tuple[int, int] | None) -> Source:
    """How to read one weight, from its stored dtype and the scales beside it.

    Raises:
        Problem: scales without a weight, a dtype that does not go with its scales, or a wrong shape.
    """
    if "value" not in parts:
        raise Problem(f"{_shown(parts)}: a scale without its weight")
    weight, scale = parts["value"], parts.get("scale")
    factor = parts.get("factor") or parts.get("divisor")
    described = f"{weight.name}: {weight.code} {list(weight.shape)}"
    packed = (
        weight.code in PACKED and not integer and not (weight.code == "I8" and scale is None and weight.shape == shape)
    )
    logical = weight.shape
    if packed and weight.code != "F4" and logical:
        logical = (*logical[:-1], 2 * logical[-1])
    if packed and weight.code == "F4" and logical and logical[-1] % 2:
        raise Problem(f"{described}: an odd number of FP4 values a row")
    if weight.code not in DTYPES and weight.code != "F4":
        raise Problem(f"{described}: unknown dtype; known: {', '.join(DTYPES)}")
    if logical != shape:
        as_values = f" (values: {list(logical)})" if logical != weight.shape else ""
        raise Problem(f"{described}{as_values}, expected {list(shape)}")
    if "factor" in parts and "divisor" in parts:
        raise Problem(f"{described}: both {parts['factor'].name} and {parts['divisor'].name}")
    if integer:
        if weight.code not in INTEGERS:
            raise Problem(f"{described}: expected integers ({', '.join(INTEGERS)})")
        return Source(weight, shape, "integer")
    if weight.code in FLOATS:
        if scale or factor:
            raise Problem(f"{described} is not quantised, but has a scale {(scale or factor).name}")  # type: ignore[union-attr]
        return Source(weight, shape)
    if weight.code not in ("F8_E4M3", *PACKED) or len(shape) < 2:
        raise Problem(f"{described}: expected one of {', '.join(FLOATS)}, or for matrices F8_E4M3 or packed FP4")
    stem = weight.name.removesuffix("_packed").removesuffix(".weight")
    if scale is None:
        looked = ", ".join(stem + suffix for suffix in SCALE_NAMES)
        raise Problem(f"{described} has no scale; looked for {looked}")
    if weight.code == "F8_E4M3":
        if factor is not None:
            raise Problem(f"{described}: FP8 with a second scale {factor.name}")
        return _fp8(weight, shape, scale, hint)
    return _fp4(weight, shape, scale, factor, "divisor" in parts)


def _fp8(weight: Stored, shape: tuple[int, ...], scale: Stored, hint: tuple[int, int] | None) -> Source:
    matrix, given = shape[-2:], f"{scale.name}: {scale.code} {list(scale.shape)}"
    if scale.code not in ("F32", "BF16", "F16", "F8_E8M0", "U8"):
        raise Problem(f"{given}: expected scales of FP8 as F32, BF16, F16, F8_E8M0 or U8")
    count = int(np.prod(scale.shape))
    if count == 1 or (len(shape) == 3 and count == shape[0]):
        form = "fp8" if len(scale.shape) == len(shape) else "fp8_tensor"
        return Source(weight, shape, form, scale, (matrix[0], matrix[1]))
    block = None
    if len(scale.shape) == len(shape) and scale.shape[:-2] == shape[:-2]:
        block = fit_block((matrix[0], matrix[1]), (scale.shape[-2], scale.shape[-1]), hint)
    if block is None:
        raise Problem(f"{given} does not cover {weight.name} {list(shape)} in square blocks, rows, or as a whole")
    return Source(weight, shape, "fp8", scale, block)


def _fp4(weight: Stored, shape: tuple[int, ...], scale: Stored, factor: Stored | None, divides: bool) -> Source:
    given = f"{scale.name}: {scale.code} {list(scale.shape)}"
    if factor is not None:
        form, group, codes = "nvfp4", NVFP4_GROUP, ("F8_E4M3", "U8")
        if factor.code not in FLOATS or int(np.prod(factor.shape)) not in ((1, shape[0]) if len(shape) == 3 else (1,)):
            raise Problem(f"{factor.name}: {factor.code} {list(factor.shape)}, expected one F32 a matrix")
    elif scale.code == "F8_E4M3":
        stem = weight.name.removesuffix("_packed")
        raise Problem(f"{given}: NVFP4 needs a second scale; looked for {stem}_scale_2, {stem}_global_scale")
    else:
        form, group, codes = "fp4", FP4_GROUP, ("F8_E8M0", "U8")
    if scale.code not in codes:
        raise Problem(f"{given}: expected {' or '.join(codes)} for {weight.name}")
    expected = (*shape[:-1], -(-shape[-1] // group))
    if scale.shape != expected:
        raise Problem(f"{given}, expected {list(expected)}: one for {group} values of {weight.name}")
    return Source(weight, shape, form, scale, (1, group), factor, divides)


def _lost(checkpoint: Checkpoint, names: Names) -> set[str]:
    """Canonical names that lost tensors are, or are a part of: one problem, noted with their file, is enough."""
    lost = {found[0] for found in map(names.locate, checkpoint.lost) if found}
    return lost | {s.name for name in lost if name in names.fused for s in names.fused[name].slices}


def _check_complete(checkpoint: Checkpoint, names: Names, known: Collection[str], out: Resolved) -> None:
    """Notes tensors that are not ``known``, and decides whether the draft block is there."""
    optional = [name for name, place in names.places.items() if place.optional]
    out.drafting = any(name in known for name in optional)
    for name, place in names.places.items():
        if name not in known and (out.drafting or not place.optional) and checkpoint.tensors:
            out.problems.append(f"{name}: missing, expected {list(place.shape)}")
    if not checkpoint.tensors and not out.problems:
        out.problems.append("no tensors in its safetensors files")
    if optional and checkpoint.tensors and not out.drafting:
        out.warnings.append(f"drafting is off: none of the {len(optional)} tensors of the draft block are there")


def _check_values(checkpoint: Checkpoint, job: Job, names: Names) -> list[str]:
    """Problems with values that are cheap to read: scales, integer tables, small tensors."""
    source, problems = job.source, []
    if source.form == "integer":
        experts = names.config.n_routed_experts
        table = checkpoint.view(source.weight)
        low, high = (int(table.min()), int(table.max())) if table.size else (0, 0)
        if low < 0 or high >= experts:
            problems.append(f"{source.weight.name}: ids {low}..{high}, expected 0..{experts - 1}")
    elif source.form == "plain" and np.prod(source.shape) <= SMALL and not finite(checkpoint.view(source.weight)):
        problems.append(f"{source.weight.name}: NaN or infinite values")
    elif source.scale is not None:
        experts_in = range(source.shape[0]) if len(source.shape) == 3 else (None,)
        if not all(finite(read_scales(checkpoint, source, e)) for e in experts_in):
            problems.append(f"{source.scale.name}: NaN or infinite scales")
        if source.factor is not None:
            factor = checkpoint.view(source.factor).astype(np.float32)
            if not finite(factor) or (source.divides and not factor.all()):
                problems.append(f"{source.factor.name}: NaN, infinite or zero")
        checkpoint.forget(source.scale)
    return problems


def finite(values: np.ndarray) -> bool:
    """Whether all values are finite; bf16 is looked at by its bits."""
    if values.dtype.itemsize == 2 and values.dtype.kind != "f":
        return not ((values.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(values).all())


def _note_precision(out: Resolved) -> None:
    """Warns of parameters that are kept in float32 and were stored with less."""
    narrow = [
        job.source.weight.name
        for job in out.jobs
        if job.source.weight.code in ("BF16", "F16") and job.outputs[0].name.endswith(SINGLE_PRECISION)
    ]
    if narrow:
        out.warnings.append(
            f"{len(narrow)} tensors that belong in float32 are stored in fewer bits and taken as they are, "
            f"{narrow[0]} for one"
        )

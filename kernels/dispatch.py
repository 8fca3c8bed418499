"""Which implementation serves a call.

Each operation registers its implementations, best first. Adding one is one ``register`` call; the public functions do
not change.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

logger = logging.getLogger("jmla.kernels")

NAMES = ("xla", "pallas", "portable", "triton", "cute")
MOST_CHOICES = 256  # that are kept for the report


@dataclasses.dataclass(frozen=True)
class Target:
    """What a call is lowered for; None means not known before lowering.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu" or None.
        compute_capability: 90, 100, 120, ... for "cuda", else None.
    """

    platform: str | None = None
    compute_capability: int | None = None


WhyNot = Callable[[Target, Mapping[str, Any]], str | None]


class CannotRun(ValueError):
    """A named implementation cannot run."""


class Declined(RuntimeError):
    """What was chosen cannot serve after all, as it found out when it was called; the next implementation may."""


@dataclasses.dataclass(frozen=True)
class Rival:
    """A later implementation, and how it does against the earlier one where both can serve.

    Attributes:
        name: of the later one.
        slower: gives the reason why the later one is to serve the shapes that the operation states, or None.
        faster: gives the reason why the earlier one is, for the report, or None.
    """

    name: str
    slower: Callable[[Mapping[str, Any]], str | None]
    faster: Callable[[Mapping[str, Any]], str | None] = lambda _: None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    Attributes:
        name: one of ``NAMES``.
        function: takes the arrays of the operation by position and the rest by keyword.
        platform: the only platform that it runs on, or None for every one.
        why_not: gives the reason why it cannot serve a target and shapes, or None when it can.
        named_only: whether it serves only where it is named.
        rival: what it may give way to where it is not named.
        broken: gives the reason why it cannot run in this process, or None; asked last, as it may import much.
    """

    name: str
    function: Callable[..., Any]
    platform: str | None = None
    why_not: WhyNot | None = None
    named_only: bool = False
    rival: Rival | None = None
    broken: Callable[[], str | None] | None = None

    def reason(self, target: Target, shapes: Mapping[str, Any]) -> str | None:
        """Why it cannot run, or None."""
        return self.refusal(target, shapes) or (self.broken() if self.broken else None)

    def refusal(self, target: Target, shapes: Mapping[str, Any]) -> str | None:
        """Why it is not for a target and shapes, or None."""
        if self.name in disabled():
            return "disabled by JMLA_DISABLE"
        if self.platform is not None and target.platform not in (None, self.platform):
            return f"runs on {self.platform}, the target is {target.platform}"
        return self.why_not(target, shapes) if self.why_not else None


@dataclasses.dataclass(frozen=True)
class Choice:
    """A row of the report.

    Attributes:
        op: the operation.
        layout: of its pools; empty for operations without.
        implementation: which one serves.
        others: (name, reason) of those that do not.
        shapes: of the first call that led to this choice; others do not make another row.
    """

    op: str
    layout: str
    implementation: str
    others: tuple[tuple[str, str], ...]
    shapes: str = dataclasses.field(compare=False)


class Report(tuple[Choice, ...]):
    """The choices made so far; prints as a table."""

    def __str__(self) -> str:
        head = ("operation", "serves", "shapes", "others")
        rows = [(c.op, c.implementation, c.shapes, "; ".join(f"{n}: {r}" for n, r in c.others)) for c in self]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
        lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join(line.rstrip() for line in lines)


_registry: dict[str, dict[str, Implementation]] = {}
_listening: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("listening", default=None)
_choices: dict[Choice, None] = {}  # in order of the first call
# Part of jit's cache key, so that lowering for another target traces anew.
_target = jax.make_user_context(None)
_choosing = contextvars.ContextVar("choosing", default=False)


def register(
    op: str,
    name: str,
    function: Callable[..., Any],
    *,
    platform: str | None = None,
    why_not: WhyNot | None = None,
    named_only: bool = False,
    rival: Rival | None = None,
    broken: Callable[[], str | None] | None = None,
) -> None:
    """Adds an implementation of an operation, behind those that are there: register the best first.

    One that is ``named_only`` serves those that ask for it, and is never chosen. One with a ``rival`` leaves it those
    shapes that the rival is to serve, if the rival can. See ``Implementation`` for the rest.
    """
    if name not in NAMES:
        raise ValueError(f"Expected {name=} to be one of: {', '.join(NAMES)}")
    _registry.setdefault(op, {})[name] = Implementation(name, function, platform, why_not, named_only, rival, broken)


def implementations(op: str) -> tuple[str, ...]:
    """Names of the implementations of an operation, best first."""
    return tuple(_registry[op])


def disabled() -> frozenset[str]:
    """The implementations that the operator switched off: JMLA_DISABLE, names separated by commas."""
    names = frozenset(name.strip() for name in os.environ.get("JMLA_DISABLE", "").split(",") if name.strip())
    if unknown := sorted(names.difference(NAMES)):
        raise ValueError(f"Expected JMLA_DISABLE to name some of: {', '.join(NAMES)}; got {', '.join(unknown)}")
    return names


@contextlib.contextmanager
def target(*, compute_capability: int | None = None, platform: str | None = None) -> Iterator[Target]:
    """Inside it, operations choose implementations for this target instead of that of their arrays.

    For lowering without the device: ``jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))``.

    Args:
        compute_capability: of an NVIDIA GPU, such as 90 for 9.0; the platform is then "cuda".
        platform: "cpu", "cuda", "rocm" or "tpu", when there is no compute capability to give.
    """
    if compute_capability is not None and platform not in (None, "cuda"):
        raise ValueError(f"Expected {platform=} to be cuda beside {compute_capability=}")
    if compute_capability is None and platform is None:
        raise ValueError("Expected target() to be given compute_capability or platform")
    chosen = Target("cuda" if compute_capability is not None else platform, compute_capability)
    with _target(chosen):
        yield chosen


@contextlib.contextmanager
def following(*arrays: Any) -> Iterator[None]:
    """Inside it, operations choose for the devices that a compiled program over ``arrays`` will run on.

    For the call of a jitted function, which does not see the devices of its arguments while it is traced. ``target()``
    around it wins, and so does a mesh in use, which tracing sees. Where the arrays are traced themselves, nothing is
    known of devices yet, and nothing changes.

    Args:
        arrays: pytrees. The first array that is bound to devices decides, as it does in JAX; where none is, JAX's
            default device does. One traced array is enough to leave the choice as it is.
    """
    stated = _target.value is not None or not jax.sharding.get_abstract_mesh().empty
    device = None if stated else _device_of_program(arrays)
    with contextlib.nullcontext() if device is None else _target(_device_target(device)):
        yield


def _device_of_program(arrays: Any) -> jax.Device | None:
    bound, tracer = None, jax.core.Tracer
    for x in jax.tree.leaves(arrays):  # once a step, over all of a model's arrays
        if isinstance(x, tracer):
            return None
        if bound is None and getattr(x, "committed", False):
            bound = x
    if bound is not None:
        return next(iter(bound.devices()))
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):  # a device, or the name of a platform
        return jax.local_devices(backend=default)[0]
    return default


def current_target(*arrays: Any) -> Target:
    """The target of a call: that of ``target()``, else of the devices of the arrays, else of the mesh in use."""
    if _target.value is not None:
        return _target.value
    leaves = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    devices = [] if traced else [next(iter(x.devices())) for x in leaves]
    if not devices and not (mesh := jax.sharding.get_abstract_mesh()).empty and mesh.abstract_device is not None:
        return _kind_target(mesh.abstract_device.device_kind)
    if not devices:
        return Target()
    return _device_target(devices[0])


def _device_target(device: jax.Device) -> Target:
    if device.platform != "gpu":
        return Target(device.platform)
    return gpu_target(getattr(device, "compute_capability", None))


def gpu_target(capability: Any) -> Target:
    text = str(capability or "")
    if not text.replace(".", "", 1).isdigit():
        return Target("rocm")
    return Target("cuda", round(float(text) * 10))


def _kind_target(kind: str) -> Target:
    for device in jax.local_devices():
        if device.device_kind == kind and device.platform == "gpu":
            return gpu_target(getattr(device, "compute_capability", None))
    return Target("cpu") if kind.lower() == "cpu" else Target()


def call(op: str, implementation: str | None, shapes: Mapping[str, Any], *arrays: Any, **static: Any) -> Any:
    """Runs an operation by a named implementation, or by the best that can serve.

    When the target is not known while tracing, the decision between an implementation of one platform and the next one
    is left to the lowering.

    Args:
        op: the operation.
        implementation: a name, or None to choose.
        shapes: the static facts that a choice may depend on, among them the "layout" of pools. One line is logged for
            each operation, layout and outcome; it shows the facts whose names do not start with "_".
        arrays: passed by position (pytrees, None included).
        static: passed by keyword.

    Raises:
        CannotRun: a named implementation that cannot run.
        ValueError: an unknown name, or no implementation that can run.
    """
    known = _registry[op]
    where = current_target(*arrays)
    if implementation is not None:
        if implementation not in known:
            raise ValueError(f"Expected {implementation=} of {op} to be one of: {', '.join(known)}")
        if reason := known[implementation].reason(where, shapes):
            raise CannotRun(
                f"Implementation {implementation} of {op} cannot run: {reason}; supported: {_able(op, where, shapes)}"
            )
        _note(op, shapes, implementation, ())
        with _chosen_here(False):
            return known[implementation].function(*arrays, **static)
    with _chosen_here(True):
        return _choose(op, where, shapes, arrays, static, {})


def choosing() -> bool:
    """Whether the operation under way was left to choose its implementation, which may then raise ``Declined``."""
    return _choosing.get()


@contextlib.contextmanager
def _chosen_here(value: bool) -> Iterator[None]:
    token = _choosing.set(value)
    try:
        yield
    finally:
        _choosing.reset(token)


def _choose(
    op: str,
    where: Target,
    shapes: Mapping[str, Any],
    arrays: tuple[Any, ...],
    static: Mapping[str, Any],
    declined: Mapping[str, str],
) -> Any:
    """Runs an operation by the best implementation that can serve; ``declined``: names, and why they cannot."""
    known = _registry[op]
    others: list[tuple[str, str]] = []
    serving: list[Implementation] = []
    for candidate in known.values():
        first = next((s for s in serving if s.platform in (None, where.platform, candidate.platform)), None)
        if candidate.named_only:
            others.append((candidate.name, candidate.reason(where, shapes) or "serves where it is named"))
        elif candidate.name in declined:
            others.append((candidate.name, declined[candidate.name]))
        elif first is not None:
            measured = first.rival.faster(shapes) if first.rival and first.rival.name == candidate.name else None
            others.append((candidate.name, f"{first.name} comes first" + (f": {measured}" if measured else "")))
        elif reason := (
            candidate.refusal(where, shapes)
            or _gives_way(candidate, known, where, shapes, declined)
            or candidate.reason(where, shapes)
        ):
            others.append((candidate.name, reason))
        else:
            serving.append(candidate)
    if not serving:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in others)
        raise ValueError(f"No implementation of {op} can run here: {reasons}")
    names = " or ".join(s.name + (f" on {s.platform}" if s.platform else "") for s in serving)
    choice = _note(op, shapes, names, tuple(others))

    def bind(candidate: Implementation) -> Callable[..., Any]:
        def run(*xs: Any) -> Any:
            try:
                return candidate.function(*xs, **static)
            except Declined as error:
                more = {**declined, candidate.name: str(error)}
            _choices.pop(choice, None)
            target = where if candidate.platform is None else Target(candidate.platform, where.compute_capability)
            return _choose(op, target, shapes, xs, static, more)

        return run

    if len(serving) == 1:
        return bind(serving[0])(*arrays)
    branches: dict[str, Callable[..., Any]] = {}
    default = None
    for candidate in serving:
        if candidate.platform is None:
            default = bind(candidate)
        else:
            branches.setdefault(candidate.platform, bind(candidate))
    return jax.lax.platform_dependent(*arrays, default=default, **branches)


def _gives_way(
    candidate: Implementation,
    known: Mapping[str, Implementation],
    where: Target,
    shapes: Mapping[str, Any],
    declined: Mapping[str, str],
) -> str | None:
    """Why a candidate leaves shapes to its rival, or None."""
    rival = None if candidate.rival is None else known.get(candidate.rival.name)
    if candidate.rival is None or rival is None or rival.name in declined or rival.reason(where, shapes):
        return None
    return candidate.rival.slower(shapes)


def _able(op: str, where: Target, shapes: Mapping[str, Any]) -> str:
    return ", ".join(name for name, known in _registry[op].items() if known.reason(where, shapes) is None) or "none"


def note(choices: Iterable[Choice]) -> None:
    """Adds choices that were made when programs were compiled which run here without being traced."""
    for choice in choices:
        if len(_choices) < MOST_CHOICES:
            _choices.setdefault(choice)


@contextlib.contextmanager
def noting() -> Iterator[list[Choice]]:
    """Inside it, all choices of this thread go into a list too, those that were made before as well."""
    made: list[Choice] = []
    token = _listening.set(made)
    try:
        yield made
    finally:
        _listening.reset(token)


def _note(op: str, shapes: Mapping[str, Any], serving: str, others: tuple[tuple[str, str], ...]) -> Choice:
    described = ", ".join(f"{key}={value}" for key, value in shapes.items() if not key.startswith("_"))
    choice = Choice(op, str(shapes.get("layout", "")), serving, others, described)
    if (listening := _listening.get()) is not None:
        listening.append(choice)
    if choice in _choices or len(_choices) > MOST_CHOICES:
        return choice
    _choices[choice] = None
    if len(_choices) > MOST_CHOICES:  # one row too many says that the list is full; it is not shown
        logger.info("%d choices of implementations were made; no further choices are kept or logged", MOST_CHOICES)
        return choice
    reasons = "".join(f"; not {name}: {reason}" for name, reason in others)
    logger.info("%s [%s] is served by %s%s", op, choice.shapes, serving, reasons)
    return choice


def report() -> Report:
    """The choices made so far in this process, one row for each operation, layout and outcome."""
    return Report(itertools.islice(_choices, MOST_CHOICES))

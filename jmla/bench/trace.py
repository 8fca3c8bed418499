"""What the profiler saw on the device."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of a kernel (of an instruction, on the CPU)."""

    name: str
    instruction: str
    start_ns: float
    duration_ns: float


def events(folder: str) -> Iterator[Event]:
    """What ran on the device, from a trace that ``jax.profiler.trace`` wrote there.

    On a GPU that is everything on its streams, on the CPU the instructions of compiled programs.
    """
    for file in Path(folder).rglob("*.xplane.pb"):
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
        gpus = [plane for plane in planes if "GPU" in plane.name]
        for plane in gpus or planes:
            for line in plane.lines:
                if gpus and "Stream" not in (line.name or ""):
                    continue
                for event in line.events:
                    stats = {key: value for key, value in event.stats if key == "hlo_op"}
                    if gpus or stats:
                        name = str(stats.get("hlo_op", ""))
                        yield Event(event.name, name, event.start_ns, event.duration_ns)


def traced(run: Callable[[], Any]) -> list[Event]:
    """What ran on the device while ``run()`` did."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        return list(events(folder))


def busy_us(seen: Sequence[Event]) -> float:
    """Microseconds in which the device worked on something."""
    total, end = 0.0, 0.0
    for event in sorted(seen, key=lambda e: e.start_ns):
        total += max(event.start_ns + event.duration_ns - max(event.start_ns, end), 0)
        end = max(end, event.start_ns + event.duration_ns)
    return total / 1e3

"""Times every operation at the shapes of the released models, beside XLA and the recorded times of peers."""

import concurrent.futures
import datetime
import importlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from jmla.bench import timing
from jmla.bench.case import Case, Work
from jmla.kernels.dispatch import CannotRun

PARTIAL = ("cute",)  # which leaves some rows, and some GPUs, to the others
OPS = ("sparse_mla", "kv_pack", "index_scores", "top_k", "resolve_slots", "sinkhorn", "compress")
# Seen on an H200: dense bf16 product, twice that in e4m3, and device copy (read and write).
CEILINGS = {"H200": {"bf16_tflops": 790.0, "fp8_tflops": 1580.0, "copy_tbps": 4.3}}


def all_cases(only: str | None = None) -> list[Case]:
    """The cases of all operations; ``only``: those whose "op name" holds this text."""
    found = [case for op in OPS for case in importlib.import_module(f"jmla.bench.{op}").cases()]
    return [case for case in found if only is None or only in f"{case.op} {case.name}"]


def measure(case: Case, work: Work, implementation: str, run: Callable[[str], Callable[..., Any]]) -> float:
    """Microseconds of a call of what ``run``, one of the work's, gives."""
    fn = run(implementation)
    if work.state is None:
        xla = implementation == "xla"  # whose programs take long to compile
        return timing.time_call(
            fn, work.sets, work.shared, kernels=not xla, calls=min(case.calls, 4) if xla else case.calls
        )
    return timing.time_update(fn, work.sets, work.state, calls=case.calls)[0]


def empty_kernel() -> float:
    """Microseconds of a kernel that writes 16 numbers, in the same kind of program."""
    import jax.numpy as jnp

    from jmla.bench.empty import empty

    return timing.time_call(empty, [(jnp.arange(16, dtype=jnp.float32),)], calls=200)


def hardware() -> dict[str, Any]:
    """Device, driver and versions."""
    import jax

    device = jax.devices()[0]
    versions = {}
    for name in ("jax", "jaxlib", "triton", "jax-triton", "nvidia-cutlass-dsl", "jmla"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version.replace("\n", " "),
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.date.today().isoformat(),
    }


def times(case: Case, implementations: tuple[str, ...] | None) -> dict[str, Any]:
    """Times of a case, as the JSON file has them."""
    import jax

    found: dict[str, Any] = {"op": case.op, "case": case.name, "peer": case.peer, "peer_us": case.peer_us, "us": {}}
    found |= {"flops": case.flops, "bytes": case.bytes}
    for name in implementations or case.implementations:
        if name not in case.implementations:
            continue
        try:
            with timing.device(alone=False):  # anew, since a timed program may have consumed its state
                work = case.build()
                jax.block_until_ready((work.sets, work.shared, work.state))
            found["us"][name] = round(measure(case, work, name, work.run), 2)
            if work.without is not None:
                found.setdefault("without_us", {})[name] = round(measure(case, work, name, work.without), 2)
        except Exception as error:  # one failing case must not lose the others' times
            kind = "refused" if name in PARTIAL and isinstance(error, CannotRun) else "errors"
            found.setdefault(kind, {})[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def _numbered(number: int, only: str | None, implementations: tuple[str, ...] | None) -> dict[str, Any]:
    return times(all_cases(only)[number], implementations)


def _rows(only: str | None, implementations: tuple[str, ...] | None, jobs: int) -> Iterator[dict[str, Any]]:
    """The rows of all cases in order; with ``jobs`` processes, of which one at a time uses the device for timing."""
    cases = all_cases(only)
    if jobs == 1:
        yield from (times(case, implementations) for case in cases)
        return
    count = len(cases)
    with (
        tempfile.NamedTemporaryFile() as turns,
        concurrent.futures.ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), initializer=timing.take_turns, initargs=(turns.name,)
        ) as pool,
    ):
        yield from pool.map(_numbered, range(count), *([x] * count for x in (only, implementations)))


def run(only: str | None, json_path: str | None, implementations: tuple[str, ...] | None, jobs: int = 1) -> None:
    """Measures, prints the table and writes the JSON file."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {timing.XLA_FLAGS}".strip()
    if jobs > 1:  # none takes all of the memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        raise SystemExit("jmla.bench kernels needs an NVIDIA GPU; for the CPU path see benchmarks/cpu.py")
    about = hardware()
    about["empty_kernel_us"] = round(empty_kernel(), 2)
    print(f"{about['device']}, {about['date']}, {about['versions']}")
    print(f"An empty kernel takes {about['empty_kernel_us']} us.")
    ceiling = next((c for kind, c in CEILINGS.items() if kind in about["device"]), None)
    rows = []
    print(HEAD)
    for found in _rows(only, implementations, jobs):
        rows.append(found)
        print(line(found, ceiling), flush=True)
        if json_path:  # after every case, so that an interrupted run keeps what it has
            Path(json_path).write_text(json.dumps({**about, "cases": rows}, indent=1) + "\n")
    if broken := [found for found in rows if found.get("errors")]:
        raise SystemExit(f"{len(broken)} cases failed: " + "; ".join(f"{r['op']} {r['case']}" for r in broken))


HEAD = (
    "| operation | case | us | TFLOPS | GB/s | of the ceiling | against the peer | XLA us | against XLA | others |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any], ceiling: dict[str, float] | None) -> str:
    """A row of the table: the best time of the own kernels."""
    own = {name: us for name, us in row["us"].items() if name != "xla"}
    best = min(own, key=own.__getitem__) if own else None
    us, xla = own[best] if best else None, row["us"].get("xla")
    cells = [row["op"], row["case"]]
    said = {**row.get("errors", {}), **row.get("refused", {})}
    cells.append(f"{us:.1f} ({best})" if us else "; ".join(said.values()) or "-")
    cells.append(f"{row['flops'] / us / 1e6:.0f}" if us and row["flops"] else "-")
    cells.append(f"{row['bytes'] / us / 1e3:.0f}" if us and row["bytes"] else "-")
    fraction = "-"
    if us and ceiling:
        kind = "fp8_tflops" if row["op"] == "index_scores" else "bf16_tflops"
        parts = [row["flops"] / us / 1e6 / ceiling[kind], row["bytes"] / us / 1e6 / ceiling["copy_tbps"]]
        fraction = f"{max(parts):.2f}" if max(parts) else "-"
    cells.append(fraction)
    cells.append(f"{us / row['peer_us']:.2f} x {row['peer']} ({row['peer_us']})" if us and row["peer_us"] else "-")
    cells.append(f"{xla:.1f}" if xla else "-")
    cells.append(f"{us / xla:.3f}" if us and xla else "-")
    others = [f"{name} {own[name]:.1f}" for name in own if name != best]
    others += [f"{name} without {us:.1f}" for name, us in row.get("without_us", {}).items()]
    cells.append(", ".join([*others, *(f"{name} -" for name in row.get("refused", {}))]) or "-")
    return "| " + " | ".join(cells) + " |"

"""Compiled CuTe DSL kernels: kept, found again, made by workers, and what is done where there are none."""

import contextlib
import dataclasses
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jmla import kernels
from jmla.engine import programs
from jmla.kernels import dispatch, launch_cute

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cuda.bindings.driver as cuda
from cutlass import cute

from jmla.kernels import cute_cache, cute_workers

pytestmark = pytest.mark.lowering

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Factor:
    value: float


def build(profile: Factor) -> Any:
    """Multiplies ``x [R, 4]`` into ``y``, which is updated in place, and a new array."""
    if profile.value == 0:
        raise ValueError("nothing to compile")

    @cute.kernel
    def scale(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * 32 + thread
        if row < x.shape[0]:
            z[row, 0] = x[row, 0] * profile.value
            y[row, 0] = y[row, 0] + 1.0

    @cute.jit
    def launch(stream: cuda.CUstream, x: cute.Tensor, absent: Any, y: cute.Tensor, z: cute.Tensor) -> None:
        scale(x, y, z).launch(grid=[(x.shape[0] + 31) // 32, 1, 1], block=[32, 1, 1], stream=stream)

    return launch


def scaled(x: jax.Array, y: jax.Array, factor: float) -> tuple[jax.Array, ...]:
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch_cute.call(build, Factor(factor), [x, None, y], [out, out], {2: 1}, dynamic=True)


X = jax.ShapeDtypeStruct((64, 4), jnp.float32)


def lowered(*factors: float, rows: int = 64, capability: int = 90) -> str:
    """The program for a GPU that multiplies by some factors."""
    x = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    with kernels.target(compute_capability=capability):
        traced = jax.jit(lambda x, y: [scaled(x, y, f) for f in factors]).trace(x, x)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def jobs(*factors: float, rows: int = 64) -> list[cute_cache.Job]:
    x = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    with kernels.target(compute_capability=90), launch_cute.collecting() as found:
        jax.jit(lambda x, y: [scaled(x, y, f) for f in factors]).trace(x, x)
    return list(found)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Iterator[Path]:
    former = cute_cache.configure(directory=tmp_path / "kernels", compiling=True, strict=False, timeout=120.0)
    cute_cache.forget()
    yield tmp_path / "kernels"
    cute_cache.configure(**vars(former))
    cute_cache.forget()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[cute_cache.Job]:
    """The kernels that this process compiles."""
    made: list[cute_cache.Job] = []
    compile_here = cute_cache.compile_here

    def recorded(job: cute_cache.Job) -> bytes:
        made.append(job)
        return compile_here(job)

    monkeypatch.setattr(cute_cache, "compile_here", recorded)
    return made


def artifacts(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.bin"))


def test_a_kernel_is_compiled_once_for_all_rows_and_kept(directory: Path, compiled: list[cute_cache.Job]) -> None:
    text = lowered(2.0, 2.0, 3.0)
    assert text.count("custom_call @CuteDSLRT_NvJaxCutlassCall") == 3
    assert "output_tuple_indices = [1], operand_index = 1" in text  # the input without an array is no operand
    lowered(2.0, rows=96)
    assert [job.profile for job in compiled] == [Factor(2.0), Factor(3.0)]
    cute_cache.forget()  # as another process
    lowered(3.0, 2.0)
    assert len(compiled) == len(artifacts(directory)) == 2
    assert all(
        file.stat().st_mode & 0o077 == 0 or file.parent.stat().st_mode & 0o077 == 0 for file in artifacts(directory)
    )
    lowered(2.0, capability=120)
    assert compiled[-1].architecture == "sm_120a"
    assert len(artifacts(directory)) == 3


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "left", [0, *(pytest.param(n, marks=SLOW) for n in (5, 30, 60)), 1000, -1], ids="{}-bytes".format
)
def test_an_artifact_that_is_not_whole_is_made_again(
    left: int, directory: Path, compiled: list[cute_cache.Job], caplog: pytest.LogCaptureFixture
) -> None:
    lowered(2.0)
    (file,) = artifacts(directory)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if left < 0 else whole[:left])
    cute_cache.forget()
    lowered(2.0)
    assert len(compiled) == 2
    assert file.read_bytes() == whole
    assert "not whole" in caplog.text


def test_another_version_does_not_read_what_this_one_wrote(
    directory: Path, compiled: list[cute_cache.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered(2.0)
    for versions in (("4.9.0",), ("4.9.0", "later")):
        monkeypatch.setattr(cute_cache, "_versions", lambda versions=versions: versions)
        cute_cache.forget()
        lowered(2.0)
    assert len(compiled) == len(artifacts(directory)) == 3


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, compiled: list[cute_cache.Job], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cute_cache.configure(directory=tmp_path / "file" / "kernels")
    lowered(2.0, 3.0)
    lowered(2.0)
    assert len(compiled) == 2
    assert caplog.text.count("are not kept") == 1
    assert cute_workers.warm(jobs(4.0), workers=1) == {}
    lowered(4.0)
    assert len(compiled) == 2


def test_artifacts_of_a_read_only_directory_are_read(directory: Path, compiled: list[cute_cache.Job]) -> None:
    lowered(2.0)
    for path in [*directory.iterdir(), directory]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        cute_cache.forget()
        lowered(2.0)
        assert len(compiled) == 1
        lowered(3.0)
    finally:
        directory.chmod(0o700)


def test_workers_compile_what_is_missing(directory: Path, compiled: list[cute_cache.Job]) -> None:
    lowered(2.0)
    wanted = jobs(2.0, 3.0, 4.0, 3.0)
    assert len(wanted) == 4
    assert cute_workers.warm(wanted, workers=2) == {}
    cute_cache.forget()
    cute_cache.configure(compiling=False)
    lowered(2.0, 3.0, 4.0)
    assert len(compiled) == 1
    assert len(artifacts(directory)) == 3
    assert cute_workers.warm(wanted) == {}


def dying(tmp_path: Path, times: int) -> str:
    """What workers do that end by SIGKILL in the first kernels."""
    return f"""
import os, pickle
from jmla.kernels import cute_cache, cute_workers
compile_here = cute_cache.compile_here
def fatal(job):
    path = {str(tmp_path / "deaths")!r}
    deaths = os.path.getsize(path) if os.path.exists(path) else 0
    if deaths < {times}:
        open(path, "a").write("x")
        os.kill(os.getpid(), 9)
    return compile_here(job)
cute_cache.compile_here = fatal
cute_workers.work()
"""


def test_a_killed_worker_is_replaced(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_workers, "WORK", dying(tmp_path, 1))
    assert cute_workers.warm(jobs(2.0, 3.0), workers=1) == {}
    assert (tmp_path / "deaths").read_text() == "x"
    assert len(artifacts(directory)) == 2
    assert not list(directory.glob(".*"))  # nothing half-written


@SLOW
def test_a_kernel_that_kills_its_workers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_workers, "WORK", dying(tmp_path, 9))
    (job,) = jobs(2.0)
    assert cute_workers.warm([job], workers=1) == {job: "the worker process ended 2 times while it compiled"}
    with pytest.raises(cute_cache.Uncompiled, match="ended 2 times"):
        lowered(2.0)


def test_a_worker_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_workers, "WORK", "import time; time.sleep(60)")
    cute_cache.configure(timeout=0.5)
    (job,) = jobs(2.0)
    start = time.monotonic()
    assert cute_workers.warm([job], workers=1) == {job: "took more than 0.5 s to compile"}
    assert time.monotonic() - start < 10


def test_what_a_worker_says_of_an_error() -> None:
    bad, good = jobs(0.0, 5.0)
    assert cute_workers.warm([bad, good], workers=1) == {bad: "ValueError: nothing to compile"}
    assert "_jit_wrapper" in str(cute_cache.module(good))


@pytest.mark.parametrize(
    ("asked", "a_host", "most"),
    [(None, 16, 4), (9, 16, 9), *(pytest.param(*case, marks=SLOW) for case in ((None, 2, 2), (7, 2, 7)))],
    ids=str,
)
def test_how_many_workers_there_are(
    asked: int | None, a_host: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not more than 4 of a process and 16 of a host, except where a number is asked for."""
    running, seen, guard = set[int](), [0], threading.Lock()

    @contextlib.contextmanager
    def worker() -> Iterator[Any]:
        yield None

    def ask(worker: Any, job: cute_cache.Job, sent: bytes) -> str:
        with guard:
            running.add(threading.get_ident())
            seen.append(len(running))
        time.sleep(0.3)
        with guard:
            running.discard(threading.get_ident())
        return ""

    monkeypatch.setattr(cute_workers, "_worker", worker)
    monkeypatch.setattr(cute_workers, "_ask", ask)
    monkeypatch.setattr(cute_workers, "WORKERS_A_HOST", a_host)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert cute_workers.warm(jobs(*range(1, 13)), workers=asked) == {}
    assert max(seen) == most


def test_no_compiling_refuses_a_cold_kernel(directory: Path, compiled: list[cute_cache.Job]) -> None:
    lowered(2.0)
    cute_cache.forget()
    cute_cache.configure(compiling=False)
    lowered(2.0)
    with pytest.raises(cute_cache.Uncompiled, match=r"compiling is off.*holds no test_cute_cache:build for sm_90a"):
        lowered(3.0)
    (job,) = jobs(3.0)
    assert "compiling is off" in cute_workers.warm([job])[job]
    assert len(compiled) == 1


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation "scaled" that has another implementation behind the kernel."""
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    monkeypatch.setattr(dispatch, "_choices", {})
    dispatch.register("scaled", "cute", scaled, platform="cuda")
    dispatch.register("scaled", "xla", lambda x, y, factor: (x * factor, y + 1))


def operated(factor: float, implementation: str | None = None) -> str:
    """The program for a GPU that runs the operation."""
    with kernels.target(compute_capability=90):
        call = functools.partial(dispatch.call, "scaled", implementation, {"factor": factor}, factor=factor)
        return jax.jit(lambda x, y: call(x, y)).trace(X, X).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("operation")
def test_another_implementation_serves_with_one_logged_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="jmla.kernels"):
        for _ in range(3):
            assert "custom_call @CuteDSLRT" not in operated(0.0)
    assert len(caplog.records) == 1
    assert "ValueError: nothing to compile" in caplog.text
    (choice,) = dispatch.report()
    assert choice.implementation == "xla"
    assert choice.others == (("cute", "could not be compiled: ValueError: nothing to compile"),)
    assert "custom_call @CuteDSLRT" in operated(2.0)
    cute_cache.configure(strict=True)
    with pytest.raises(cute_cache.Uncompiled, match="nothing to compile"):
        operated(0.0)


@pytest.mark.usefixtures("operation")
def test_a_named_kernel_that_cannot_be_compiled_is_an_error() -> None:
    assert "custom_call @CuteDSLRT" in operated(2.0, "cute")
    for _ in range(2):
        with pytest.raises(cute_cache.Uncompiled, match="nothing to compile"):
            operated(0.0, "cute")
    cute_cache.configure(compiling=False)
    with pytest.raises(cute_cache.Uncompiled, match="compiling is off"):
        operated(3.0, "cute")
    assert "custom_call @CuteDSLRT" not in operated(3.0)


def test_what_a_program_uses_is_what_is_listed(compiled: list[cute_cache.Job]) -> None:
    def program(x: jax.Array, y: jax.Array) -> Any:
        def step(carry: Any, _: None) -> Any:
            return scaled(carry, y, 5.0)[0], None

        return scaled(jax.lax.scan(step, x, None, length=3)[0], y, 6.0)

    with kernels.target(compute_capability=90):
        with launch_cute.collecting() as listed:
            traced = jax.jit(program).trace(X, X)
        assert not compiled
        text = jax.jit(program).trace(X, X).lower(lowering_platforms=("cuda",)).as_text()
        assert compiled == list(dict.fromkeys(listed)) == jobs(5.0, 6.0)
        assert 'module = ""' not in text
        assert traced.lower(lowering_platforms=("cuda",)).as_text() == text  # whose kernels are there by now
        cute_cache.forget()
        cute_cache.configure(directory=None)
        assert traced.lower(lowering_platforms=("cuda",)).as_text() == text  # or are compiled then


class Store:
    """Of programs: keeps nothing."""

    def name(self, *_: Any) -> str:
        return ""

    def load(self, _: str) -> None:
        return None


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> dict[Any, tuple[str, bool]]:
    """Programs by their names as they are lowered for a GPU, and whether they are to be stored."""
    texts: dict[Any, tuple[str, bool]] = {}

    def finish(traced: Any, store: Any, *_: Any) -> None:
        texts[traced.fun_name] = traced.lower(lowering_platforms=("cuda",)).as_text(), store is not None

    monkeypatch.setattr(programs, "_finish", finish)
    monkeypatch.setattr(programs.ProgramStore, "open", Store)
    return texts


@pytest.mark.usefixtures("operation")
def test_kernels_of_an_engine_are_made_by_workers_between_tracing_and_lowering(
    finished: dict[Any, tuple[str, bool]], compiled: list[cute_cache.Job], directory: Path
) -> None:
    traced = []

    def both(x: jax.Array, y: jax.Array) -> Any:
        traced.append("both")
        return [dispatch.call("scaled", None, {}, x, y, factor=factor) for factor in (2.0, 3.0)]

    def none(x: jax.Array, y: jax.Array) -> jax.Array:
        traced.append("none")
        return x + y

    with kernels.target(compute_capability=90):
        programs.Programs().compile([(jax.jit(f), (), (X, X)) for f in (both, none)], 1, False)
    assert sorted(traced) == ["both", "none"]
    assert not compiled
    assert len(artifacts(directory)) == 2
    assert finished["both"][0].count("custom_call @CuteDSLRT") == 2
    assert "custom_call @CuteDSLRT" not in finished["none"][0]
    assert all(stored for _, stored in finished.values())


@pytest.mark.usefixtures("operation")
def test_an_engine_without_its_kernels_is_served_by_others_and_not_stored(
    finished: dict[Any, tuple[str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    def step(x: jax.Array, y: jax.Array) -> Any:
        return dispatch.call("scaled", None, {}, x, y, factor=2.0)

    def none(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    cute_cache.configure(compiling=False)
    with kernels.target(compute_capability=90):
        programs.Programs().compile([(jax.jit(f), (), (X, X)) for f in (step, none)], None, False)
    assert "custom_call @CuteDSLRT" not in finished["step"][0]
    assert [finished[name][1] for name in ("step", "none")] == [False, True]
    assert "compiling is off" in caplog.text
    assert [choice.implementation for choice in dispatch.report()] == ["xla"]


def test_profiles_say_everything() -> None:
    with pytest.raises(TypeError, match="dataclass"):
        cute_cache.Job.of(build, 3.0, [X], [X], {}, 90, False)
    with pytest.raises(ValueError, match="other processes"):
        cute_cache.Job.of(lambda profile: None, Factor(1.0), [X], [X], {}, 90, False)
    with pytest.raises(ValueError, match="workers"):
        cute_cache.configure(workers=0)
    with pytest.raises(ValueError, match="timeout"):
        cute_cache.configure(timeout=0)


def test_shards_and_exported_programs() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    with kernels.target(compute_capability=90):
        for whole in (spec(), spec("data")):
            sharded = jax.shard_map(
                lambda x, y: scaled(x, y, 2.0)[1], mesh=mesh, in_specs=(whole, spec("data")), out_specs=spec("data")
            )
            y = jax.ShapeDtypeStruct((256, 4) if whole == spec() else (64, 4), jnp.float32)
            traced = jax.jit(sharded).trace(X, y)
            assert "CuteDSLRT" in str(traced.jaxpr)
        program = jax.jit(lambda x, y: scaled(x, y, 2.0))
        checks = launch_cute.export_checks()
        exported = jax.export.export(program, platforms=("cuda",), disabled_checks=checks)(X, X)
    assert "CuteDSLRT" in exported.mlir_module()


CPU_ONLY = """
import sys
{before}
import jmla, jax.numpy as jnp
from jmla import kernels
layout = kernels.layouts.footer584(64)

def pack(name=None):
    return kernels.kv_pack(jnp.ones((2, 512)), [0, 1], layout.zeros(1), layout=layout, implementation=name)

def attend(pool, name=None):
    q = jnp.ones((1, 64, 512), jnp.bfloat16)
    return kernels.sparse_mla(q, pool, jnp.array([[0, 1]]), layout=layout, scale=0.1, implementation=name)

pool = pack()
out, _ = attend(pool)
assert pool.any() and out.any() and {condition}, [name for name in sys.modules if "cutlass" in name]
with kernels.target(compute_capability=90):
    for call in (lambda: pack("cute"), lambda: attend(pool, "cute")):
        try:
            call()
        except ValueError as error:
            print(error)
"""


@pytest.mark.parametrize("broken", [False, True])
def test_the_cpu_path_works_without_cute_dsl(broken: bool, tmp_path: Path) -> None:
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("raise OSError('no driver here')")
    before = f"sys.path.insert(0, {str(tmp_path)!r})" if broken else "sys.modules['cutlass'] = None"
    source = CPU_ONLY.format(before=before, condition="sys.modules.get('cutlass') is None")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    wanted = "cannot be imported: OSError: no driver here" if broken else "nvidia-cutlass-dsl is not installed"
    assert done.stdout.count(wanted) == 2

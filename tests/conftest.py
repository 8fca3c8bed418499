"""Fixtures that several test modules share."""

import dataclasses
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # so that `from tests...` also works under a bare `pytest`
    sys.path.insert(0, str(ROOT))

from jmla import kernels  # noqa: E402
from jmla.kernels import dispatch, launch, launch_pallas  # noqa: E402
from tests.golden import weights as golden_weights  # noqa: E402


@dataclasses.dataclass(frozen=True)
class GoldenCheckpoint:
    """A golden model on disk.

    Attributes:
        path: the checkpoint's folder: config.json and float32 safetensors in the family's original dialect.
        arrays: the golden file (see tests/golden/README.md).
        digest: hash of the weights that were drawn.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    digest: str

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(str(self.arrays["config"]))

    @property
    def selected(self) -> dict[int, np.ndarray]:
        """Layer -> ``[T + 64, k]``, ascending and -1 filled."""
        prefix = "selected_"
        return {int(k.removeprefix(prefix)): v for k, v in self.arrays.items() if k.startswith(prefix)}


@pytest.fixture(scope="session")
def golden_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GoldenCheckpoint]:
    """``golden_checkpoint(case)`` writes the case's checkpoint, once a session."""
    made: dict[str, GoldenCheckpoint] = {}

    def get(case: str) -> GoldenCheckpoint:
        if case not in made:
            with np.load(ROOT / "tests" / "golden" / f"{case}.npz") as stored:
                arrays = {name: stored[name] for name in stored.files}
            config = json.loads(str(arrays["config"]))
            drawn = golden_weights.make(config, int(arrays["seed"]))
            path = tmp_path_factory.mktemp("golden") / case
            golden_weights.write_checkpoint(path, config, drawn)
            made[case] = GoldenCheckpoint(path, arrays, golden_weights.digest(drawn))
        return made[case]

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the suites of operations over their implementations; see ``implementation``."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    chosen = any("implementation" in (n if isinstance(n, tuple) else n.split(",")) for n in named)  # by the test itself
    if "implementation" not in metafunc.fixturenames or chosen:
        return
    params: list[Any] = ["xla", pytest.param("triton", marks=pytest.mark.gpu)]
    op = metafunc.module.__name__.rpartition("test_kernels_")[2]
    if "cute" in dispatch.implementations(op):
        params.append(pytest.param("cute", marks=pytest.mark.gpu))
    if op == "kv_pack" and importlib.util.find_spec("cutlass") is not None:
        params.append(pytest.param("cute", id="cute-lanes"))
    if "pallas" in dispatch.implementations(op):
        params += ["pallas", pytest.param("pallas", marks=pytest.mark.gpu, id="pallas-gpu")]
    metafunc.parametrize("implementation", params, indirect=True)


# Tests of many sizes, each of which is compiled or run on its own; others show the same of emulated kernels.
MANY_PROGRAMS = {
    ("tests/test_kernels_compress.py::test_f2_cuts_are_bitwise_equal_at_ratio_128", "pallas"),
    ("tests/test_kernels_compress.py::test_f6_ragged_rows_and_padding_are_inert", "pallas"),
    ("tests/test_kernels_compress.py::test_rejected_drafts_are_overwritten", "pallas"),
    ("tests/test_kernels_kv_pack.py::test_a_row_has_the_same_bytes_whatever_rows_stand_beside_it", "cute"),
}


def _emulated(item: pytest.Item) -> str | None:
    """The implementation whose kernel a test runs without a GPU, as a program or in Python: "pallas" or "cute"."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    named = params.get("implementation")
    return named if named in ("pallas", "cute") and item.get_closest_marker("gpu") is None else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases that a test has for an emulated kernel, which takes long, the first one is usual."""
    seen = set(MANY_PROGRAMS)
    for item in items:
        if named := _emulated(item):
            test = (item.nodeid.partition("[")[0], named)
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


@pytest.fixture
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of each implementation that suites of operations run over.

    Kernels run on a GPU with ``-m gpu``. Without one Triton's run in Triton's interpreter, with ``-m gpu`` too and
    TRITON_INTERPRET=1, Pallas's as XLA programs, and the packer's CuTe kernel on NumPy arrays of threads. On the GPU a
    CuTe kernel that cannot be compiled is an error.
    """
    device = any(device.platform == "gpu" for device in jax.devices())
    if _emulated(request.node) == "pallas":
        monkeypatch.setattr(launch_pallas, "interpreting", True)
        monkeypatch.setenv("JMLA_DISABLE", "triton,cute")  # for what the tests need beside the kernel
        with kernels.target(compute_capability=120):
            yield request.param
    elif _emulated(request.node) == "cute":
        cute = pytest.importorskip("jmla.kernels.kv_pack.cute", reason="nvidia-cutlass-dsl is not installed")
        from tests import cute_lanes

        monkeypatch.setattr(cute, "call", cute_lanes.call)
        anywhere = dispatch.Implementation("cute", cute.kv_pack)
        monkeypatch.setitem(dispatch._registry["kv_pack"], "cute", anywhere)
        yield request.param
    elif request.param == "cute" and device:
        from jmla.kernels import cute_cache

        former = cute_cache.configure(strict=True)
        yield request.param
        cute_cache.configure(**vars(former))
    elif request.param == "xla" or device:
        yield request.param
    elif request.param == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        from tests import triton_interpreter

        launch.interpreter = triton_interpreter.run
        with kernels.target(compute_capability=120):
            yield request.param
        launch.interpreter = None
    else:
        pytest.skip("needs an NVIDIA GPU, or for Triton TRITON_INTERPRET=1")


MAPS = 40_000  # of the 65,530 memory maps that Linux gives a process by default


@pytest.fixture(autouse=True)
def _make_room_for_programs() -> None:
    """Drops compiled programs where a module has so many that the compiler would soon find no memory."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        _drop_programs()


@pytest.fixture(autouse=True, scope="module")
def _release_compiled_programs() -> Iterator[None]:
    """Drops a module's compiled programs: on the CPU each holds hundreds of memory maps, which Linux limits."""
    yield
    _drop_programs()


def _drop_programs() -> None:
    jax.clear_caches()
    gc.collect()

"""Fixtures that several test modules share."""

import dataclasses
import gc
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
from jmla.kernels import launch  # noqa: E402
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


@pytest.fixture(params=["xla", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of each implementation that suites of operations run over.

    Triton's kernels run on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter; ``-m gpu`` selects them.
    """
    if request.param == "xla" or any(device.platform == "gpu" for device in jax.devices()):
        yield request.param
    elif os.environ.get("TRITON_INTERPRET") == "1":
        from tests import triton_interpreter

        launch.interpreter = triton_interpreter.run
        with kernels.target(compute_capability=120):
            yield request.param
        launch.interpreter = None
    else:
        pytest.skip("needs an NVIDIA GPU, or TRITON_INTERPRET=1")


@pytest.fixture(autouse=True, scope="module")
def _release_compiled_programs() -> Iterator[None]:
    """Drops a module's compiled programs: on the CPU each holds hundreds of memory maps, which Linux limits."""
    yield
    jax.clear_caches()
    gc.collect()

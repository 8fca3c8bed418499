"""Some results of each operation's Triton kernels, on a machine without a GPU, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = {  # operation -> quick tests of tests/test_kernels_<operation>.py with its Triton implementation
    "compress": [
        "whole_sequence[triton-csa]",
        "whole_sequence[triton-hca128]",
        "rejected_drafts_are_overwritten[triton]",
    ],
    "index_scores": [
        "named_shapes[triton-v3.2]",
        "named_shapes[triton-v4-flash]",
        "vmap[triton]",
        "every_plan_gives_the_same_bits[table-tile128-tiles2-early1-rows8-triton]",
    ],
    "kv_pack": [
        "norm_and_rotation_of_every_part[triton-v3.2]",
        "norm_and_rotation_of_every_part[triton-v4-window]",
        "norm_and_rotation_of_every_part[triton-v4-index]",
        "norm_and_rotation_of_every_part[triton-plain-576]",
        "two_blocks_of_rows_in_a_program[v4-window-32-triton]",
        "two_blocks_of_rows_in_a_program[v4-index-32-triton]",
        "two_blocks_of_rows_in_a_program[norm-into-rope-34-triton]",
    ],
    "resolve_slots": [
        "lengths_of_the_specification[triton]",
        "split_segments_and_the_combined_row[triton]",
        "window_is_ascending_and_left_packed[triton]",
    ],
    "sinkhorn": ["equals_the_formula[triton-64-4-20]", "rows_are_on_their_own[triton]"],
    "sparse_mla": ["named_shapes[triton-v3.2]", "named_shapes[triton-glm-5]", "named_shapes[triton-v4-flash-csa]"],
    "top_k": [
        "hard_rows[triton-512-5000]",
        "other_dtypes[triton-bfloat16]",
        "rows_wider_than_a_program[triton-40001-512]",
    ],
}


def test_every_operation_with_kernels_is_interpreted_and_lowered() -> None:
    operations = {path.parent.name for path in (ROOT / "kernels").glob("*/triton.py")}
    assert operations == set(CASES)
    assert operations <= {path.stem.removeprefix("test_lowering_") for path in (ROOT / "tests").glob("test_lowering_*")}


def test_results() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET where a kernel is defined."""
    pytest.importorskip("triton", reason="the extra 'lowering' is not installed")
    pytest.importorskip("jax_triton", reason="the extra 'lowering' is not installed")
    tests = [f"tests/test_kernels_{operation}.py::test_{name}" for operation, names in CASES.items() for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(tests)} passed" in done.stdout, done.stdout

"""The benchmark of the operations, as far as it runs without a GPU: XLA on the CPU."""

import collections

import pytest

from jmla.bench import kernels, timing
from jmla.bench.case import Case, Work
from jmla.kernels.dispatch import CannotRun


def test_cases_have_names_of_their_own():
    names = collections.Counter((case.op, case.name) for case in kernels.all_cases())
    assert max(names.values()) == 1
    assert {op for op, _ in names} == set(kernels.OPS)
    assert [case.name for case in kernels.all_cases("v3.2 decode, batch 128")] == ["v3.2 decode, batch 128"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_come_in_order_whoever_prepares_them(jobs):
    wanted = kernels.all_cases("sinkhorn")
    rows = list(kernels._rows("sinkhorn", ("xla",), jobs))
    assert [row["case"] for row in rows] == [case.name for case in wanted]
    for row in rows:
        assert row["us"]["xla"] > 0
        assert "errors" not in row
        assert kernels.line(row, None).startswith(f"| sinkhorn | {row['case']} | - |")


def test_one_failing_implementation_does_not_lose_the_others():
    def build():
        import jax.numpy as jnp

        def run(name):
            if name == "triton":
                raise ZeroDivisionError("no such kernel")
            return lambda x: x + 1

        return Work(run, [(jnp.ones(4),)])

    row = kernels.times(Case("op", "case", build, implementations=("triton", "xla")), None)
    assert row["errors"] == {"triton": "ZeroDivisionError: no such kernel"}
    assert row["us"]["xla"] > 0
    assert "ZeroDivisionError" in kernels.line(row, None)


def test_a_kernel_that_is_not_for_these_rows_is_no_failure():
    def build():
        import jax.numpy as jnp

        def run(name):
            if name != "xla":
                raise CannotRun(f"{name} cannot run: has no epilogue")
            return lambda x: x + 1

        return Work(run, [(jnp.ones(4),)])

    row = kernels.times(Case("op", "case", build, implementations=("cute", "xla")), None)
    assert row["refused"] == {"cute": "CannotRun: cute cannot run: has no epilogue"}
    assert "errors" not in row
    assert kernels.line(row, None).endswith("| cute - |")
    row = kernels.times(Case("op", "case", build, implementations=("triton", "xla")), None)
    assert row["errors"] == {"triton": "CannotRun: triton cannot run: has no epilogue"}


def test_what_a_case_is_about_is_timed_beside_the_operation_without_it():
    def build():
        import jax.numpy as jnp

        return Work(lambda name: lambda x: jnp.sin(x), [(jnp.ones(4),)], without=lambda name: lambda x: x + 1)

    row = kernels.times(Case("op", "case", build, implementations=("xla",)), None)
    assert row["us"].keys() == row["without_us"].keys() == {"xla"}
    assert f"xla without {row['without_us']['xla']:.1f}" in kernels.line(row, None)


def test_a_process_that_times_is_alone(tmp_path, monkeypatch):
    import fcntl

    path = str(tmp_path / "turns")
    monkeypatch.setattr(timing, "_turns", None)
    with timing.device(alone=True):  # nothing to wait for
        pass
    timing.take_turns(path)
    with open(path, "w") as other:
        with timing.device(alone=False):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_UN)
        with timing.device(alone=True), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

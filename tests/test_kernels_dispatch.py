"""The choice of implementations, its report, and value checks that cost nothing when off."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmla
from jmla import kernels
from jmla.kernels import checks, dispatch, launch, layouts
from jmla.kernels.shapes import ATTENTION
from jmla.kernels.sparse_mla import choice as cute_choice
from jmla.models import make_model
from jmla.models.random import init_random
from tests.kernel_calls import forbid
from tests.tiny import V4


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """An operation with a CUDA implementation (adds 100, refuses few heads) before the XLA one (adds 1)."""
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.delenv("JMLA_DISABLE", raising=False)

    def why_not(where: dispatch.Target, shapes: dict) -> str | None:
        if where.compute_capability == 75:
            return "needs compute capability 80"
        return f"heads={shapes['heads']} below 8" if shapes["heads"] < 8 else None

    dispatch.register("toy", "triton", lambda x, add: x + 100 * add, platform="cuda", why_not=why_not)
    dispatch.register("toy", "xla", lambda x, add: x + add)
    return "toy"


def run(x: jax.Array, heads: int = 16, implementation: str | None = None, **more: str) -> jax.Array:
    return dispatch.call("toy", implementation, {"heads": heads} | more, x, add=1)


def test_choice_follows_the_arrays_and_is_logged_once(toy: str, caplog: pytest.LogCaptureFixture) -> None:
    x = jax.device_put(jnp.zeros(2), jax.devices("cpu")[0])
    with caplog.at_level(logging.INFO, "jmla.kernels"):
        assert run(x).tolist() == [1, 1]
        run(x)
        for heads in range(4, 40):  # the same decision
            run(x, heads=heads)
        run(x, layout="footer")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "toy [heads=16] is served by xla; not triton: runs on cuda, the target is cpu",
        "toy [heads=16, layout=footer] is served by xla; not triton: runs on cuda, the target is cpu",
    ]
    assert len(dispatch.report()) == 2
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_memory_of_choices_is_bounded(toy: str, caplog: pytest.LogCaptureFixture) -> None:
    x = jnp.zeros(2)
    with caplog.at_level(logging.INFO, "jmla.kernels"):
        for number in range(dispatch.MOST_CHOICES + 50):
            run(x, layout=f"made up {number}")
    assert len(dispatch.report()) == dispatch.MOST_CHOICES
    assert len(caplog.records) == dispatch.MOST_CHOICES + 1
    assert "no further choices are kept" in caplog.records[-1].getMessage()


def test_choice_inside_jit_is_left_to_the_lowering(toy: str) -> None:
    assert jax.jit(run)(jnp.zeros(2)).tolist() == [1, 1]
    traced = jax.jit(run).trace(jnp.zeros(2))
    cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "1.000000e+02" in cuda
    assert "1.000000e+02" not in cpu
    assert dispatch.report()[-1].implementation == "triton on cuda or xla"


def test_target_context_chooses_and_retraces(toy: str) -> None:
    step = jax.jit(run)
    assert "1.000000e+02" not in step.lower(jnp.zeros(2)).as_text()
    with kernels.target(compute_capability=90) as where:
        assert where == dispatch.Target("cuda", 90)
        assert "1.000000e+02" in step.trace(jnp.zeros(2)).lower(lowering_platforms=("cuda",)).as_text()
        assert dispatch.report()[-1].others == (("xla", "triton comes first"),)
    with kernels.target(compute_capability=75):
        assert "1.000000e+02" not in step.trace(jnp.zeros(2)).lower(lowering_platforms=("cuda",)).as_text()
        assert dispatch.report()[-1].others == (("triton", "needs compute capability 80"),)
    with kernels.target(platform="cpu"):
        assert step(jnp.zeros(2)).tolist() == [1, 1]
    with pytest.raises(ValueError, match="platform"), kernels.target(compute_capability=90, platform="cpu"):
        pass
    with pytest.raises(ValueError, match="compute_capability"), kernels.target():
        pass


def test_a_named_implementation_that_cannot_run_is_an_error_with_the_reason(toy: str) -> None:
    x = jnp.zeros(2)
    assert run(x, implementation="xla").tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"triton of toy cannot run: runs on cuda.*supported: xla"):
        run(x, implementation="triton")
    with kernels.target(compute_capability=90), pytest.raises(ValueError, match="heads=4 below 8"):
        run(x, heads=4, implementation="triton")
    with pytest.raises(ValueError, match="triton, xla"):
        run(x, implementation="cute")


def test_operator_switch(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JMLA_DISABLE", "cute, triton")
    with kernels.target(compute_capability=90):
        assert run(jnp.zeros(2)).tolist() == [1, 1]
        assert dispatch.report()[-1].others == (("triton", "disabled by JMLA_DISABLE"),)
        with pytest.raises(ValueError, match="disabled by JMLA_DISABLE"):
            run(jnp.zeros(2), implementation="triton")
    monkeypatch.setenv("JMLA_DISABLE", "xla,triton")
    with pytest.raises(ValueError, match="No implementation of toy"):
        run(jnp.zeros(2))
    monkeypatch.setenv("JMLA_DISABLE", "trition")
    with pytest.raises(ValueError, match="trition"):
        run(jnp.zeros(2))


def test_report_is_a_table(toy: str) -> None:
    run(jnp.zeros(2))
    kernels.merge(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3)))
    rows = kernels.report()
    assert [(row.op, row.implementation) for row in rows] == [("toy", "xla"), ("merge", "xla")]
    lines = str(rows).splitlines()
    assert lines[0].split() == ["operation", "serves", "shapes", "others"]
    assert lines[1].split()[:3] == ["toy", "xla", "heads=16"]
    assert "triton: runs on cuda, the target is cpu" in lines[1]


def test_every_operation_has_an_xla_implementation_and_takes_its_name() -> None:
    ops = ("kv_pack", "kv_unpack", "resolve_slots", "merge", "sparse_mla", "index_scores", "top_k", "compress")
    for op in ops:
        assert "xla" in dispatch.implementations(op)
        assert callable(getattr(kernels, op))
    with pytest.raises(ValueError, match="name"):
        dispatch.register("toy", "mosaic", lambda: None)


LAYOUT = layouts.footer584(4, nope=24, rope=8)


def operations(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> tuple:
    """Every operation once, on small shapes."""
    pool = kernels.kv_pack(rows, slots, pool, layout=LAYOUT)
    read = kernels.kv_unpack(pool, slots, layout=LAYOUT)
    table, row = jnp.array([[0, 1]]), jnp.array([0])
    index = layouts.index132(4, width=16)
    keys = kernels.kv_pack(rows[:, :16], slots, index.zeros(2), layout=index)
    scores = kernels.index_scores(
        rows[:1, None, :16], jnp.ones((1, 1)), keys, layout=index, lengths=jnp.array([2]), table=table
    )
    chosen, lengths = kernels.resolve_slots(kernels.top_k(scores, jnp.array([2]), 2), row, table, page_size=4)
    out, lse = kernels.sparse_mla(rows[:1, None], pool, chosen, lengths, layout=LAYOUT, scale=1.0)
    state = jnp.zeros((1, 8, 16))
    entries = kernels.compress(
        rows[None, :, :8],
        rows[None, :, :8],
        state,
        jnp.array([[0, 1]]),
        ratio=4,
        overlap=True,
        ape=jnp.zeros((4, 8)),
    )
    return read, kernels.merge(out[None], lse[None]), entries


def test_value_checks_cost_nothing_when_off() -> None:
    args = (LAYOUT.zeros(2), jnp.ones((2, 32)), jnp.array([0, 1]))
    assert "callback" not in str(jax.make_jaxpr(operations)(*args))
    with kernels.debug_checks():
        assert "callback" in str(jax.make_jaxpr(operations)(*args))
    assert "callback" not in str(jax.make_jaxpr(operations)(*args))


def test_checks_reach_functions_that_were_compiled_before() -> None:
    step = jax.jit(operations)
    pool, rows = LAYOUT.zeros(2), jnp.ones((2, 32))
    jax.block_until_ready(step(pool, rows, jnp.array([0, 9])))  # 9 is a hole, silently
    with pytest.raises(kernels.ValueCheckError, match=r"slots\[1\] = 9"), kernels.debug_checks():
        step(pool, rows, jnp.array([0, 9]))
    with kernels.debug_checks():
        step(pool, rows, jnp.array([0, 1]))
    jax.block_until_ready(step(pool, rows, jnp.array([0, 9])))


def test_an_error_inside_the_context_is_not_hidden() -> None:
    with pytest.raises(KeyError), kernels.debug_checks():
        raise KeyError("mine")
    assert not checks.checking()


def test_a_compiled_check_outside_a_context_raises_by_itself() -> None:
    def check(x: jax.Array) -> jax.Array:
        checks.check_values("op", "x", x < 0, x, "to be at least 0")
        return x + 1

    np.testing.assert_array_equal(jax.jit(check)(jnp.array([1, 2])), [2, 3])

    def run_to_the_end() -> None:
        jax.block_until_ready(jax.jit(check)(jnp.array([1, -2])))
        jax.effects_barrier()

    with pytest.raises(Exception, match=r"x\[1\] = -2"):  # JAX wraps errors of callbacks in a type of its own
        run_to_the_end()


def test_host_integers_are_checked_before_jax_cuts_them() -> None:
    assert checks.int32_array("x", [1, -1]).dtype == jnp.int32
    assert checks.int32_array("x", []).shape == (0,)
    assert checks.int32_array("x", np.array([2**31 - 1], np.uint64)).tolist() == [2**31 - 1]
    for bad in ([2**31], np.array([2**32 + 3]), np.array([2**63], np.uint64), -(2**31) - 1):
        with pytest.raises(ValueError, match="int32"):
            checks.int32_array("x", bad)
    for bad in ([0.5], np.array([True]), jnp.array([1.0])):
        with pytest.raises(TypeError, match="int32"):
            checks.int32_array("x", bad)


def test_triton_is_left_out_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a known target, as under jit, the GPU that is there decides; a broken installation is a reason too."""
    monkeypatch.setattr(launch, "_broken", lambda: None)
    monkeypatch.setattr(launch, "_first_gpu", lambda: 80)
    assert "compute capability 9.0" in str(launch.unavailable(dispatch.Target()))
    assert "compute capability 9.0" in str(launch.unavailable(dispatch.Target("cuda", 89)))
    assert launch.unavailable(dispatch.Target("cuda", 120)) is None
    monkeypatch.setattr(launch, "_broken", lambda: "jax-triton cannot be imported")
    assert launch.unavailable(dispatch.Target("cuda", 120)) == "jax-triton cannot be imported"


# ---- implementations that give way, and those that cannot serve after all


def race(function: Any = lambda x, add: x + 10 * add, rival: str = "triton") -> None:
    """Registers an operation whose first implementation is faster from 64 rows on."""

    def slower(shapes: dict) -> str | None:
        return None if shapes["rows"] >= 64 else "3 us against 2"

    known = dispatch.Rival(rival, slower, lambda shapes: "4 us against 5")
    dispatch.register("race", "cute", function, platform="cuda", rival=known)
    dispatch.register("race", "triton", lambda x, add: x + 100 * add, platform="cuda")
    dispatch.register("race", "xla", lambda x, add: x + add)


def run_race(rows: int, implementation: str | None = None) -> float:
    return dispatch.call("race", implementation, {"rows": rows}, jnp.zeros(()), add=1).item()


@pytest.mark.usefixtures("toy")
def test_an_implementation_gives_way_where_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    race()
    with kernels.target(compute_capability=90):
        assert run_race(64) == 10
        first = "cute comes first"
        assert dispatch.report()[-1].others == (("triton", f"{first}: 4 us against 5"), ("xla", first))
        assert run_race(1) == 100
        assert dispatch.report()[-1].others == (("cute", "3 us against 2"), ("xla", "triton comes first"))
        assert run_race(1, "cute") == 10  # named, it serves
        monkeypatch.setenv("JMLA_DISABLE", "triton")
        assert run_race(1) == 10  # to nobody, if the other cannot serve
        monkeypatch.setenv("JMLA_DISABLE", "cute")
        assert run_race(1) == 100
        assert ("cute", "disabled by JMLA_DISABLE") in dispatch.report()[-1].others
    monkeypatch.delenv("JMLA_DISABLE")
    with kernels.target(platform="cpu"):
        assert run_race(1) == 1


@pytest.mark.usefixtures("toy")
def test_a_rival_that_is_not_there_takes_nothing() -> None:
    race(rival="pallas")
    with kernels.target(compute_capability=90):
        assert run_race(1) == 10


@pytest.mark.parametrize("known", [True, False], ids=["target", "no target"])
@pytest.mark.usefixtures("toy")
def test_the_next_one_serves_where_the_chosen_one_declines(known: bool, caplog: pytest.LogCaptureFixture) -> None:
    chosen = []

    def declines(x: jax.Array, add: int) -> jax.Array:
        chosen.append(dispatch.choosing())
        raise dispatch.Declined("no such kernel")

    race(declines)
    assert not dispatch.choosing()
    where = kernels.target(compute_capability=90) if known else contextlib.nullcontext()

    def step() -> jax.Array:
        return dispatch.call("race", None, {"rows": 64}, jnp.zeros(()), add=1)

    with where, caplog.at_level(logging.INFO, "jmla.kernels"):
        traced = jax.jit(step).trace()
        assert "1.000000e+02" in traced.lower(lowering_platforms=("cuda",)).as_text()
        (choice,) = dispatch.report()  # of what serves
        assert choice.implementation == "triton on cuda"
        assert ("cute", "no such kernel") in choice.others
        if known:
            with pytest.raises(dispatch.Declined):
                run_race(64, "cute")
        else:
            assert "1.000000e+02" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert chosen == [True, False][: len(chosen)]
    assert "served by triton" in caplog.text


def attention(name: str, rows: int, **changes: Any) -> dict[str, Any]:
    """What the attention states of a call."""
    shape = dataclasses.replace(ATTENTION[name], **changes)
    columns = (shape.columns, shape.extra_columns)
    stated = {"R": rows, "H": shape.heads, "q": "bfloat16", "epilogue": False, "_deterministic": False}
    return stated | {"_layouts": (shape.layout,), "_columns": columns}


TIMES = (  # not measured anywhere
    cute_choice.Measured("v4-flash-csa", 1, 10.4, 10.4),
    cute_choice.Measured("v4-flash-csa", 8, 15.9, 12.5),
    cute_choice.Measured("v4-flash-csa", 32, 18.8, 19.6),
    cute_choice.Measured("v4-flash-csa", 128, 28.7, 34.9),
)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (attention("v4-flash-csa", 32), None),
        (attention("v4-flash-csa", 64), None),
        (attention("v4-flash-csa", 512), None),
        (attention("v4-flash-hca", 64, extra_columns=256), None),
        (attention("v4-flash-csa", 1), "10.4 us against 10.4 of triton on v4-flash-csa, batch 1"),
        (attention("v4-flash-csa", 9), "15.9 us against 12.5 of triton on v4-flash-csa, batch 8"),
        (attention("v4-flash-hca", 64), "was not measured"),
        (attention("v4-pro-csa", 64), "was not measured"),
        (attention("v4-flash-csa", 4096), "was not measured"),
        (attention("v4-flash-csa", 64, heads=16), "was not measured"),
        (attention("v4-flash-window", 8), "was not measured"),
        (attention("v3.2", 64), "was not measured"),
        (attention("v4-flash-csa", 0), "was not measured"),
        (attention("v4-flash-csa", 64) | {"epilogue": True}, None),
        (attention("v4-flash-csa", 64) | {"q": "float8_e4m3fn"}, "was not measured"),
    ],
)
def test_where_the_attention_is_left_to_triton(
    shapes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cute_choice, "MEASURED", TIMES)
    said = cute_choice.slower(shapes)
    assert said is None if reason is None else str(said).startswith(reason)
    assert reason is not None or "us against" in str(cute_choice.faster(shapes))
    assert "deterministic" in str(cute_choice.slower(shapes | {"_deterministic": True}))


def test_measurements_decide_what_was_measured() -> None:
    for found in cute_choice.MEASURED:
        assert cute_choice.nearest(attention(found.case, found.rows)) == found


# ---- the target of a step


@pytest.fixture
def cpu() -> Iterator[None]:
    """Arrays go to the CPU, whatever else there is."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.usefixtures("cpu")
def test_following_knows_the_devices_that_tracing_does_not_see(toy: str) -> None:
    x = jnp.zeros(2)
    step = jax.jit(lambda x: run(x))
    step(x)
    assert dispatch.report()[-1].implementation == "triton on cuda or xla"
    with dispatch.following({"x": x}):  # the default device
        assert step(x).tolist() == [1, 1]
        assert dispatch.report()[-1].others == (("triton", "runs on cuda, the target is cpu"),)
        with dispatch.following(x), jax.default_device("cpu"):
            assert dispatch.current_target() == dispatch.Target("cpu")
    with kernels.target(compute_capability=90), dispatch.following(x):
        assert dispatch.current_target() == dispatch.Target("cuda", 90)
    with jax.set_mesh(jax.make_mesh((1,), ("x",))), dispatch.following(x):
        assert dispatch._target.value is None  # tracing sees the mesh
        assert dispatch.current_target() == dispatch.Target("cpu")
    assert dispatch.current_target() == dispatch.Target()

    def traced(x: jax.Array) -> jax.Array:
        with dispatch.following(x, np.zeros(2)):
            assert dispatch.current_target() == dispatch.Target()
        return x

    jax.jit(traced)(x)


class Device:
    """As JAX describes a device that is not here."""

    platform, compute_capability = "gpu", "9.0"


class Held(jax.Array):
    """An array, as far as its devices go."""

    def __init__(self, *devices: Device | jax.Device, committed: bool):
        self._devices, self._committed = set(devices), committed

    committed = property(lambda self: self._committed)

    def devices(self) -> set:
        return self._devices


@pytest.mark.usefixtures("cpu")
def test_following_takes_the_device_of_the_first_bound_array() -> None:
    """As JAX does: an array that is bound to a device takes the program there, others go to the default device."""
    here, there = jax.devices("cpu")[0], Device()
    held = {committed: Held(there, committed=committed) for committed in (False, True)}
    with dispatch.following(held[False], np.zeros(2)):
        assert dispatch.current_target() == dispatch.Target("cpu")
    with dispatch.following(jnp.zeros(2), held[True]):
        assert dispatch.current_target() == dispatch.Target("cuda", 90)
    with dispatch.following(jax.device_put(jnp.zeros(2), here), held[True]):
        assert dispatch.current_target() == dispatch.Target("cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("cpu")
def test_steps_choose_for_the_devices_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to run a model knows its target while it is traced, and never asks for the default backend."""

    def unasked() -> str:
        raise AssertionError("Expected nobody to ask for the default backend")

    monkeypatch.setattr(jax, "default_backend", unasked)
    monkeypatch.setattr(launch, "_broken", lambda: None)  # while tracing alone, "triton on cuda or xla" would serve
    monkeypatch.setattr(dispatch, "_choices", {})
    jax.clear_caches()
    config = dataclasses.replace(V4, num_hidden_layers=1, layer_kinds=("window",), layer_routing=("hash",))
    model = make_model(config, jax.tree.map(jnp.asarray, init_random(config)), dtype="float32", kv_layout="float32")
    ids = np.arange(2, 14, dtype=np.int32)[None]

    def served() -> set[str]:
        names = {choice.implementation for choice in dispatch.report()}
        assert {"sparse_mla", "kv_pack"} <= {choice.op for choice in dispatch.report()}
        dispatch._choices.clear()
        return names

    cache = jmla.init_cache(model, 1, 256)
    _, hidden, cache = jmla.prefill(model, ids, [12], cache, return_hidden=True)
    assert served() == {"xla"}
    jmla.decode(model, [3], jmla.copy(cache))
    assert served() == {"xla"}
    jmla.draft(model, hidden, ids, cache)
    assert served() == {"xla"}
    jmla.forward(model, ids)
    assert served() == {"xla"}
    jmla.generate(model, ids.tolist(), max_new_tokens=3)
    assert served() == {"xla"}
    jmla.generate_tokens(model, ids, [12], jax.random.key(0), max_new_tokens=3)
    assert served() == {"xla"}


# ---- the operator's switch, on the real operations


@pytest.mark.usefixtures("cpu")
def test_a_switched_off_triton_leaves_every_operation_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU, whose kernels here fail when they are called: so does each operation, until Triton is disabled."""
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.setattr(launch, "_broken", lambda: None)
    monkeypatch.delenv("JMLA_DISABLE", raising=False)
    page, width, rows = 4, 128, jnp.asarray(np.random.default_rng(0).standard_normal((3, 128)), jnp.bfloat16)
    layout, index = layouts.plain(width, "bfloat16", page), layouts.index132(page, width=width)
    pool = layout.zeros(2).at[:].set(jnp.tile(rows.reshape(-1), 2)[: page * width])
    keys = jnp.full_like(index.zeros(2), 0x30)
    slots = jnp.array([[5, 0, -1]], jnp.int32)
    calls = {
        "kv_pack": lambda: kernels.kv_pack(rows, slots[0], pool, layout=layout),
        "index_scores": lambda: kernels.index_scores(
            rows[:1, None], jnp.ones((1, 1)), keys, layout=index, lengths=jnp.array([6]), table=jnp.array([[1, 0]])
        ),
        "top_k": lambda: kernels.top_k(jnp.array([[1.0, 3.0, 2.0]]), None, 2),
        "resolve_slots": lambda: kernels.resolve_slots(slots, jnp.array([0]), jnp.array([[1, 0]]), page_size=page),
        "sparse_mla": lambda: kernels.sparse_mla(rows[:1, None], pool, slots, layout=layout, scale=0.1),
        "sinkhorn": lambda: kernels.sinkhorn(jnp.ones((2, 4, 4)), iters=2, eps=0.0),
        "compress": lambda: kernels.compress(
            rows[None], rows[None], jnp.zeros((1, 4, 256)), slots * 0, ratio=4, overlap=False, ape=jnp.ones((4, 128))
        ),
    }
    expected = {op: jax.tree.map(np.asarray, call()) for op, call in calls.items()}  # on the CPU
    for op in calls:
        forbid(monkeypatch, op, "triton")
    with kernels.target(compute_capability=90):
        for op, call in calls.items():
            with pytest.raises(AssertionError, match=f"triton was called for {op}"):
                call()
        monkeypatch.setenv("JMLA_DISABLE", "triton,cute")
        dispatch._choices.clear()
        for op, call in calls.items():
            jax.tree.map(np.testing.assert_array_equal, call(), expected[op])
    chosen = {choice.op: choice for choice in dispatch.report()}
    assert set(chosen) == set(calls)
    for choice in chosen.values():
        assert choice.implementation == "xla"
        assert ("triton", "disabled by JMLA_DISABLE") in choice.others
        assert "triton: disabled by JMLA_DISABLE" in str(dispatch.report())


def test_the_portable_kernel_serves_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layouts.inline656(64)
    q, pool, slots = jnp.zeros((1, 64, 576), jnp.bfloat16), layout.zeros(1), jnp.zeros((1, 4), jnp.int32)
    call = functools.partial(kernels.sparse_mla, q, pool, slots, layout=layout, scale=1.0)
    call()
    others = dict(dispatch.report()[-1].others)
    assert "portable" in others
    with pytest.raises(ValueError, match="portable of sparse_mla cannot run"):
        call(implementation="portable")
    monkeypatch.setenv("JMLA_DISABLE", "portable")
    with pytest.raises(ValueError, match="disabled by JMLA_DISABLE"):
        call(implementation="portable")
    call()
    assert ("portable", "disabled by JMLA_DISABLE") in dispatch.report()[-1].others

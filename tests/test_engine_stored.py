"""Compiled programs on disk: what finds them again, and what a damaged, foreign or unwritable directory costs."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jmla
from jmla.engine import Engine, programs, stored
from jmla.engine.programs import Programs
from jmla.engine.stored import ProgramStore
from jmla.kernels import dispatch, target
from jmla.models import moe
from tests.test_engine import model


@jax.jit
def double(x):
    return 2 * x


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in a new directory, which engines' programs use too."""
    made = ProgramStore(tmp_path / "programs")
    monkeypatch.setattr(programs.ProgramStore, "open", lambda: made)
    return made


@pytest.fixture
def traced(monkeypatch):
    """Names of functions that were compiled for want of a stored program."""
    seen = []
    finish = programs._finish
    monkeypatch.setattr(programs, "_finish", lambda *args: seen.append(args[2]) or finish(*args))
    return seen


def compile_double(x):
    made = Programs()
    made.compile([(double, (x.shape,), (x,))], 1, False)
    assert made.has(double, (x.shape,))
    np.testing.assert_array_equal(made.run(double, (x.shape,), x), 2 * np.asarray(x))


def test_a_program_is_compiled_once(store, traced):
    for _ in range(3):
        compile_double(jnp.arange(4.0))
    assert len(traced) == 1


@pytest.mark.parametrize("change", ["shape", "dtype", "option", "source", "flags", "key"])
def test_whatever_changes_a_program_is_another_one(store, traced, monkeypatch, change):
    compile_double(jnp.arange(4.0))
    x, key, context = jnp.arange(4.0), (4,), jax.default_matmul_precision(None)
    if change == "shape":
        x = jnp.arange(5.0)
    elif change == "dtype":
        x = jnp.arange(4)
    elif change == "option":
        context = jax.default_matmul_precision("float32")
    elif change == "source":
        monkeypatch.setattr(stored, "SOURCES", "another release")
        monkeypatch.setattr(stored, "_read_sources", lambda: "another release")
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    with context:
        if change == "key":
            assert store.name(double, key, (x,)) != store.name(double, (5,), (x,))
            return
        compile_double(x)
    assert len(traced) == 2


@pytest.mark.parametrize("damage", ["cut", "turned", "empty", "foreign"])
def test_a_damaged_program_is_compiled_again(store, traced, damage, caplog):
    x = jnp.arange(4.0)
    compile_double(x)
    (path,) = store._directory.iterdir()
    whole = path.read_bytes()
    turned = bytearray(whole)
    turned[len(turned) // 2] ^= 1
    damaged = {"cut": whole[: len(whole) // 2], "turned": bytes(turned), "empty": b"", "foreign": b"x" * 99}
    path.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING, "jmla.engine"):
        compile_double(x)
    assert len(traced) == 2
    assert "cannot be used and is compiled again" in caplog.text
    compile_double(x)
    assert len(traced) == 2


def test_where_nothing_can_be_written_programs_run_all_the_same(tmp_path, monkeypatch, traced, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(programs.ProgramStore, "open", lambda: ProgramStore(tmp_path / "file" / "programs"))
    with caplog.at_level(logging.WARNING, "jmla.engine"):
        compile_double(jnp.arange(4.0))
    assert "could not be stored" in caplog.text


def test_it_is_beside_jax_cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for place in (None, "gs://bucket/cache"):
            jax.config.update("jax_compilation_cache_dir", place)
            assert ProgramStore.open() is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert ProgramStore.open()._directory == tmp_path / "jmla-programs"
        with jmla.debug_checks():
            assert ProgramStore.open() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def hits(tmp_path):
    """JAX's own persistent cache, in a new directory, and what was found in it so far."""
    seen = []

    def listen(event, **_):
        if event.endswith("/cache_hits"):
            seen.append(event)

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def start(x):
    """Makes and runs a program as a new process would, which has none in memory."""

    @jax.jit
    def several(x):
        return jnp.cumsum(jnp.tanh(x)), jnp.sort(-x), jax.lax.top_k(2 * x, 2)

    made = Programs()
    made.compile([(several, (), (x,))], 1, False)
    return made.run(several, (), x), several


@pytest.mark.parametrize("kept", [False, True], ids=["new", "in memory"])
def test_what_comes_from_jax_cache_is_stored_whole_or_not_at_all(store, traced, hits, caplog, kept, monkeypatch):
    """On a CPU, a program that JAX has loaded has lost its machine code: stored, it would fail when it is called."""
    x = jnp.arange(5.0)
    expected, _ = start(x)
    (path,) = store._directory.iterdir()
    path.unlink()
    assert not hits
    if kept:  # from JAX's cache too, but before
        monkeypatch.setattr(programs.ProgramStore, "open", lambda: None)
        _, function = start(x)
        monkeypatch.setattr(programs.ProgramStore, "open", lambda: store)
        Programs().compile([(function, (), (x,))], 1, False)
    with caplog.at_level(logging.WARNING, "jmla.engine"):
        for _ in range(2):
            jax.tree.map(np.testing.assert_array_equal, start(x)[0], expected)
    assert hits
    assert not caplog.text


def test_sources_that_changed_after_they_were_imported_are_not_stored_under_their_new_name(store, traced, monkeypatch):
    monkeypatch.setattr(stored, "_read_sources", lambda: "another release")
    for _ in range(2):
        compile_double(jnp.arange(4.0))
    assert len(traced) == 2
    assert not store._directory.exists()


def test_options_that_change_numbers_are_part_of_a_name():
    assert {"jax_use_hlo_logistic_lowering", "jax_default_matmul_precision"} <= {name for name, _ in stored._options()}


def test_a_program_comes_with_its_own_choices(store, monkeypatch):
    made = dispatch.Choice("merge", "", "xla", (), "R=1")
    with dispatch.noting() as choices:
        jmla.kernels.merge(jnp.ones((2, 1, 1, 4)), jnp.zeros((2, 1, 1)))
    assert [choice.op for choice in choices] == ["merge"]
    store.save("one", double.trace(jnp.arange(4.0)).lower().compile(), [made])
    monkeypatch.setattr(dispatch, "_choices", {})
    assert store.load("one") is not None
    assert tuple(dispatch.report()) == (made,)


def test_what_is_known_by_address_is_not_stored(store, traced, caplog):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Held:
        x: jax.Array
        what: object = dataclasses.field(metadata={"static": True})

    args = (Held(jnp.arange(3.0), object()),)
    with caplog.at_level(logging.WARNING, "jmla.engine"):
        assert store.name(double, (), args) == ""
    assert "known by address" in caplog.text
    store.save("", None)
    assert store.load("") is None
    assert not store._directory.exists()


def test_names_do_not_depend_on_the_process():
    """An engine's programs are named by values alone, tokenizers and other objects left out."""
    engine = Engine(model("v4"), max_requests=1, pages=1)
    store = ProgramStore(None)
    for function, key, args in engine._jobs():
        assert store.name(function, key, args)


def test_experts_are_the_same_without_branches(monkeypatch):
    """On a GPU tiles of no expert are computed and left, since a branch would stop the host."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((20, 32)), jnp.bfloat16)
    chosen = jnp.asarray(np.where(rng.random((20, 2)) < 0.2, -1, rng.integers(0, 5, (20, 2))), jnp.int32)
    weights = jnp.asarray(rng.random((20, 2)), jnp.float32)
    gate_up = jnp.asarray(rng.standard_normal((5, 32, 32)), jnp.bfloat16)
    down = jnp.asarray(rng.standard_normal((5, 32, 16)), jnp.bfloat16)
    args = (x, chosen, weights, gate_up, down, None)
    with target(platform="cpu"):
        expected = moe.experts(*args)
    with target(compute_capability=90):
        np.testing.assert_array_equal(moe.experts(*args), expected)

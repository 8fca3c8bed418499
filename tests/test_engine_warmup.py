"""Programs that are compiled before the first request, and none after."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jmla import SamplingParams
from jmla.engine import Engine, Stats, stored
from jmla.engine.shapes import rectangles, shapes
from tests.test_engine import alone, check_all_back, model

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """Names of the programs that were compiled so far, one entry each."""
    seen = []

    def listen(event, _, **about):
        if event == COMPILED:
            seen.append(about)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def serve(engine, count, longest, seed=0):
    """Requests of all kinds, some of which come while others run, are cancelled, or draw several completions."""
    rng = np.random.default_rng(seed)
    handles = []
    for i in range(count):
        hot = bool(rng.integers(2))
        asked = SamplingParams(
            max_new_tokens=int(rng.integers(1, 20)),
            temperature=float(hot),
            top_k=int(rng.integers(0, 9)),
            top_p=float(rng.uniform(0.5, 1)),
            min_p=float(rng.uniform(0, 0.1)),
            seed=i,
            repetition_penalty=1.2 if i % 3 else 1.0,
            presence_penalty=0.1,
            frequency_penalty=0.2 if i % 5 else 0.0,
            logprobs=[None, 0, 20][i % 3],
            stop=[[5, 6], [7]] if i % 4 else [],
            n=3 if hot and i % 6 == 0 else 1,
        )
        tokens = rng.integers(2, 96, int(rng.integers(1, longest - 20))).astype(np.int32)
        handles.append(engine.submit(tokens, sampling=asked, priority=int(rng.integers(3))))
        if i % 5 == 0:
            engine.step()
        if i % 11 == 0:
            handles[int(rng.integers(len(handles)))].cancel()
    engine.run()
    assert all(handle.done for handle in handles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "count", "options"),
    [
        ("v32", 30, {"max_seq_len": 600, "pages": 8, "prefill_chunk": 64}),
        pytest.param("v4", 500, {"max_seq_len": 2048, "pages": 24}, marks=pytest.mark.slow),
        pytest.param("glm", 500, {"max_seq_len": 2048, "pages": 24}, marks=pytest.mark.slow),
        pytest.param("v4", 100, {"max_seq_len": 1024, "pages": 12, "drafts": 3}, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_after_warmup(family, count, options, compiled):
    engine = Engine(model(family), max_requests=4, **options)
    engine.warmup(workers=2, progress=False)
    assert len(compiled) >= 8
    before = len(compiled)
    engine.warmup(workers=2)  # once more costs nothing
    engine._run_once()  # as a warm-up on a GPU does
    assert engine.stats == Stats()
    check_all_back(engine)
    serve(engine, count, options["max_seq_len"])
    assert len(compiled) == before
    assert engine.stats.preempted > 0
    ask, tokens = SamplingParams(max_new_tokens=9), np.arange(2, 92, dtype=np.int32)
    assert engine.submit(tokens, sampling=ask).result() == alone(family, tokens, ask)
    check_all_back(engine)


@pytest.mark.parametrize(("rows", "chunk", "budget"), [(1, 256, 257), (5, 512, 517), (8, 64, 9), (64, 2048, 2112)])
def test_rectangles_have_declared_shapes(rows, chunk, budget):
    declared = set(shapes(rows, chunk, budget))
    assert len(declared) < 60
    rng = np.random.default_rng(0)

    def width(count):
        return min(w for w in (*(16 * 4**i for i in range(9)), chunk) if w >= count and w <= chunk)

    for _ in range(300):
        left, counts = budget, []
        while len(counts) < rows and left > 0:
            counts.append(int(rng.integers(1, min(left, chunk) + 1)))
            left -= counts[-1]
        groups = rectangles([(None, count) for count in counts], width)
        assert sorted(c for group in groups for _, c in group) == sorted(counts)
        for group in groups:
            assert (1 << (len(group) - 1).bit_length(), width(max(c for _, c in group))) in declared


def test_bad_options():
    engine = Engine(model("v32"), max_requests=1, pages=1)
    with pytest.raises(ValueError, match="workers=0"):
        engine.warmup(workers=0)
    with pytest.raises(TypeError, match="progress=1"):
        engine.warmup(progress=1)


def test_what_a_stored_program_calls_is_there_before_it_is_loaded(tmp_path, monkeypatch):
    """Such as the FFI targets of kernels, of which a process that only loads programs knows nothing."""
    said = []
    known = {"json": lambda: said.append("registered"), "no_such_module": lambda: said.append("wrong")}
    monkeypatch.setattr(stored, "CALLED", known)
    load = stored.serialize_executable.deserialize_and_load
    monkeypatch.setattr(
        stored.serialize_executable, "deserialize_and_load", lambda *parts: said.append("loaded") or load(*parts)
    )
    store = stored.ProgramStore(tmp_path)
    store.save("one", jax.jit(lambda x: x + 1).lower(np.float32(1)).compile())
    assert store.load("one")(np.float32(2)) == 3
    assert said == ["registered", "loaded"]
    assert store.load("two") is None


SECOND = """
import json, sys, time
import numpy as np
import jax
from jmla.engine import Engine
from tests.tiny import tiny_model

found, missed = [], []
jax.monitoring.register_event_listener(lambda e, **_: missed.append(e) if e.endswith("/cache_misses") else None)
model = tiny_model("v32", deterministic=False)
start = time.monotonic()
engine = Engine(model, max_requests=2, pages=4)
engine.warmup(workers=2, progress=False)
print(json.dumps([time.monotonic() - start, len(missed)]))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    """With JAX's persistent cache: no program of the warm-up is missing there, and the start takes a third or less."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.getcwd(),
    }
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SECOND], env=env, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    (cold, missed), (warm, again) = runs
    assert missed > 8
    assert again == 0
    assert warm <= cold / 3, (warm, cold)

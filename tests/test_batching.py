"""Which prompts run together, and that none pays for or changes another."""

import dataclasses

import jax
import numpy as np
import pytest
from test_generate import VOCAB, model_of
from tiny import V4, V32

import jmla
from jmla import batching, generation
from jmla.batching import FEW_TOKENS, MAX_BATCH, bucket, cache_bytes, cache_room, chunk_width, groups
from jmla.models import init_cache, make_model
from jmla.sampling import SamplingParams


def spec_of(config=V32, **options):
    return dataclasses.replace(make_model(config, {}, kv_layout="float32", drafting=False).spec, **options)


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]


@pytest.fixture
def passes(monkeypatch):
    """Shapes of the tokens of each pass of prefill."""
    shapes, original = [], generation.models.prefill

    def prefill(model, tokens, *args, **options):
        shapes.append(tokens.shape)
        return original(model, tokens, *args, **options)

    monkeypatch.setattr(generation.models, "prefill", prefill)
    return shapes


@pytest.mark.slow
def test_one_long_prompt_does_not_widen_many_short_ones(passes):
    model = model_of()
    prompts = prompts_of(*[5] * 7, 200, *[6] * 8)
    params = SamplingParams(temperature=1.0, seed=4, logprobs=0, max_new_tokens=3)
    done = jmla.generate(model, prompts, sampling=params)
    assert passes == [(16, 16), (1, 256)]  # one rectangle would be 16 rows of 256 tokens
    for index in (0, 7, 15):
        assert done[index] == jmla.generate(model, prompts[index], sampling=params)


@pytest.mark.slow
def test_more_prompts_than_run_together(passes):
    """Results come in the order of the prompts, each as if alone, whatever group it ran in."""
    model = model_of()
    lengths = [1 + 7 * i % 20 for i in range(MAX_BATCH + 6)]
    prompts = prompts_of(*lengths)
    rows = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=1 + i % 3) for i in range(len(prompts))]
    seen = []
    done = jmla.generate(model, prompts, sampling=rows, stream=lambda index, token: seen.append((index, token)))
    assert [shape[0] for shape in passes] == [64, 8]
    for index in (0, 1, 19, 20, 39, 63, 64, 69):
        assert done[index] == jmla.generate(model, prompts[index], sampling=rows[index])
    for index, one in enumerate(done):
        assert one.token_ids == tuple(token for at, token in seen if at == index)


@pytest.mark.slow
def test_wide_batches_run_in_narrow_passes(passes, monkeypatch):
    """The budget of a pass is kept by its width, and the result is the same."""
    prompts, options = prompts_of(40, 40, 33), {"max_new_tokens": 3, "sampling": SamplingParams(logprobs=0)}
    whole = jmla.generate(model_of(), prompts, **options)
    monkeypatch.setattr(batching, "PASS_TOKENS", 64)
    assert jmla.generate(model_of(), prompts, **options) == whole
    assert passes == [(4, 64), (4, 16), (4, 16), (4, 16)]


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("seed", range(5))
def test_groups_keep_the_budgets(config, seed, monkeypatch):
    """Each prompt once, no group too large, too hollow, or too dear, and shorter groups first."""
    monkeypatch.setattr(batching, "CACHE_BYTES", 30 << 20)
    rng, spec = np.random.default_rng(seed), spec_of(config)
    lengths = np.exp(rng.uniform(0, 7, 200)).astype(int).tolist()
    limits = rng.integers(1, 500, 200).tolist()
    made = groups(spec, lengths, limits)
    assert sorted(i for group in made for i in group) == list(range(200))
    for group in made:
        inside = [lengths[i] for i in group]
        room = max(lengths[i] + limits[i] for i in group)
        assert inside == sorted(inside)
        assert len(group) <= MAX_BATCH
        assert len(group) * inside[-1] <= max(FEW_TOKENS, 2 * sum(inside))
        assert len(group) == 1 or cache_bytes(spec, bucket(len(group)), room) <= 30 << 20
    ends = [lengths[group[-1]] for group in made]
    assert ends == sorted(ends)
    assert len(made) < 40
    assert groups(spec, [7], [3]) == [[0]]


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_cache_bytes_are_those_of_the_cache(config):
    model = dataclasses.replace(make_model(config, {}, kv_layout="auto", drafting=False))
    assert sum(init_cache(model, 3, 2000).nbytes.values()) == cache_bytes(model.spec, 3, 2000)


def test_a_request_near_the_limit_is_not_refused_for_rounding_up():
    """The power of two above would need more slots than int32 can number; the room itself does not."""
    model = make_model(V32, {}, kv_layout="float32", drafting=False)
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, max_seq_len=1 << 30))
    room = 600_000_000
    with pytest.raises(ValueError, match=r"2\*\*31 - 1 slots"):
        init_cache(model, 1, bucket(room))
    assert cache_room(model.spec, 1, room) == room
    assert jax.eval_shape(lambda: init_cache(model, 1, room)).max_seq_len == room


def test_room_is_rounded_where_it_is_cheap():
    assert cache_room(spec_of(), 1, 3) == 256
    assert cache_room(spec_of(), 8, 300) == 512
    assert cache_room(spec_of(max_seq_len=400), 1, 300) == 400


def test_widths_are_few():
    spec = spec_of(prefill_chunk=512)
    widths = {chunk_width(spec, batch, left) for batch in (1, 2, 64) for left in range(1, 2000)}
    assert widths == {16, 32, 64, 128, 256, 512}
    assert chunk_width(spec, 64, 2000) == 128

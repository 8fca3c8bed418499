"""generate and generate_tokens: exact against stepping by hand, independent of the batch, stops, streams, compiles."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIGS
from tiny_text import write_tokenizer

import jmla
from jmla import completion
from jmla import tokenizer as tokenizers
from jmla.completion import Output
from jmla.generation import BLOCK
from jmla.models import make_model
from jmla.models.random import init_random
from jmla.sampling import DEFAULTS, SamplingParams
from jmla.text import TextSupport
from jmla.tokenizer import Tokenizer

VOCAB = 300
PROMPTS = [[5, 9, 200], list(range(30, 53)), [7], [250, 3] * 20, [11] * 9]


FEWER_LAYERS = {
    "v4": {
        "num_hidden_layers": 3,
        "layer_kinds": ("window", "csa", "hca"),
        "layer_routing": ("hash", "learned", "learned"),
    },
    "v32": {"num_hidden_layers": 2, "mlp_layer_types": ("dense", "sparse"), "indexer_types": ("full", "full")},
}


@functools.cache
def model_of(family="v32"):
    """A random model without text, of few layers so that it compiles soon."""
    config = dataclasses.replace(
        CONFIGS[family], vocab_size=VOCAB, max_position_embeddings=256, eos_token_id=(), **FEWER_LAYERS[family]
    )
    params = jax.tree.map(jnp.asarray, init_random(config, "float32", seed=3, drafting=False))
    return make_model(config, params, dtype="float32", kv_layout="float32", deterministic=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB))


@pytest.fixture(scope="module")
def model(tokenizer):
    """A model with text: ids that no greedy completion of it makes end it."""
    return dataclasses.replace(model_of(), text=TextSupport(tokenizer))


def by_hand(model, prompt, count):
    """Greedy tokens and their log-probabilities, one public step at a time."""
    cache = jmla.init_cache(model, 1, 256)
    logits, cache = jmla.prefill(model, np.array([prompt]), np.array([len(prompt)]), cache)
    tokens, logprobs = [], []
    for _ in range(count):
        row = np.asarray(logits[0], np.float64)
        tokens.append(int(row.argmax()))
        logprobs.append(row.max() - np.log(np.exp(row - row.max()).sum()) - row.max())
        logits, cache = jmla.decode(model, np.array(tokens[-1:]), cache)
    return tokens, logprobs


@pytest.mark.parametrize("family", ["v32", pytest.param("v4", marks=pytest.mark.slow)])
def test_greedy_equals_steps_by_hand(family):
    model = model_of(family)
    count = BLOCK + 5  # more than one launch of the loop
    tokens, logprobs = by_hand(model, PROMPTS[1], count)
    done = jmla.generate(model, PROMPTS[1], max_new_tokens=count, sampling=SamplingParams(logprobs=2))
    assert list(done.token_ids) == tokens
    assert done.text is None
    assert done.finish_reason == "length"
    np.testing.assert_allclose([entry.logprob for entry in done.logprobs], logprobs, atol=1e-5)
    for entry in done.logprobs:
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert entry.top[0][1] >= entry.top[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batch_equals_alone(model, temperature):
    """Bitwise, log-probabilities included; prompts longer and shorter than a prefill bucket."""
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=5, logprobs=1, max_new_tokens=12)
    together = jmla.generate(model, PROMPTS, sampling=params)
    alone = [jmla.generate(model, prompt, sampling=params) for prompt in PROMPTS]
    assert together == alone
    turned = jmla.generate(model, PROMPTS[::-1], sampling=params)
    assert turned[::-1] == together


def test_options_of_each_prompt(model):
    rows = [SamplingParams(temperature=1.0, seed=s, max_new_tokens=4 + s) for s in range(5)]
    done = jmla.generate(model, [PROMPTS[0]] * 5, sampling=rows)
    assert [len(one.token_ids) for one in done] == [4, 5, 6, 7, 8]
    assert len({one.token_ids[:4] for one in done}) == 5
    assert done[2] == jmla.generate(model, PROMPTS[0], sampling=rows[2])


def test_penalties_see_tokens_made(model):
    done = jmla.generate(model, PROMPTS[0], max_new_tokens=40, sampling=SamplingParams(presence_penalty=1e6))
    assert len(set(done.token_ids)) == 40


def test_stream_pieces_join_to_the_text(model, tokenizer):
    texts = ["the quick", "dog — ", "a", "b", "c"]
    pieces = [[] for _ in texts]
    done = jmla.generate(
        model,
        texts,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=60),
        stream=lambda index, piece: pieces[index].append(piece),
    )
    for index, one in enumerate(done):
        assert "".join(pieces[index]) == one.text == tokenizer.decode(one.token_ids)
        assert len(pieces[index]) > 5
        assert all(pieces[index])
    assert done == jmla.generate(model, texts, sampling=SamplingParams(temperature=1.0, max_new_tokens=60))


def test_stream_without_tokenizer_gives_ids():
    seen = []
    done = jmla.generate(model_of(), [PROMPTS[0]], max_new_tokens=5, stream=lambda i, token: seen.append((i, token)))
    assert seen == [(0, token) for token in done[0].token_ids]


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_string_across_tokens(model, streaming):
    full = jmla.generate(model, "the fox", sampling=SamplingParams(temperature=1.0, seed=2, max_new_tokens=40))
    # the first three characters from the eighth on that stand nowhere before
    at = next(i for i in range(8, len(full.text)) if full.text.index(full.text[i : i + 3]) == i)
    stop = full.text[at : at + 3]
    given = []
    done = jmla.generate(
        model,
        "the fox",
        stop=["never there", stop],
        sampling=SamplingParams(temperature=1.0, seed=2, max_new_tokens=40, stop=["overridden"]),
        stream=(lambda _, piece: given.append(piece)) if streaming else None,
    )
    assert done.text == full.text[:at]
    assert done.finish_reason == "stop"
    assert done.token_ids == full.token_ids[: len(done.token_ids)]
    assert not streaming or "".join(given) == done.text


def test_stop_token_ids(model, tokenizer):
    full = jmla.generate(model, PROMPTS[1], sampling=SamplingParams(temperature=1.0, seed=4, max_new_tokens=30))
    cut = 20
    stop = list(full.token_ids[cut - 2 : cut])
    done = jmla.generate(
        model, PROMPTS[1], stop=[stop], sampling=SamplingParams(temperature=1.0, seed=4, max_new_tokens=30)
    )
    assert done.token_ids == full.token_ids[:cut]
    assert done.text == tokenizer.decode(full.token_ids[: cut - 2])
    assert done.finish_reason == "stop"


def test_checkpoint_decides_what_is_unset(tokenizer):
    plain = jmla.generate(model_of(), PROMPTS[0], max_new_tokens=20)
    text = TextSupport(tokenizer, SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=7), (plain.token_ids[3],))
    model = dataclasses.replace(model_of(), text=text)
    assert len(jmla.generate(model, PROMPTS[0], sampling=SamplingParams(seed=1)).token_ids) <= 7
    assert jmla.generate(model, PROMPTS[0]).token_ids[:3] != plain.token_ids[:3]
    done = jmla.generate(model, PROMPTS[0], max_new_tokens=20, sampling=SamplingParams(temperature=0))
    end = plain.token_ids.index(plain.token_ids[3]) + 1
    assert done.token_ids == plain.token_ids[:end]
    assert done.finish_reason == "stop"


def test_length_is_exact_at_the_context_limit(model):
    limit = model.spec.max_seq_len
    prompt = [3] * (limit - 2)
    assert len(jmla.generate(model, prompt).token_ids) == 2
    assert len(jmla.generate(model, prompt, max_new_tokens=2).token_ids) == 2
    with pytest.raises(ValueError, match=rf"{limit - 2} tokens and max_new_tokens=3 to fit max_seq_len={limit}"):
        jmla.generate(model, prompt, max_new_tokens=3)


def test_prompt_forms(model, tokenizer):
    ids = tokenizer.encode("quick fox")
    expected = jmla.generate(model, "quick fox", max_new_tokens=3)
    for form in (ids, tuple(ids), np.array(ids), jnp.array(ids), np.array(ids, np.int64)):
        assert jmla.generate(model, form, max_new_tokens=3) == expected
    for form in (["quick fox"], [ids], np.array([ids]), [np.array(ids)], [tuple(ids)]):
        assert jmla.generate(model, form, max_new_tokens=3) == [expected]


def test_nan_logits_are_an_error(model):
    params = jax.tree.map(lambda x: x, model.params)
    params["ends"]["head"] = params["ends"]["head"].at[3].set(jnp.nan)
    with pytest.raises(FloatingPointError, match="token 0 of completion 0"):
        jmla.generate(dataclasses.replace(model, params=params), [5], max_new_tokens=2)


def test_p1_p4_nothing_compiles_after_warm_up(model):
    """Prompt lengths 1 to 70, with and without every option, on what four lengths compiled."""
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    for length in (16, 32, 64, 70):
        jmla.generate(model, [3] * length, max_new_tokens=3)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length in (*range(1, 70, 9), 70):
            jmla.generate(model, [3] * length, max_new_tokens=2 + length % 4)
        jmla.generate(
            model,
            "the dog",
            sampling=SamplingParams(
                temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=1, logprobs=4
            ),
            stop=["x", [3, 4]],
            max_new_tokens=9,
            stream=lambda *_: None,
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


# ---- arrays only


def ragged(prompts):
    width = max(len(p) for p in prompts)
    return np.array([list(p) + [-5] * (width - len(p)) for p in prompts], np.int32), np.array([len(p) for p in prompts])


@pytest.mark.parametrize(
    ("family", "prompts"), [("v4", PROMPTS[1:2]), pytest.param("v32", PROMPTS, marks=pytest.mark.slow)]
)
def test_generate_tokens_equals_generate(family, prompts):
    model, count = model_of(family), 10
    tokens, lengths = ragged(prompts)
    out, ends, logprobs = jmla.generate_tokens(model, tokens, lengths, jax.random.key(0), max_new_tokens=count)
    expected = jmla.generate(model, prompts, max_new_tokens=count, sampling=SamplingParams(logprobs=0))
    np.testing.assert_array_equal(ends, lengths + count)
    for row, (prompt, one) in enumerate(zip(prompts, expected, strict=True)):
        assert np.asarray(out)[row].tolist() == prompt + list(one.token_ids) + [0] * (tokens.shape[1] - len(prompt))
        np.testing.assert_allclose(logprobs[row], [entry.logprob for entry in one.logprobs], atol=1e-6)


@pytest.mark.slow
def test_generate_tokens_of_lists(model):
    """Lists and int64 on the host, padded with anything."""
    lists = [[5, 9, 200], [7, -1, 2**40]]
    arrays = np.array([[5, 9, 200], [7, 0, 0]], np.int32)
    got = jmla.generate_tokens(model, lists, [3, 1], jax.random.key(0), max_new_tokens=4)
    expected = jmla.generate_tokens(model, arrays, jnp.array([3, 1]), jax.random.key(0), max_new_tokens=4)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_generate_tokens_takes_lengths_on_the_device_into_range(model):
    tokens = jnp.array([[3, 4, 5], [6, 7, 8]])
    out, ends, _ = jmla.generate_tokens(model, tokens, jnp.array([9, -1]), jax.random.key(0), max_new_tokens=2, eos=())
    whole, _, _ = jmla.generate_tokens(model, tokens, jnp.array([3, 3]), jax.random.key(0), max_new_tokens=2, eos=())
    assert ends.tolist() == [5, 0]
    assert out[0].tolist() == whole[0].tolist()


@pytest.mark.slow
def test_generate_tokens_inside_jit():
    model = model_of()
    tokens, lengths = ragged([PROMPTS[0], PROMPTS[2]])
    greedy = jmla.generate(model, PROMPTS[0], max_new_tokens=8).token_ids
    end = greedy[4]
    made = greedy.index(end) + 1

    @jax.jit
    def program(model, tokens, lengths, key):
        return jmla.generate_tokens(model, tokens, lengths, key, max_new_tokens=8, eos=(end,))

    out, ends, logprobs = program(model, tokens, lengths, jax.random.key(1))
    assert int(ends[0]) == 3 + made
    assert np.asarray(out)[0].tolist() == PROMPTS[0] + list(greedy[:made]) + [0] * (8 - made)
    assert not np.asarray(logprobs)[0, made:].any()
    assert (np.asarray(logprobs)[0, :made] < 0).all()
    # a row without a prompt stays empty
    out, ends, _ = program(model, tokens, np.array([3, 0]), jax.random.key(1))
    assert int(ends[1]) == 0
    assert not np.asarray(out)[1].any()


@pytest.mark.slow
def test_generate_tokens_keys():
    """A row's draws follow from its key; rows of one key differ."""
    model, options = model_of(), SamplingParams(temperature=1.0)
    tokens, lengths = ragged([PROMPTS[0]] * 3)
    call = functools.partial(jmla.generate_tokens, model, tokens, lengths, max_new_tokens=8, sampling=options, eos=())
    first, _, _ = call(jax.random.key(0))
    assert len({tuple(row) for row in np.asarray(first).tolist()}) == 3
    np.testing.assert_array_equal(first, call(jax.random.key(0))[0])
    np.testing.assert_array_equal(first, call(jax.random.PRNGKey(0))[0])
    keys = jax.random.split(jax.random.key(7), 3)
    np.testing.assert_array_equal(call(keys)[0][::-1], call(keys[::-1])[0])


# ---- putting completions together


def output(tokenizer=None, ends=(), count=50, stop=(), logprobs=None):
    params = SamplingParams(stop=stop, max_new_tokens=count, logprobs=logprobs).over(DEFAULTS)
    pieces = []
    out = Output(0, params, frozenset(ends), tokenizer, lambda _, piece: pieces.append(piece))
    return out, pieces


def feed(out, ids):
    for token in ids:
        if out.reason is None:
            out.push(token, -0.5, np.zeros(2, np.int32), np.zeros(2, np.float32))
    return out.completion()


def test_end_token_is_kept_from_the_text(tokenizer):
    out, pieces = output(tokenizer, ends=[70])
    ids = tokenizer.encode("the dog")
    done = feed(out, [*ids, 70, *ids])
    assert (done.text, done.token_ids, done.finish_reason) == ("the dog", (*ids, 70), "stop")
    assert "".join(pieces) == "the dog"


def test_held_text_is_given_when_the_end_comes(tokenizer):
    ids = tokenizer.encode("the dog")
    for stop in ("dogma", [*ids[-1:], 5]):
        out, pieces = output(tokenizer, count=len(ids), stop=[stop])
        done = feed(out, ids)
        assert (done.text, done.finish_reason) == ("the dog", "length")
        assert "".join(pieces) == "the dog"


def test_last_token_may_stop(tokenizer):
    ids = tokenizer.encode("the dog")
    out, _ = output(tokenizer, count=len(ids), stop=["dog"])
    done = feed(out, ids)
    assert (done.text, done.finish_reason) == ("the ", "stop")


@pytest.mark.parametrize(
    ("ids", "stop", "text"),
    [
        ([1, 2, 3, 4], [[3, 4]], [1, 2]),
        ([3, 3, 4], [[3, 4]], [3]),
        ([3, 5, 3, 4, 9], [[3, 4]], [3, 5]),
        ([1, 2, 3], [[1, 2, 3], [2, 3]], []),
        ([7, 1, 2, 1, 2, 3], [[1, 2, 3]], [7, 1, 2]),
        ([7], [[7], [7, 8]], []),
    ],
)
def test_stop_ids_over_pushes(ids, stop, text):
    out, pieces = output(stop=stop)
    done = feed(out, ids)
    assert pieces == text
    assert done.finish_reason == "stop"
    assert done.text is None
    assert done.token_ids == tuple(ids[: ids.index(9) if 9 in ids else None])


INTERRUPTED = {completion.__file__, tokenizers.__file__}


class Interrupting:
    """A trace function that interrupts before the ``count``-th line, or bytecode, of completions and their text."""

    def __init__(self, count, opcodes):
        self.left, self.opcodes = count, opcodes

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in INTERRUPTED or self.left <= 0:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.opcodes, not self.opcodes
        if event in ("line", "opcode"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def put_together(out, tokens, reason, trace):
    """What a completion is in the end, if it is gone on with after an interrupt as an engine does it."""
    tops = np.arange(3, dtype=np.int32), np.array([-0.5, -1.0, -2.0], np.float32)
    while True:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            out.tell()
            for i in range(len(out.ids), len(tokens)):
                if out.reason is None:
                    out.push(tokens[i], -0.25 * i, *tops)
            if reason is not None:
                out.end(reason)
            return out.completion(), out.total_logprob
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts of what is thrown away
@pytest.mark.parametrize("opcodes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lines", "bytecodes"])
@pytest.mark.parametrize("end", ["end token", "stop ids", "stop string", "length", "cancelled", "without text"])
def test_an_interrupt_anywhere_changes_nothing(tokenizer, end, opcodes):
    """No token, log-probability or piece is lost or told twice, and none of what is held back as a possible stop."""
    ids = tokenizer.encode("the dog é")
    stop = ["dogma", "og é!", [ids[0], 5], [ids[-2], 7, 8]]
    tokens = {
        "end token": [*ids, 290, 5],
        "stop ids": [*ids[:-1], 7, 8, 5],
        "stop string": [*ids, *tokenizer.encode("! the"), 5],
        "length": [*ids, 5],
    }.get(end, ids)
    count = len(ids) if end == "length" else 50
    reason = "cancelled" if end in ("cancelled", "without text") else None

    def run(trace):
        out, pieces = output(None if end == "without text" else tokenizer, [290], count, stop, logprobs=2)
        return put_together(out, tokens, reason, trace), pieces

    expected = run(None)
    assert expected[0][0].finish_reason == (reason or {"length": "length"}.get(end, "stop"))
    assert len(expected[0][0].logprobs) == len(expected[0][0].token_ids) >= len(ids)
    for _ in range(2):  # Python begins with bytecodes in the second run
        trace = Interrupting(sys.maxsize, opcodes)
        assert run(trace) == expected
    places = sys.maxsize - trace.left
    assert places > 200
    for number in range(1, places + 1):
        trace = Interrupting(number, opcodes)
        assert run(trace) == expected, number
        assert trace.left == 0

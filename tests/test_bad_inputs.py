"""Bad inputs, each with its one clear error: before anything runs, naming what is wrong and what is allowed."""

import dataclasses
import fnmatch
import functools
import json
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import V32
from tiny_text import write_tokenizer

import jmla
from jmla import hub
from jmla.models import make_model, steps
from jmla.models.config import ConfigError, to_dict
from jmla.models.config.common import shown
from jmla.models.random import init_random
from jmla.sampling import RowParams, SamplingParams
from jmla.text import TextSupport, read_text_support
from jmla.tokenizer import Tokenizer

LIMIT = 32


@functools.cache
def model():
    """Never run: every error comes first."""
    config = dataclasses.replace(V32, max_position_embeddings=LIMIT)
    return make_model(config, init_random(config, seed=1, drafting=False), dtype="float32", kv_layout="float32")


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch):
    def ran(*_):
        raise AssertionError("a step was launched")

    monkeypatch.setattr(steps, "_compiled", ran)
    monkeypatch.setattr(steps, "_forward", ran)


# ---- options of sampling

SAMPLING = [
    ({"temperature": -0.1}, r"temperature=-0.1 .* 0 <= temperature"),
    ({"temperature": float("nan")}, r"temperature=nan .* finite"),
    ({"temperature": float("inf")}, r"temperature=inf .* finite"),
    ({"temperature": "hot"}, r"temperature='hot'"),
    ({"temperature": True}, r"temperature=True"),
    ({"top_k": -1}, r"top_k=-1 .* 0 to 2147483647"),
    ({"top_k": 2**31}, r"top_k=2147483648 .* 0 to 2147483647"),
    ({"top_k": 10**5000}, r"top_k=<int, too long to show> .* 0 to 2147483647"),
    ({"top_k": np.True_}, r"top_k=.*True"),
    ({"top_k": np.array([3])}, r"top_k=array\(\[3\]\)"),
    ({"top_k": 2.5}, r"top_k=2.5 .* integer"),
    ({"top_p": 0}, r"top_p=0 .* 0 < top_p <= 1"),
    ({"top_p": 1.01}, r"top_p=1.01"),
    ({"min_p": -0.5}, r"min_p=-0.5 .* 0 <= min_p <= 1"),
    ({"min_p": 2}, r"min_p=2"),
    ({"seed": -1}, r"seed=-1"),
    ({"seed": 2**64}, r"seed=18446744073709551616 .* 0 to 18446744073709551615"),
    ({"seed": 1.0}, r"seed=1.0 .* integer"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0 .* 0 < repetition_penalty"),
    ({"presence_penalty": float("inf")}, r"presence_penalty=inf .* finite"),
    ({"frequency_penalty": float("nan")}, r"frequency_penalty=nan .* finite"),
    ({"max_new_tokens": 0}, r"max_new_tokens=0 .* 1 to 2147483647"),
    ({"max_new_tokens": 10**400}, r"max_new_tokens=1000.* 1 to 2147483647"),
    ({"max_new_tokens": 1.5}, r"max_new_tokens=1.5"),
    ({"logprobs": -1}, r"logprobs=-1 .* 0 to 20"),
    ({"logprobs": 21}, r"logprobs=21 .* 0 to 20"),
    ({"logprobs": 10**400}, r"logprobs=1000.* 0 to 20"),
    ({"stop": ""}, r"stop item ''"),
    ({"stop": [""]}, r"stop item ''"),
    ({"stop": [[]]}, r"stop item \[\]"),
    ({"stop": [[-3]]}, r"stop item \[-3\] .* got -3 at position 0"),
    ({"stop": [[2**40]]}, r"got 1099511627776 at position 0"),
    ({"stop": [[10**5000]]}, r"got <int, too long to show> at position 0"),
    ({"stop": b"end"}, r"stop=b'end'"),
    ({"stop": [b"end"]}, r"stop item b'end'"),
    ({"stop": {"end": 1}}, r"stop=\{'end': 1\}"),
    ({"stop": np.array(3)}, r"stop=array\(3\)"),
    ({"stop": ["ab\ud800"]}, r"valid Unicode, got the lone surrogate '\\ud800' at position 2"),
    ({"stop": 7}, r"stop=7"),
    ({"stop": [7]}, r"stop item 7"),
]


def without_addresses(x):
    """As ``repr`` has it, but for what differs from process to process."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(x))


@pytest.mark.parametrize(("options", "message"), SAMPLING, ids=shown)
def test_sampling_values(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize(
    "value",
    [1e39, -1e39, 10**400, 1e-60, True, np.True_, 1j, np.complex64(1), b"1", [1.0], np.array([0.5])],
    ids=lambda value: without_addresses(value)[:20],
)
def test_numbers_that_float32_does_not_hold(name, value):
    with pytest.raises(ValueError, match=rf"^Expected {name}=.{{1,250}} to be a finite float32 number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(1), np.array(0.5), jnp.float32(0.5)], ids=repr)
def test_numbers_of_any_real_type(value):
    assert type(SamplingParams(top_p=value).top_p) is float
    assert SamplingParams(top_p=value).top_p == value


@pytest.mark.parametrize("stop", [[[True]], [[1.0]], [["a"]], [np.array([0.5])]], ids=repr)
def test_stop_ids_are_integers(stop):
    with pytest.raises(TypeError, match=r"stop item .* integer token ids"):
        SamplingParams(stop=stop)


# ---- generate

GENERATE = [
    ([], {}, ValueError, "at least one prompt"),
    ([[]], {}, ValueError, r"prompt 0 to hold at least one token"),
    (np.zeros(0, np.int32), {}, ValueError, r"prompt 0 to hold at least one token"),
    ("hello", {}, ValueError, "no tokenizer.json"),
    ([[1, 2], "hello"], {}, ValueError, r"prompt 1 .* no tokenizer.json"),
    (7, {}, TypeError, "prompts=7"),
    ([1.5, 2.5], {}, TypeError, r"prompt 0 .* string or token ids, got 1\.5"),
    ([[1.5, 2.5]], {}, TypeError, r"prompt 0 .* integer token ids, got 1\.5 at position 0"),
    ([[2, True]], {}, TypeError, "prompt 0 .* integer token ids, got True at position 1"),
    ([2, True], {}, TypeError, "prompt 0 .* integer token ids, got True at position 1"),
    ([[1, None]], {}, TypeError, "prompt 0 .* integer token ids, got None at position 1"),
    ([[1], [[1]]], {}, TypeError, r"prompt 1 .* integer token ids, got \[1\] at position 0"),
    (np.array([True]), {}, TypeError, "prompt 0 .* integer token ids, got bool"),
    (np.array([[1.0]]), {}, TypeError, "prompt 0 .* integer token ids, got float64"),
    (np.array([1, "a"], object), {}, TypeError, "prompt 0 .* integer token ids, got object"),
    (np.ma.array([1, 2], mask=[0, 1]), {}, TypeError, "prompt 0 .* integer token ids, got None at position 1"),
    (np.zeros((0, 2), int), {}, ValueError, "at least one prompt, got none"),
    (np.zeros((2, 0), int), {}, ValueError, "prompt 0 to hold at least one token"),
    (np.array(3), {}, TypeError, r"prompts=array\(3\)"),
    (b"ab", {}, TypeError, r"prompts=b'ab' to be a string, token ids, or a list of those"),
    (bytearray(b"ab"), {}, TypeError, "prompts=bytearray"),
    (memoryview(b"ab"), {}, TypeError, "prompts=<memory"),
    ({"text": 1}, {}, TypeError, "prompts={'text': 1}"),
    ({1, 2}, {}, TypeError, "prompts={1, 2}"),
    (iter([[1, 2]]), {}, TypeError, "prompts=<list_iterator"),
    ([b"ab"], {}, TypeError, "prompt 0 to be a string or token ids, got b'ab'"),
    ([iter([1, 2])], {}, TypeError, "prompt 0 .* got <list_iterator"),
    ([10**400], {}, ValueError, r"prompt 0 .* 0\.\.95, got 1000.{1,250} at position 0"),
    ([[1, 96]], {}, ValueError, r"prompt 0 .* 0\.\.95, got 96 at position 1"),
    ([[1], [-1]], {}, ValueError, r"prompt 1 .* 0\.\.95, got -1 at position 0"),
    ([[2**40]], {}, ValueError, rf"0\.\.95, got {2**40}"),
    (np.array([1, 2**32 + 1]), {}, ValueError, r"0\.\.95, got 4294967297 at position 1"),
    (np.zeros((2, 2, 2), np.int32), {}, ValueError, r"one or two axes, got shape \(2, 2, 2\)"),
    ([["a", "b"]], {}, TypeError, "prompt 0 .* integer token ids, got 'a' at position 0"),
    ([{"role": "user"}], {}, TypeError, "prompt 0 .* got {'role': 'user'}"),
    ([3] * LIMIT, {}, ValueError, rf"prompt 0 .* {LIMIT} tokens, and max_seq_len is {LIMIT}"),
    ([[3], [3] * 40], {}, ValueError, rf"prompt 1 .* 40 tokens, and max_seq_len is {LIMIT}"),
    (
        [3] * 30,
        {"max_new_tokens": 3},
        ValueError,
        "30 tokens and max_new_tokens=3 to fit max_seq_len=32, got 33",
    ),
    ([3], {"max_new_tokens": 0}, ValueError, "max_new_tokens=0"),
    ([3], {"stop": ["end"]}, ValueError, "no tokenizer for stop strings"),
    ([3], {"stop": [[]]}, ValueError, "stop item"),
    ([3], {"stop": [[96]]}, ValueError, r"stop item \[96\] .* 0\.\.95, got 96"),
    ([3], {"sampling": {"temperature": 1}}, TypeError, "jmla.SamplingParams, .* got {'temperature': 1}"),
    ([3], {"sampling": {}}, TypeError, "jmla.SamplingParams, .* got {}"),
    ([3], {"sampling": 5}, TypeError, "jmla.SamplingParams, .* got 5"),
    ([3], {"sampling": SamplingParams}, TypeError, "jmla.SamplingParams, .* got <class"),
    ([3], {"sampling": [SamplingParams]}, TypeError, "jmla.SamplingParams, .* got <class"),
    ([3], {"sampling": iter([SamplingParams()])}, TypeError, "jmla.SamplingParams, .* got <list_iterator"),
    ([3], {"sampling": []}, ValueError, "each of the 1 prompts, got 0"),
    ([3], {"sampling": [SamplingParams()] * 2}, ValueError, "each of the 1 prompts, got 2"),
    ([3], {"stream": "stdout"}, TypeError, "stream='stdout'"),
]


@pytest.mark.parametrize(("prompts", "options", "error", "message"), GENERATE, ids=lambda x: without_addresses(x)[:40])
def test_generate(prompts, options, error, message):
    with pytest.raises(error, match=message):
        jmla.generate(model(), prompts, **options)


@pytest.mark.parametrize("wrong", [None, 5, {}, jmla.Model, SamplingParams()], ids=lambda x: without_addresses(x)[:20])
def test_no_model(wrong):
    message = r"Expected model to be a jmla\.Model, as jmla\.load makes one of a path; got "
    with pytest.raises(TypeError, match=message):
        jmla.generate(wrong, [3])
    with pytest.raises(TypeError, match=message):
        jmla.generate_tokens(wrong, TOKENS, LENGTHS, KEY, max_new_tokens=4)


@pytest.mark.parametrize("path", ["jmla-tiny-v4", Path("jmla-tiny-v4")], ids=repr)
def test_a_path_is_no_model_of_arrays(path):
    with pytest.raises(TypeError, match=r"to be a jmla\.Model, as jmla\.load makes one of a path; got (str|PosixPath)"):
        jmla.generate_tokens(path, TOKENS, LENGTHS, KEY, max_new_tokens=4)


@pytest.mark.parametrize("options", [{"sampling": 5}, {"stream": 5}, {"prompts": b"ab"}], ids=repr)
def test_wrong_arguments_do_not_wait_for_the_weights(options, monkeypatch):
    monkeypatch.setattr("jmla.loading.load", lambda path: pytest.fail("weights were read"))
    with pytest.raises(TypeError):
        jmla.generate("jmla-tiny-v4", **({"prompts": [3]} | options))


@pytest.mark.parametrize(("prompts", "index", "at"), [("a\ud800b", 0, 1), (["a", "\udcff"], 1, 0)], ids=ascii)
def test_half_characters(tmp_path, prompts, index, at):
    text = TextSupport(Tokenizer(write_tokenizer(tmp_path)))
    message = f"prompt {index} to be valid Unicode, got the lone surrogate .* at position {at}"
    with pytest.raises(ValueError, match=message):
        jmla.generate(dataclasses.replace(model(), text=text), prompts)


def test_empty_string(tmp_path):
    text = TextSupport(Tokenizer(write_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=r"prompt 0 .* empty prompt"):
        jmla.generate(dataclasses.replace(model(), text=text), "")


def test_tokenizer_of_another_vocabulary(tmp_path):
    text = TextSupport(Tokenizer(write_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=r"prompt 0 .* 0\.\.95"):
        jmla.generate(dataclasses.replace(model(), text=text), "ÿ")


# ---- arrays


def rows(**columns):
    return dataclasses.replace(RowParams.pack([SamplingParams()] * 2), **columns)


TOKENS, LENGTHS, KEY = np.ones((2, 4), np.int32), np.array([4, 2]), jax.random.key(0)
ARRAYS = [
    ((TOKENS[0], LENGTHS, KEY), {}, r"tokens to be \[B, T\], got shape \(4,\)"),
    ((TOKENS.astype(float), LENGTHS, KEY), {}, "tokens to be integers, got dtype float64"),
    ((TOKENS, LENGTHS * 1.0, KEY), {}, "lengths to be integers, got dtype float64"),
    ((TOKENS, jnp.array([4.0, 2.0]), KEY), {}, "lengths to be integers, got dtype float32"),
    ((TOKENS, LENGTHS[:1], KEY), {}, r"lengths to have shape \(2,\), .* got \(1,\)"),
    ((TOKENS, [4, 2**32], KEY), {}, r"lengths in 0\.\.4, .* \[4, 4294967296\]"),
    ((jnp.asarray(TOKENS), [4, 5], KEY), {}, r"lengths in 0\.\.4, .* \[4, 5\]"),
    (([[1, 2**32 + 1]] * 2, [2, 1], KEY), {}, r"0\.\.95, got 4294967297"),
    (([[1, 2**32 + 1]] * 2, jnp.array([2, 1]), KEY), {}, "got 4294967297"),
    ((TOKENS[:, :0], LENGTHS, KEY), {}, r"tokens \[B, T\]"),
    ((TOKENS, np.array([5, 1]), KEY), {}, r"lengths in 0\.\.4, .* \[5, 1\]"),
    ((TOKENS, np.array([-1, 1]), KEY), {}, r"lengths in 0\.\.4"),
    ((TOKENS * 96, LENGTHS, KEY), {}, r"token ids in 0\.\.95, got 96"),
    ((TOKENS, LENGTHS, jax.random.split(KEY, 3)), {}, "each of the 2 rows"),
    ((TOKENS, LENGTHS, KEY), {"max_new_tokens": 29}, rf"width 4 and max_new_tokens=29 to fit max_seq_len={LIMIT}"),
    ((TOKENS, LENGTHS, KEY), {"max_new_tokens": -1}, "max_new_tokens=-1"),
    ((TOKENS, LENGTHS, KEY), {"max_new_tokens": None}, "max_new_tokens=None"),
    ((TOKENS, LENGTHS, KEY), {"eos": (96,)}, r"eos .* 0\.\.95, got 96 at position 0"),
    ((TOKENS, LENGTHS, KEY), {"eos": [1, 10**400]}, r"eos .* 0\.\.95, got 1000.* at position 1"),
    ((TOKENS, LENGTHS, KEY), {"eos": [True]}, "eos to hold integer token ids, got True"),
    ((TOKENS, LENGTHS, KEY), {"eos": np.array([[1]])}, r"eos .* one axis, got shape \(1, 1\)"),
    ((TOKENS, LENGTHS, KEY), {"eos": 5}, "eos to be a list of token ids, got 5"),
    ((TOKENS, LENGTHS, KEY), {"eos": "ab"}, "eos to be a list of token ids, got 'ab'"),
    ((TOKENS, LENGTHS, KEY), {"eos": {1}}, "eos to be a list of token ids, got {1}"),
    *(
        ((TOKENS, LENGTHS, key), {}, r"key=.* to be a random key, as jax\.random\.key\(0\)")
        for key in (0, 1.5, None, "a", [0, 1], np.zeros(2, np.int32), np.zeros(3, np.uint32), jax.random.key)
    ),
    ((TOKENS, LENGTHS, np.zeros((3, 2), np.uint32)), {}, r"each of the 2 rows, got \(3,\)"),
    ((TOKENS, LENGTHS, KEY), {"sampling": SamplingParams(seed=3)}, "without seed"),
    ((TOKENS, LENGTHS, KEY), {"sampling": SamplingParams(stop="x")}, "without seed, stop"),
    ((TOKENS, LENGTHS, KEY), {"sampling": SamplingParams(max_new_tokens=9)}, "without .* max_new_tokens"),
    ((TOKENS, LENGTHS, KEY), {"sampling": {"temperature": 1}}, "jmla.SamplingParams or RowParams, got {'temp"),
    ((TOKENS, LENGTHS, KEY), {"sampling": SamplingParams}, "jmla.SamplingParams or RowParams, got <class"),
    ((TOKENS, LENGTHS, KEY), {"sampling": rows(temperature=None)}, r"temperature to have shape \(2,\)"),
    ((TOKENS, LENGTHS, KEY), {"sampling": rows(temperature=["a", "b"])}, "sampling.temperature='a'"),
    ((TOKENS, LENGTHS, KEY), {"sampling": rows(top_p=np.array([1, np.nan]))}, "sampling.top_p=.*nan"),
    ((TOKENS, LENGTHS, KEY), {"sampling": rows(top_k=jnp.zeros(2))}, "sampling.top_k to have dtype integer"),
    ((TOKENS, LENGTHS, KEY), {"sampling": RowParams.pack([SamplingParams()])}, r"temperature to have shape \(2,\)"),
]


@pytest.mark.parametrize(("args", "options", "message"), ARRAYS, ids=lambda x: without_addresses(x)[:30])
def test_generate_tokens(args, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jmla.generate_tokens(model(), *args, **({"max_new_tokens": 4} | options))


def cache(batch=2):
    return jmla.init_cache(model(), batch, LIMIT)


STEPS = [
    (lambda: jmla.init_cache(model(), 0, 8), ValueError, "batch=0"),
    (lambda: jmla.init_cache(model(), 1, 0), ValueError, rf"max_seq_len=0 .* 1\.\.{LIMIT}"),
    (lambda: jmla.init_cache(model(), 1, LIMIT + 1), ValueError, rf"max_seq_len=33 .* 1\.\.{LIMIT}"),
    (lambda: jmla.prefill(model(), TOKENS[0], LENGTHS, cache()), ValueError, r"\[B, T\]"),
    (lambda: jmla.prefill(model(), TOKENS, LENGTHS, cache(3)), ValueError, "3 rows"),
    (lambda: jmla.prefill(model(), TOKENS, LENGTHS[:1], cache()), ValueError, r"shape \(2,\)"),
    (lambda: jmla.prefill(model(), TOKENS, LENGTHS + 1, cache()), ValueError, r"lengths in 0\.\.4"),
    (lambda: jmla.prefill(model(), TOKENS * 1.0, LENGTHS, cache()), TypeError, "integers"),
    (lambda: jmla.prefill(model(), TOKENS * 200, LENGTHS, cache()), ValueError, r"0\.\.95, got 200"),
    (lambda: jmla.prefill(model(), TOKENS[:, :0], LENGTHS * 0, cache()), ValueError, "T >= 1"),
    (lambda: jmla.prefill(model(), TOKENS, LENGTHS, None), TypeError, "PagedCache"),
    (lambda: jmla.decode(model(), TOKENS, cache()), ValueError, r"\[B\]"),
    (lambda: jmla.decode(model(), TOKENS[:, 0] * -1, cache()), ValueError, r"0\.\.95, got -1"),
    (lambda: jmla.decode(model(), TOKENS[:, 0], cache(), active=np.ones(3, bool)), ValueError, r"shape \(2,\)"),
    (lambda: jmla.decode(model(), TOKENS[:, 0], cache(), active=[1, 0]), TypeError, "active to be bool, got dtype int"),
    (lambda: jmla.decode(model(), TOKENS[:, 0], cache(), active=jnp.ones(2)), TypeError, "active to be bool"),
    (lambda: jmla.prefill(model(), TOKENS, jnp.array([4.0, 2.0]), cache()), TypeError, "lengths to be integers.*float"),
    (lambda: jmla.prefill(model(), TOKENS, [True, True], cache()), TypeError, "lengths to be integers.*bool"),
    (lambda: jmla.prefill(model(), TOKENS, np.array([2**32, 1]), cache()), ValueError, r"lengths in 0\.\.4"),
    (lambda: jmla.prefill(model(), [[1, 2**32], [1, 2]], [2, 2], cache()), ValueError, r"0\.\.95, got 4294967296"),
    (lambda: jmla.prefill(model(), [[1, 2**32]] * 2, jnp.array([2, 2]), cache()), ValueError, "got 4294967296"),
    (lambda: jmla.prefill(model(), [[1, 2], [-1, 2]], [2, 1], cache()), ValueError, r"0\.\.95, got -1"),
    (lambda: jmla.prefill(model(), TOKENS * -1, LENGTHS[:1], cache()), ValueError, r"lengths to have shape \(2,\)"),
    (lambda: jmla.draft(model(), jnp.ones((2, 32)), TOKENS[:, 0], cache()), ValueError, "draft"),
    (lambda: jmla.forward(model(), np.ones((1, LIMIT + 1), np.int32)), ValueError, rf"1\.\.{LIMIT} tokens"),
    (lambda: jmla.forward(model(), TOKENS[:0]), ValueError, r"B >= 1 and T >= 1, got shape \(0, 4\)"),
    (lambda: jmla.forward(model(), None), TypeError, "tokens to be an array .* got NoneType"),
    (lambda: jmla.prefill(model(), [[10**400], [1]], [1, 1], cache()), TypeError, "tokens .* at most 64 bits"),
    (lambda: jmla.prefill(model(), [[1], [1, 2]], LENGTHS, cache()), ValueError, "tokens .* equal lengths"),
    (lambda: jmla.prefill(model(), TOKENS, [[1], [1, 2]], cache()), ValueError, "lengths .* equal lengths"),
    (lambda: jmla.prefill(model(), TOKENS, ["4", "2"], cache()), TypeError, "lengths to be integers, got dtype <U1"),
    (lambda: jmla.prefill(model(), TOKENS, None, cache()), TypeError, "lengths to be an array .* got NoneType"),
    (lambda: jmla.decode(model(), TOKENS[:, 0], cache(), active=[[True], []]), ValueError, "active .* equal lengths"),
    (lambda: jmla.init_cache(model(), 10**400, 8), ValueError, r"batch=1000.* integer in 1\.\."),
    (lambda: jmla.init_cache(model(), 1, 10**5000), ValueError, r"max_seq_len=<int, too long to show> .* 1\.\.32"),
    (lambda: jmla.init_cache(model(), 1.0, 8), ValueError, r"batch=1\.0"),
    (lambda: jmla.init_cache(model(), 1, True), ValueError, "max_seq_len=True"),
    *(
        (lambda dtype=dtype: jmla.init_cache(model(), 1, 8, dtype=dtype), ValueError, "dtype=.*'bfloat16' or 'float32'")
        for dtype in ("float16", "footer584", "", np.float32, ["float32"])
    ),
    *(
        (lambda changes=changes: jmla.decode(model(), TOKENS[:, 0], cache().replace(**changes)), ValueError, message)
        for changes, message in (
            ({"lengths": [0, 0]}, r"cache\.lengths to be an int32 array of shape \(2,\), got \[0, 0\]"),
            ({"draft_lengths": jnp.zeros(3, jnp.int32)}, r"cache\.draft_lengths .* \(2,\)"),
            ({"lengths": jnp.zeros(2)}, r"cache\.lengths to be an int32"),
            ({"table": None}, r"cache\.table .* \(2, 1\), got None"),
            ({"pools": {}}, r"cache\.pools to have latent, index; got \[\]"),
            ({"layers": ()}, r"made by jmla\.init_cache for this model"),
        )
    ),
]

HIDDEN = np.ones((2, V32.hidden_size), np.float32)
NO_MODEL = (None, "jmla-tiny-v4", {})
MODEL_CALLS = {
    "init_cache": lambda m: jmla.init_cache(m, 2, LIMIT),
    "prefill": lambda m: jmla.prefill(m, TOKENS, LENGTHS, cache()),
    "decode": lambda m: jmla.decode(m, TOKENS[:, 0], cache()),
    "draft": lambda m: jmla.draft(m, HIDDEN, TOKENS[:, 0], cache()),
    "forward": lambda m: jmla.forward(m, TOKENS),
}
NO_CACHE = (None, "cache", {}, LENGTHS)
CACHE_CALLS = {
    "prefill": lambda c: jmla.prefill(model(), TOKENS, LENGTHS, c),
    "decode": lambda c: jmla.decode(model(), TOKENS[:, 0], c),
    "draft": lambda c: jmla.draft(drafting(), HIDDEN, TOKENS[:, 0], c),
    "copy": lambda c: jmla.copy(c),
}
FLAGS = ([1], 1, "yes", None, np.ones(2, bool), jnp.array(True))
FLAG_CALLS = [
    ("whole_window", lambda flag: jmla.init_cache(model(), 2, LIMIT, whole_window=flag)),
    ("all_logits", lambda flag: jmla.prefill(model(), TOKENS, LENGTHS, cache(), all_logits=flag)),
    ("return_hidden", lambda flag: jmla.prefill(model(), TOKENS, LENGTHS, cache(), return_hidden=flag)),
    ("donate", lambda flag: jmla.prefill(model(), TOKENS, LENGTHS, cache(), donate=flag)),
    ("return_hidden", lambda flag: jmla.decode(model(), TOKENS[:, 0], cache(), return_hidden=flag)),
    ("donate", lambda flag: jmla.decode(model(), TOKENS[:, 0], cache(), donate=flag)),
    ("donate", lambda flag: jmla.draft(drafting(), HIDDEN, TOKENS[:, 0], drafting_cache(), donate=flag)),
    ("return_selected", lambda flag: jmla.forward(model(), TOKENS, return_selected=flag)),
]


def drafting():
    return dataclasses.replace(model(), spec=dataclasses.replace(model().spec, drafting=True))


def drafting_cache():
    return jmla.init_cache(drafting(), 2, LIMIT)


@pytest.mark.parametrize("call", MODEL_CALLS)
def test_steps_without_a_model(call):
    for wrong in NO_MODEL:
        with pytest.raises(TypeError, match=rf"model to be a jmla\.Model, .* got {type(wrong).__name__}"):
            MODEL_CALLS[call](wrong)


@pytest.mark.parametrize("call", CACHE_CALLS)
def test_steps_without_a_cache(call):
    for wrong in NO_CACHE:
        with pytest.raises(TypeError, match=rf"cache to be a PagedCache .* got {type(wrong).__name__}"):
            CACHE_CALLS[call](wrong)


@pytest.mark.parametrize(("name", "call"), FLAG_CALLS)
def test_flags(name, call):
    for wrong in FLAGS:
        with pytest.raises(TypeError, match=rf"{name}=.* to be True or False"):
            call(wrong)


MAKE = [
    ((None, {}), {}, TypeError, "config to be a V4Config or DsaConfig, got NoneType"),
    ((V32, None), {}, TypeError, "params to be a dict of arrays, got NoneType"),
    ((V32, {}), {"deterministic": "no"}, TypeError, "deterministic='no'"),
    ((V32, {}), {"drafting": [1]}, TypeError, r"drafting=\[1\]"),
    ((V32, {}), {"implementation": ["xla"]}, ValueError, r"implementation=\['xla'\]"),
    ((V32, {}), {"kv_layout": None}, ValueError, "kv_layout=None"),
    ((V32, {}), {"kv_layout": ["auto"]}, ValueError, r"kv_layout=\['auto'\]"),
    ((V32, {}), {"max_seq_len": 10**5000}, ValueError, "max_seq_len=<int, too long to show>"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), MAKE, ids=[m[-1] for m in MAKE])
def test_make_model(args, options, error, message):
    with pytest.raises(error, match=message):
        make_model(*args, **options)


@pytest.mark.parametrize(("call", "error", "message"), STEPS, ids=[str(i) for i in range(len(STEPS))])
def test_steps(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("use", ["prefill", "decode", "copy"])
def test_consumed_cache(use):
    used = cache()
    jax.tree.map(lambda x: x.delete(), used)
    calls = {
        "prefill": lambda: jmla.prefill(model(), TOKENS, LENGTHS, used),
        "decode": lambda: jmla.decode(model(), TOKENS[:, 0], used),
        "copy": lambda: jmla.copy(used),
    }
    with pytest.raises(jmla.CacheConsumedError, match=r"jmla.copy\(cache\) .* donate=False"):
        calls[use]()


# ---- files


def write(path, **files):
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text)
    return path


FILES = [
    ("no config", {}, FileNotFoundError, "has no config.json"),
    ("no JSON", {"config": "{"}, ConfigError, "to be JSON"),
    ("no object", {"config": []}, ConfigError, "JSON object, got list"),
    ("no model type", {"config": {}}, ConfigError, "model_type=None .* deepseek_v4, deepseek_v32, glm_moe_dsa"),
    ("llama", {"config": {"model_type": "llama"}}, ConfigError, "model_type='llama'"),
    ("V4.1", {"config": {"model_type": "deepseek_v41"}}, ConfigError, "V4.1 is another architecture"),
    ("list", {"config": {"model_type": ["llama"]}}, ConfigError, r"config\.json: Expected model_type=\['llama'\]"),
    ("nested", {"config": "[" * 100_000}, ConfigError, r"config\.json to be JSON: too many levels"),
    ("GLM next", {"config": {"model_type": "glm5_next"}}, ConfigError, "another architecture"),
]


@pytest.mark.parametrize(("files", "error", "message"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_files(tmp_path, files, error, message):
    with pytest.raises(error, match=message):
        jmla.load(write(tmp_path / "checkpoint", **files))


OPTIONS = [
    ({"dtype": "float16"}, r"dtype='float16' .* 'bfloat16' or 'float32'"),
    ({"kv_layout": "footer584"}, r"kv_layout='footer584' .*'inline656'.* for deepseek_v32"),
    ({"kv_layout": "int8"}, r"kv_layout='int8'"),
    ({"max_seq_len": 0}, r"max_seq_len=0 .* 1\.\.2560"),
    ({"max_seq_len": 2561}, r"max_seq_len=2561 .* 1\.\.2560"),
    ({"max_seq_len": 1.5}, r"max_seq_len=1.5"),
    ({"max_seq_len": True}, r"max_seq_len=True .* integer in 1\.\.2560"),
    ({"max_seq_len": np.int64(2561)}, r"max_seq_len=.*2561.* 1\.\.2560"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=str)
def test_load_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        jmla.load(write(tmp_path, config=to_dict(V32)), **options)


@pytest.mark.parametrize(
    ("options", "message"), [o for o in OPTIONS if {"dtype", "max_seq_len"} & o[0].keys()], ids=str
)
def test_make_model_options_are_worded_alike(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as made:
        make_model(V32, {}, **options)
    with pytest.raises(ValueError, match=message) as loaded:
        jmla.load(write(tmp_path, config=to_dict(V32)), **options)
    assert str(made.value) == str(loaded.value)


def test_max_seq_len_of_any_integer_type():
    spec = make_model(V32, {}, max_seq_len=np.int64(40)).spec
    assert type(spec.max_seq_len) is int
    assert spec.max_seq_len == 40


def test_end_tokens_outside_the_vocabulary(tmp_path):
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*eos_token_id=96 .* 0\.\.95"):
        jmla.load(write(tmp_path, config=to_dict(V32), generation_config={"eos_token_id": 96}))


@pytest.mark.parametrize("value", ["no", 1, [True]], ids=repr)
def test_flag_of_loading(tmp_path, value):
    with pytest.raises(TypeError, match=r"deterministic=.* to be True or False"):
        jmla.load(write(tmp_path, config=to_dict(V32)), deterministic=value)


def test_checkpoint_without_weights(tmp_path):
    with pytest.raises((ValueError, OSError), match=r"model\.safetensors"):
        jmla.load(write(tmp_path, config=to_dict(V32)))


GENERATION = [
    ("{", "to be JSON"),
    ([], "JSON object"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 3}, "min_p"),
    ({"eos_token_id": "end"}, "eos_token_id"),
    ({"eos_token_id": [1, -7]}, "eos_token_id"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"temperature": 1e39}, r"generation_config\.json: .* temperature=1e\+39"),
]


@pytest.mark.parametrize(("content", "message"), GENERATION, ids=lambda x: str(x)[:30])
def test_generation_config(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        read_text_support(write(tmp_path, generation_config=content))


def test_broken_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json to be a tokenizer"):
        read_text_support(write(tmp_path, tokenizer="{}"))
    write_tokenizer(tmp_path, add_bos=True)
    with pytest.raises(ValueError, match="name a bos_token"):
        read_text_support(write(tmp_path, tokenizer_config={"add_bos_token": True, "bos_token": "<none>"}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "to be JSON"),
        ("[" * 100_000, "JSON"),
        ([], "JSON object, got list"),
        ("7", "JSON object, got int"),
        ({"add_bos_token": "no"}, "add_bos_token='no' .* true or false"),
        ({"add_bos_token": True, "bos_token": 7}, "name a bos_token"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_tokenizer_config(tmp_path, content, message):
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        read_text_support(write(tmp_path, tokenizer_config=content))
    assert str(tmp_path / "tokenizer_config.json") in str(raised.value)


def test_tokenizer_of_no_json(tmp_path):
    for content in (b"\xff", b"[" * 100_000, b"7"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer\.json to be a tokenizer"):
            read_text_support(tmp_path)


def test_hub_download_leaves_subfolders(tmp_path, monkeypatch):
    """Patterns are matched against whole paths, where * goes through slashes."""
    asked = {}

    def snapshot_download(name, **patterns):
        asked.update(patterns, name=name)
        return tmp_path

    fake = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert hub.resolve("owner/model") == tmp_path
    assert asked.pop("name") == "owner/model"
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    others = ["original/model.safetensors", "inference/config.json", "a/b/c.safetensors", "pytorch_model.bin"]

    def kept(file):
        return any(fnmatch.fnmatch(file, p) for p in asked["allow_patterns"]) and not any(
            fnmatch.fnmatch(file, p) for p in asked["ignore_patterns"]
        )

    assert [file for file in files + others if kept(file)] == files


def test_paths(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(NotADirectoryError, match="found a file"):
        hub.resolve(file)
    with pytest.raises(FileNotFoundError, match="not a hub id"):
        hub.resolve(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="No checkpoint directory '~no such user/model'"):
        hub.resolve("~no such user/model")
    with pytest.raises(FileNotFoundError, match=r"No checkpoint directory 'x+\.\.\.: File name too long"):
        hub.resolve("x" * 5000)
    for nothing in ("", None, 7, b"model"):
        with pytest.raises(TypeError, match="checkpoint directory or a hub id"):
            hub.resolve(nothing)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'jmla\[hub\]'"):
        hub.resolve("owner/model")

"""Bad inputs, each with its one clear error: before anything runs, naming what is wrong and what is allowed."""

import dataclasses
import fnmatch
import functools
import json
import sys
import types

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


# ---- options of sampling

SAMPLING = [
    ({"temperature": -0.1}, r"temperature=-0.1 .* 0 <= temperature"),
    ({"temperature": float("nan")}, r"temperature=nan .* finite"),
    ({"temperature": float("inf")}, r"temperature=inf .* finite"),
    ({"temperature": "hot"}, r"temperature='hot'"),
    ({"temperature": True}, r"temperature=True"),
    ({"top_k": -1}, r"top_k=-1 .* at least 0"),
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
    ({"max_new_tokens": 0}, r"max_new_tokens=0 .* at least 1"),
    ({"max_new_tokens": 1.5}, r"max_new_tokens=1.5"),
    ({"logprobs": -1}, r"logprobs=-1 .* 0 to 20"),
    ({"logprobs": 21}, r"logprobs=21 .* 0 to 20"),
    ({"stop": ""}, r"stop item ''"),
    ({"stop": [""]}, r"stop item ''"),
    ({"stop": [[]]}, r"stop item \[\]"),
    ({"stop": [[-3]]}, r"stop token id=-3"),
    ({"stop": 7}, r"stop=7"),
    ({"stop": [7]}, r"stop item 7"),
]


@pytest.mark.parametrize(("options", "message"), SAMPLING, ids=str)
def test_sampling_values(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


# ---- generate

GENERATE = [
    ([], {}, ValueError, "at least one prompt"),
    ([[]], {}, ValueError, r"prompt 0 to hold at least one token"),
    (np.zeros(0, np.int32), {}, ValueError, r"prompt 0 to hold at least one token"),
    ("hello", {}, ValueError, "no tokenizer.json"),
    ([[1, 2], "hello"], {}, ValueError, r"prompt 1 .* no tokenizer.json"),
    (7, {}, TypeError, "prompts=7"),
    ([1.5, 2.5], {}, TypeError, "prompt 0 .* string or token ids, got float"),
    ([[1.5, 2.5]], {}, TypeError, "prompt 0 .* integer token ids, got float64"),
    ([[True, False]], {}, TypeError, "prompt 0 .* integer token ids, got bool"),
    ([[1, 96]], {}, ValueError, r"prompt 0 .* 0\.\.95, got 96 at position 1"),
    ([[1], [-1]], {}, ValueError, r"prompt 1 .* 0\.\.95, got -1 at position 0"),
    ([[2**40]], {}, ValueError, rf"0\.\.95, got {2**40}"),
    (np.array([1, 2**32 + 1]), {}, ValueError, r"0\.\.95, got 4294967297 at position 1"),
    (np.zeros((2, 2, 2), np.int32), {}, ValueError, r"one or two axes, got shape \(2, 2, 2\)"),
    ([["a", "b"]], {}, TypeError, "prompt 0 .* list of strings"),
    ([{"role": "user"}], {}, TypeError, "prompt 0 .* got dict"),
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
    ([3], {"sampling": {"temperature": 1}}, TypeError, "jmla.SamplingParams"),
    ([3], {"sampling": [SamplingParams()] * 2}, ValueError, "each of the 1 prompts, got 2"),
    ([3], {"stream": "stdout"}, TypeError, "stream='stdout'"),
]


@pytest.mark.parametrize(("prompts", "options", "error", "message"), GENERATE, ids=lambda x: repr(x)[:40])
def test_generate(prompts, options, error, message):
    with pytest.raises(error, match=message):
        jmla.generate(model(), prompts, **options)


def test_empty_string(tmp_path):
    text = TextSupport(Tokenizer(write_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=r"prompt 0 .* empty prompt"):
        jmla.generate(dataclasses.replace(model(), text=text), "")


def test_tokenizer_of_another_vocabulary(tmp_path):
    text = TextSupport(Tokenizer(write_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=r"prompt 0 .* 0\.\.95"):
        jmla.generate(dataclasses.replace(model(), text=text), "ÿ")


# ---- arrays

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
    ((TOKENS, LENGTHS, KEY), {"eos": (96,)}, r"eos=\(96,\) .* 0\.\.95"),
    ((TOKENS, LENGTHS, KEY), {"sampling": SamplingParams(seed=3)}, "without seed"),
    ((TOKENS, LENGTHS, KEY), {"sampling": SamplingParams(stop="x")}, "without seed, stop"),
    ((TOKENS, LENGTHS, KEY), {"sampling": SamplingParams(max_new_tokens=9)}, "without .* max_new_tokens"),
    ((TOKENS, LENGTHS, KEY), {"sampling": {"temperature": 1}}, "jmla.SamplingParams or RowParams, got dict"),
    ((TOKENS, LENGTHS, KEY), {"sampling": RowParams.pack([SamplingParams()])}, r"temperature to have shape \(2,\)"),
]


@pytest.mark.parametrize(("args", "options", "message"), ARRAYS, ids=lambda x: repr(x)[:30])
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
]


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
    for nothing in ("", None, 7):
        with pytest.raises(TypeError, match="checkpoint directory or a hub id"):
            hub.resolve(nothing)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'jmla\[hub\]'"):
        hub.resolve("owner/model")

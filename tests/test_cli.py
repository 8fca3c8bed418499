"""The command line: text on standard output, errors on one line, and what ``info`` says."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import GLM, V4, V32, tiny_model
from tiny_text import write_tokenizer

import jmla
from jmla import bundled, cli
from jmla.describe import parameter_counts
from jmla.models import bytes_per_row, bytes_per_token, placements
from jmla.models.config import from_dict
from jmla.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checkpoint(golden_checkpoint, tmp_path_factory):
    """The golden V3.2 model with a tokenizer of ASCII letters."""
    path = tmp_path_factory.mktemp("cli") / "checkpoint"
    shutil.copytree(golden_checkpoint("v32").path, path)
    write_tokenizer(path, 96, every_byte=False)
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.9}))
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr(sys, "argv", ["jmla", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return call


OPTIONS = ["--dtype", "float32", "--kv-layout", "float32", "--max-seq-len", 256]


def test_generate_prints_prompt_and_completion(run, checkpoint, monkeypatch):
    model = jmla.load(checkpoint, dtype="float32", kv_layout="float32", max_seq_len=256)
    loaded = []
    monkeypatch.setattr("jmla.loading.load", lambda *args, **options: loaded.append((args, options)) or model)
    code, out, err = run("generate", checkpoint, "the fox", "-n", 12, "--seed", 1, *OPTIONS)
    expected = jmla.generate(model, "the fox", sampling=SamplingParams(seed=1, max_new_tokens=12))
    assert (code, out, err) == (0, f"the fox{expected.text}\n", "")
    assert loaded == [((str(checkpoint),), {"dtype": "float32", "kv_layout": "float32", "max_seq_len": 256})]
    assert jmla.generate(checkpoint, "the fox", sampling=SamplingParams(seed=1, max_new_tokens=12)) == expected
    assert loaded[1:] == [((checkpoint,), {})]

    options = ["--temperature", "0", "--repetition-penalty", "1.5", "--top-k", "4", "--stop", expected.text[3:5]]
    code, out, _ = run("generate", checkpoint, "the fox", "--max-new-tokens", 9, *options, *OPTIONS)
    params = SamplingParams(temperature=0, repetition_penalty=1.5, top_k=4, max_new_tokens=9, stop=expected.text[3:5])
    assert (code, out) == (0, f"the fox{jmla.generate(model, 'the fox', sampling=params).text}\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "CHECKPOINT", "the", "--top-p", "0"], "top_p=0.0"),
        (["generate", "CHECKPOINT", "the", "--dtype", "int8"], "dtype='int8'"),
        (["generate", "CHECKPOINT", "the", "--kv-layout", "footer584"], "kv_layout='footer584'"),
        (["generate", "CHECKPOINT", "the", "--max-seq-len", "0"], "max_seq_len=0"),
        (["generate", "/nowhere/at/all", "the"], "No checkpoint directory '/nowhere/at/all'"),
        (["generate", "CHECKPOINT", ""], "prompt 0 to hold at least one token"),
        (["generate", "CHECKPOINT", "a\udcff"], "prompt 0 to be valid Unicode"),
        (["generate", "CHECKPOINT", "the", "-n", "9999"], "max_new_tokens=9999 to fit max_seq_len"),
        (["generate", "CHECKPOINT", "the", "--temperature", "1e39"], "temperature=1e+39"),
        (["generate", "CHECKPOINT", "the", "--top-k", "9" * 400], "top_k=999"),
        (["info", "~no such user/model"], "No checkpoint directory '~no such user/model'"),
        (["info", ""], "source=''"),
        (["info", "/nowhere/at/all"], "No checkpoint directory '/nowhere/at/all'"),
        (["info", "CHECKPOINT", "--kv-layout", "fp4"], "kv_layout='fp4'"),
    ],
    ids=str,
)
def test_errors_are_one_line(run, checkpoint, args, message):
    code, out, err = run(*(checkpoint if arg == "CHECKPOINT" else arg for arg in args))
    assert code == 1
    assert out == ""
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "a", "b", "c"], "expected [PATH] PROMPT, got 3 arguments; quote the prompt"),
        (["generate", "the", "--top-k", "few"], "Invalid value for '--top-k'"),
        (["generate", "the", "--top-q", "1"], "No such option"),
        (["inform"], "No such command 'inform'"),
    ],
    ids=str,
)
def test_wrong_usage_ends_with_one_line(run, args, message):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert message in last


def test_version(run):
    assert run("--version") == (0, f"jmla {jmla.__version__}\n", "")


def test_info(run, checkpoint):
    code, out, _ = run("info", checkpoint)
    config = from_dict(json.loads((checkpoint / "config.json").read_text()))
    assert code == 0
    for part in ("deepseek_v32", "inline656", "bytes a token", "4: sparse MLA, 4 with an indexer", "tokenizer.json"):
        assert part in out
    assert f"{config.max_position_embeddings:,} tokens" in out


def test_module_runs(checkpoint):
    """Piped, nothing is wrapped or cut, nor taken as markup."""
    path = checkpoint.parent / ("[bold]" + "long" * 40)
    path.symlink_to(checkpoint)
    command = [sys.executable, "-m", "jmla", "info", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "deepseek_v32" in done.stdout
    assert f"  {path}\n" in done.stdout


@pytest.mark.parametrize("config", [V4, V32, GLM], ids=lambda config: config.model_type)
def test_parameter_counts(config):
    counts = parameter_counts(config)
    trunk = {name: place for name, place in placements(config).items() if not place.integer and not place.optional}
    sizes = {name: int(np.prod(place.shape)) for name, place in trunk.items()}
    assert counts["total"] == sum(sizes.values())
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = routed * (config.n_routed_experts - config.num_experts_per_tok) // config.n_routed_experts
    assert counts["active"] == counts["total"] - idle
    assert counts["draft"] == sum(int(np.prod(p.shape)) for p in placements(config).values() if p.optional)


def test_v4_flash_has_its_published_size():
    flash = dataclasses.replace(
        V4,
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        sliding_window=128,
        layer_kinds=("window",) * 2 + ("csa", "hca") * 20 + ("csa",),
        layer_routing=("hash",) * 3 + ("learned",) * 40,
        hca_ratio=128,
        index_n_heads=64,
        index_head_dim=128,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
    )
    counts = parameter_counts(flash)
    assert counts["total"] / 1e9 == pytest.approx(284.3, abs=0.1)
    assert counts["active"] / 1e9 == pytest.approx(13.5, abs=0.5)


@pytest.mark.parametrize(("family", "kv_layout"), [("v4", "float32"), ("v4", "footer584"), ("v32", "inline656")])
def test_k14_cache_costs_are_what_is_allocated(family, kv_layout):
    """Two numbers, bytes a token and bytes a sequence, which the allocation confirms."""
    model = tiny_model(family, kv_layout)
    rows, tokens = 2, 2048
    held = jmla.init_cache(model, rows, tokens).nbytes
    for name, cost in bytes_per_token(model.spec).items():
        assert held[name] == cost * rows * tokens
    for name, cost in bytes_per_row(model.spec).items():
        assert held[name] == cost * rows
    drafting = jmla.init_cache(model, rows, tokens, rollback=3).nbytes
    for name, cost in bytes_per_row(model.spec, rollback=3).items():
        assert drafting[name] == cost * rows
    assert set(held) == {*bytes_per_token(model.spec), *bytes_per_row(model.spec)}


def test_bundled_model_is_the_default(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "path", lambda: tmp_path)
    assert run("info")[2].startswith(f"Error: Expected {tmp_path} to be a checkpoint directory")
    assert run("generate", "hello")[2].startswith(f"Error: Expected {tmp_path} to be a checkpoint directory")

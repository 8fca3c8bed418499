"""Caches on disk: another process goes on exactly, other models are refused, saves happen whole or not at all."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmla
from jmla.kernels import layouts
from jmla.models import cache as cache_module
from jmla.models import inputs, make_model, saved, spec
from jmla.models.random import init_random
from tests.tiny import GLM, V4, V32

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {  # few layers: what is compiled is most of the time here
    "v4": dataclasses.replace(
        V4, num_hidden_layers=2, layer_kinds=("csa", "hca"), layer_routing=("learned",) * 2, hca_ratio=128
    ),
    "v32": dataclasses.replace(V32, num_hidden_layers=1, mlp_layer_types=("dense",), indexer_types=("full",)),
    "glm": dataclasses.replace(
        GLM, num_hidden_layers=2, mlp_layer_types=("dense",) * 2, indexer_types=("full", "shared")
    ),
}
FORMATS = {"v4": "auto", "v32": "bfloat16", "glm": "auto"}


def bare(family="v4", drafting=False, max_seq_len=None, kv_layout="auto", **changes):
    """A model without weights, which can make and load caches but take no step."""
    config = dataclasses.replace(CONFIGS[family], **changes)
    return make_model(
        config, {}, dtype="float32", kv_layout=kv_layout, drafting=drafting, max_seq_len=max_seq_len, deterministic=True
    )


def weighted(family):
    model = bare(family, kv_layout=FORMATS[family])
    params = jax.tree.map(jnp.asarray, init_random(model.config, "float32", seed=3))
    return dataclasses.replace(model, params={name: part for name, part in params.items() if name != "draft"})


def filled(model, batch=2, max_seq_len=512, seed=0, **options):
    """A cache with something in each of its arrays."""
    rng = np.random.default_rng(seed)
    cache = jmla.init_cache(model, batch, max_seq_len, **options)
    bits = lambda x: jnp.asarray(rng.integers(0, 256, x.nbytes).astype(np.uint8).view(x.dtype).reshape(x.shape))  # noqa: E731
    return cache.replace(
        pools=jax.tree.map(bits, cache.pools),
        states=jax.tree.map(bits, cache.states),
        lengths=jnp.arange(batch, dtype=jnp.int32) + 7,
        draft_lengths=jnp.arange(batch, dtype=jnp.int32) + 5,
    )


def assert_same(actual, expected):
    """Bit for bit, NaN included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def disk(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def other_process(call, *args, **environment):
    code = f"import sys; from tests import test_cache_save as t; t.{call}(*sys.argv[1:])"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- going on


def prompts(seed):
    return np.random.default_rng(seed).integers(2, 96, (2, 130)).astype(np.int32)


def go_on(model, cache):
    """A chunk and two tokens for each row, all logits of them, in the one width that is compiled."""
    out = []
    for seed, lengths in ((4, [7, 20]), (5, [1, 1]), (6, [1, 1])):
        logits, cache = jmla.prefill(model, prompts(seed), lengths, cache, all_logits=True)
        out.append(np.asarray(logits))
    return np.stack(out)


def distract(model):
    jmla.prefill(model, prompts(9), [130, 55], jmla.init_cache(model, 2, 512), all_logits=True)


def begin(folder):
    for family in CONFIGS:
        model, place = weighted(family), Path(folder, family)
        cache = jmla.init_cache(model, 2, 512)
        _, cache = jmla.prefill(model, prompts(1), [10, 130], cache, all_logits=True)
        before = jmla.copy(cache)
        cache.save(place)
        assert_same(cache, before)
        distract(model)
        np.save(Path(folder, f"{family}.npy"), go_on(model, cache))
        with pytest.raises(jmla.CacheConsumedError):  # saving has not kept its buffers from the steps
            cache.save(place, overwrite=True)


def resume(folder):
    for family in CONFIGS:
        model = weighted(family)
        cache = jmla.PagedCache.load(Path(folder, family), model)
        distract(model)
        np.save(Path(folder, f"{family}-resumed.npy"), go_on(model, cache))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Logits of a process that went on, and of one that took over: the second finds what the first has compiled."""
    folder = tmp_path_factory.mktemp("sessions")
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    other_process("begin", folder, **compiled)
    other_process("resume", folder, **compiled)
    return folder


@pytest.mark.parametrize("family", CONFIGS)
def test_f16_another_process_goes_on_exactly(family, resumed):
    """Saved with 10 and 130 tokens, both in the middle of windows of 4 and of 128."""
    expected = np.load(resumed / f"{family}.npy")
    np.testing.assert_array_equal(np.load(resumed / f"{family}-resumed.npy"), expected)
    assert np.isfinite(expected).all()
    assert expected[-1, :, 0].std(axis=-1).min() > 0.01


# ---- what is saved


@pytest.mark.parametrize("kv_layout", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_array_comes_back_bit_for_bit(tmp_path, family, kv_layout):
    model = bare(family, kv_layout=kv_layout, drafting=True)
    cache = filled(model)
    cache.save(tmp_path / "a" / "b")
    assert_same(jmla.PagedCache.load(str(tmp_path / "a" / "b"), model), cache)


def test_float8_pools_come_back(tmp_path, monkeypatch):
    def plain(spec):
        return {name: layouts.plain(32, "float8_e4m3fn", 64) for name in ("latent", "index")}

    for module in (cache_module, inputs, saved):
        monkeypatch.setattr(module, "cache_layouts", plain)
    model = bare("v32")
    cache = filled(model)
    assert cache.pools["latent"].dtype == jnp.float8_e4m3fn
    cache.save(tmp_path)
    assert_same(jmla.PagedCache.load(tmp_path, model), cache)


def test_boundaries_own_tables_and_empty_streams_come_back(tmp_path):
    """An engine's cache, of a network whose layers write no HCA entries; NumPy arrays where a caller put some."""
    model = bare(layer_kinds=("csa", "window"))
    cache = cache_module.open_cache(model, 3, 512, pages=4, window_pages=5, records=2)
    table = np.array([[3, -1], [-1, -1], [0, 2]], np.int32)
    rng = np.random.default_rng(1)
    boundaries = {name: jnp.asarray(rng.normal(size=x.shape).astype("f4")) for name, x in cache.boundaries.items()}
    cache = cache.replace(table=table, boundaries=boundaries)
    assert set(cache.boundaries) == {"csa", "index"}
    assert cache.pools["hca"].size == 0
    cache.save(tmp_path)
    assert_same(jmla.PagedCache.load(tmp_path, model), cache)


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_pages_without_tokens_take_no_space(tmp_path, family):
    """64 pages a layer, three of them used, in rows as wide as those of released models."""
    wide = {"v4": {"head_dim": 512}, "v32": {"kv_lora_rank": 512}}[family]
    model = bare(family, qk_rope_head_dim=64, index_head_dim=128, max_position_embeddings=2**14, **wide)
    cache = jmla.init_cache(model, 1, 64 * 256)
    rng, used, pools = np.random.default_rng(0), 0, {}
    for name, pool in cache.pools.items():
        if name != "window":
            pages = np.zeros((dict(cache.layers)[name], 64, pool.nbytes // dict(cache.layers)[name] // 64), np.uint8)
            pages[:, :3] = rng.integers(0, 256, pages[:, :3].shape)
            pools[name], used = jnp.asarray(pages.reshape(pool.shape)), used + pages[:, :3].nbytes
    cache = cache.replace(pools=cache.pools | pools)
    cache.save(tmp_path / "some")
    assert used < disk(tmp_path / "some") < 1.01 * used + (32 << 10)
    assert sum(cache.nbytes.values()) > 20 * used
    assert_same(jmla.PagedCache.load(tmp_path / "some", model), cache)
    jmla.init_cache(model, 1, 64 * 256).save(tmp_path / "none")
    assert disk(tmp_path / "none") < 32 << 10


def placed(folder, out):
    """In a process with two devices; which of them hold each cache goes to a file."""
    first, second = jax.devices()
    mesh = jax.sharding.Mesh(np.array([first, second]), "x")
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    model, seen = bare(), []
    for weights, devices in (
        (jnp.zeros(2), {first}),
        (jax.device_put(jnp.zeros(2), second), {second}),
        (jax.device_put(jnp.zeros(2), split), {first, second}),
    ):
        cache = jmla.PagedCache.load(folder, dataclasses.replace(model, params={"w": weights}))
        for leaf in jax.tree.leaves(cache):
            assert leaf.devices() == devices
            assert leaf.is_fully_replicated
            assert leaf.committed == weights.committed
        assert_same(cache, filled(model))
        cache.save(Path(out, "again"), overwrite=True)
        assert_same(jmla.PagedCache.load(Path(out, "again"), model), cache)
        seen.append(sorted({device.id for leaf in jax.tree.leaves(cache) for device in leaf.devices()}))
    Path(out, "seen.json").write_text(json.dumps(seen))


def test_the_cache_comes_to_the_devices_of_the_weights(tmp_path):
    filled(bare()).save(tmp_path / "saved")
    other_process("placed", tmp_path / "saved", tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert json.loads((tmp_path / "seen.json").read_text()) == [[0], [1], [0, 1]]


# ---- what is refused


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    for family in CONFIGS:
        filled(bare(family)).save(folder / family)
    return folder


@pytest.mark.parametrize(
    ("family", "model", "message"),
    [
        ("v32", ("glm", {}), "model_type: found 'deepseek_v32', expected 'glm_moe_dsa'"),
        ("v4", ("glm", {}), "model_type: found 'deepseek_v4', expected 'glm_moe_dsa'"),
        ("v4", ("v4", {"csa_ratio": 128}), "csa_ratio: found 4, expected 128"),
        ("v4", ("v4", {"csa_ratio": 128}), "layouts.csa.page_size: found 64, expected 2"),
        ("v4", ("v4", {"hca_ratio": 64}), "hca_ratio: found 128, expected 64"),
        ("v4", ("v4", {"sliding_window": 16}), "sliding_window: found 8, expected 16"),
        ("v4", ("v4", {"layer_kinds": ("csa", "csa")}), r"layer_kinds: found \['csa', 'hca'\], expected \['csa', 'csa"),
        ("v4", ("v4", {"rope_theta": 5e3}), "rope_theta: found 10000.0, expected 5000.0"),
        ("v4", ("v4", {"drafting": True}), "layers.window: found 2, expected 3"),
        ("v4", ("v4", {"kv_layout": "float32"}), "layouts.window.name: found 'footer48', expected 'plain-float32'"),
        ("v32", ("v32", {"kv_layout": "bfloat16"}), "layouts.latent.name: found 'inline52', expected 'plain-bfloat16'"),
        ("v32", ("v32", {"kv_lora_rank": 64}), "kv_lora_rank: found 32, expected 64"),
        ("v32", ("v32", {"max_seq_len": 511}), "max_seq_len of at most 511, the model's; found 512"),
    ],
)
def test_v6_caches_of_other_models_are_refused_before_anything_is_read(sessions, monkeypatch, family, model, message):
    monkeypatch.setattr(saved, "_read_arrays", None)
    with pytest.raises(ValueError, match=message):
        jmla.PagedCache.load(sessions / family, bare(model[0], **model[1]))


def test_other_page_sizes_versions_and_chunks_are_refused(sessions, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "_read_arrays", None)
    with monkeypatch.context() as patch:
        patch.setattr(spec, "LATENT_PAGE", 32)
        with pytest.raises(ValueError, match=r"layouts.latent.page_size: found 64, expected 32"):
            jmla.PagedCache.load(sessions / "glm", bare("glm"))
    with monkeypatch.context() as patch:
        patch.setattr(saved, "VERSION", 2)
        with pytest.raises(ValueError, match="of version 2; found 'jmla cache' of version 1"):
            jmla.PagedCache.load(sessions / "glm", bare("glm"))
    model = bare()
    filled(model, max_seq_len=2048).save(tmp_path)
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, prefill_chunk=1024))
    with pytest.raises(ValueError, match="chunks of 1024 tokens"):
        jmla.PagedCache.load(tmp_path, model)


def test_what_does_not_change_the_numbers_is_no_hindrance(sessions):
    model = bare(eos_token_id=(5,), torch_dtype="bfloat16", num_nextn_predict_layers=0, max_position_embeddings=600)
    options = {"deterministic": False, "dtype": "bfloat16", "implementation": "xla"}
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, **options))
    loaded = jmla.PagedCache.load(sessions / "v4", model)
    assert loaded.config == model.spec.config
    expected = filled(bare())
    assert_same(loaded.replace(config=expected.config), expected)


@pytest.mark.parametrize("kind", ["missing", "empty", "other", "arrays"])
def test_what_is_no_save_is_not_loaded(tmp_path, sessions, kind):
    place = tmp_path / "there"
    if kind == "arrays":
        shutil.copytree(next((sessions / "v4").glob("arrays-*")), place)
    elif kind != "missing":
        place.mkdir()
    if kind == "other":
        (place / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"there to be a saved cache.*cannot read its cache.json"):
        jmla.PagedCache.load(place, bare())


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"{}", b"3", b'{"format": "jmla cache"}'])
def test_manifests_of_others_are_refused(tmp_path, text):
    (tmp_path / "cache.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"cache.json to be that of a saved cache"):
        jmla.PagedCache.load(tmp_path, bare())


@pytest.mark.parametrize("how", ["gone", "half", "changed"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # reads that end after one has failed
def test_damage_is_an_error_or_without_effect(tmp_path, sessions, how):
    """Every file of a save in turn. Orbax keeps some that are not needed for reading."""
    model, refused = bare(), 0
    original = jmla.PagedCache.load(sessions / "v4", model)
    for file in sorted(file for file in (sessions / "v4").rglob("*") if file.is_file()):
        place = tmp_path / "cache"
        shutil.copytree(sessions / "v4", place)
        target = place / file.relative_to(sessions / "v4")
        content = bytearray(target.read_bytes())
        content[len(content) // 2] ^= 1
        if how == "gone":
            target.unlink()
        else:
            target.write_bytes(content if how == "changed" else content[: len(content) // 2])
        try:
            found = jmla.PagedCache.load(place, model)
        except (FileNotFoundError, ValueError) as error:
            assert str(place) in str(error)  # noqa: PT017
            refused += 1
        else:
            assert_same(found, original)
        shutil.rmtree(place)
    assert refused >= 4


def test_consumed_caches_and_things_of_other_types(tmp_path, sessions):
    cache, model = filled(bare()), bare()
    cache.pools["csa"].delete()
    with pytest.raises(jmla.CacheConsumedError):
        cache.save(tmp_path / "a")
    cache = filled(model)
    with pytest.raises(TypeError, match="Expected overwrite='yes' to be True or False"):
        cache.save(tmp_path / "a", overwrite="yes")
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        jax.jit(lambda cache: cache.save(tmp_path / "a"))(cache)
    for path in (None, "", 3):
        with pytest.raises(TypeError, match="to be the path of a directory"):
            cache.save(path)
        with pytest.raises(TypeError, match="to be the path of a directory"):
            jmla.PagedCache.load(path, model)
    with pytest.raises(TypeError, match=r"Expected model to be a jmla.Model"):
        jmla.PagedCache.load(sessions / "v4", "jmla-tiny-v4")
    (tmp_path / "file").write_text("")
    for call in (lambda: cache.save(tmp_path / "file"), lambda: jmla.PagedCache.load(tmp_path / "file", model)):
        with pytest.raises(NotADirectoryError, match="file to be a directory"):
            call()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_without_orbax_the_extra_is_named(tmp_path, sessions, monkeypatch):
    cache = filled(bare())
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'jmla\[save\]'"):
        cache.save(tmp_path / "a")
    with pytest.raises(ImportError, match=r"pip install 'jmla\[save\]'"):
        jmla.PagedCache.load(sessions / "v4", bare())
    assert not (tmp_path / "a").exists()


# ---- replacing, and failing


def test_a_save_is_replaced_on_request_only(tmp_path):
    model = bare()
    first, second = filled(model, seed=1), filled(model, seed=2, batch=1)
    first.save(tmp_path)  # an empty directory is as good as none
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        second.save(tmp_path)
    assert_same(jmla.PagedCache.load(tmp_path, model), first)
    second.save(tmp_path, overwrite=True)
    assert_same(jmla.PagedCache.load(tmp_path, model), second)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_directories_are_left_alone(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FileExistsError, match=r"to be empty, or a saved cache; it holds \['thesis.tex'\]"):
        filled(bare()).save(tmp_path, overwrite=overwrite)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["arrays", "arrays written", "manifest"])
def test_saves_that_fail_leave_what_was_there(tmp_path, monkeypatch, place, error):
    import orbax.checkpoint as ocp

    model = bare()
    first, second = filled(model, seed=1), filled(model, seed=2)
    first.save(tmp_path / "old")
    before = sorted(tmp_path.rglob("*"))
    write = ocp.Checkpointer.save

    def failing(*args, **kwargs):
        if place == "arrays written":
            write(*args, **kwargs)
        else:  # as orbax does before it renames
            Path(f"{args[1]}.orbax-checkpoint-tmp").mkdir()
        raise error

    def full(descriptor):
        raise error

    with monkeypatch.context() as patch:
        if place == "manifest":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(ocp.Checkpointer, "save", failing)
        for name in ("old", "new"):
            with pytest.raises(type(error)):
                second.save(tmp_path / name, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert_same(jmla.PagedCache.load(tmp_path / "old", model), first)
    second.save(tmp_path / "old", overwrite=True)
    assert_same(jmla.PagedCache.load(tmp_path / "old", model), second)


def test_killed_saves_are_no_saves_and_are_cleared_away(tmp_path, monkeypatch):
    """Killed before the manifest is put in place, or after that and before the old arrays are gone."""
    model = bare()
    first, second = filled(model, seed=1), filled(model, seed=2)
    first.save(tmp_path / "old")

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        for name in ("old", "new"):
            with pytest.raises(KeyboardInterrupt):
                second.save(tmp_path / name, overwrite=True)
    with pytest.raises(FileNotFoundError, match="whose saving has ended"):
        jmla.PagedCache.load(tmp_path / "new", model)
    assert_same(jmla.PagedCache.load(tmp_path / "old", model), first)
    second.save(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(saved, "_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            second.save(tmp_path / "old", overwrite=True)
    assert_same(jmla.PagedCache.load(tmp_path / "old", model), second)
    first.save(tmp_path / "old", overwrite=True)
    for name, cache in (("old", first), ("new", second)):
        assert_same(jmla.PagedCache.load(tmp_path / name, model), cache)
        assert len(list((tmp_path / name).iterdir())) == 2

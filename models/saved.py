"""Caches on disk: arrays in orbax's format, and beside them a manifest, whose arrival completes a save.

``cache.json`` names the folder of the arrays, so that replacing this one file replaces the save: whatever happens
before leaves what was there, whatever happens after leaves the new one.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jmla.kernels.layouts import KVLayout
from jmla.models.cache import PagedCache, check_arrays
from jmla.models.config import DsaConfig, V4Config
from jmla.models.config.common import shown
from jmla.models.inputs import check_cache
from jmla.models.options import check_flag
from jmla.models.params import layer_counts
from jmla.models.spec import Model, cache_layouts, check_model

FORMAT, VERSION = "jmla cache", 1
MANIFEST, ARRAYS = "cache.json", "arrays-"
CHUNK_BYTES = 1 << 24  # compressed at a time, where orbax would take a whole pool
NAMED = 4  # differences between models that a message spells out
UNRELATED = {  # to what a network computes, or told by how many layers write each stream
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "draft_kind",
    "index_share_for_mtp_iteration",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
}


def save(cache: PagedCache, path: str | os.PathLike[str], overwrite: bool = False) -> None:
    """See ``PagedCache.save``."""
    check_arrays(cache, "save")
    folder = _folder(path)
    new = not folder.exists()
    _check_target(folder, check_flag("overwrite", overwrite))
    ocp = _orbax()
    leaves, _ = jax.tree_util.tree_flatten_with_path(cache)
    arrays = {jax.tree_util.keystr(at, simple=True, separator="."): _second(leaf) for at, leaf in leaves}
    name = f"{ARRAYS}{uuid.uuid4().hex}"
    body = {
        "arrays": name,
        "model": _facts(cache.config, cache.layouts, cache.layers),
        "chunk": cache.chunk,
        "max_seq_len": cache.max_seq_len,
        "leaves": {name: _described(array) for name, array in arrays.items()},
    }
    manifest = {"format": FORMAT, "version": VERSION, "crc32": _body_checksum(body), "cache": body}
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{name}.json"
    try:
        tree = {name: array for name, array in arrays.items() if array.size}  # orbax refuses empty ones
        options = dict.fromkeys(tree, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(folder / name, args=ocp.args.PyTreeSave(tree, save_args=options))
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(manifest, indent=1))
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        _remove(folder.glob(f"{name}*"))
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    os.replace(draft, folder / MANIFEST)
    _remove(file for file in folder.glob(f"{ARRAYS}*") if file.name != name)


def load(path: str | os.PathLike[str], model: Model) -> PagedCache:
    """See ``PagedCache.load``."""
    spec = check_model(model).spec
    folder = _folder(path)
    body = _read_manifest(folder)
    layouts, layers = tuple(cache_layouts(spec).items()), tuple(layer_counts(spec.config, spec.drafting).items())
    _check_facts(folder, body["model"], _facts(spec.config, layouts, layers))
    if body["max_seq_len"] > spec.max_seq_len:
        raise ValueError(
            f"Expected the cache in {folder} to have a max_seq_len of at most {spec.max_seq_len}, the model's; found "
            f"{body['max_seq_len']}"
        )
    leaves = body["leaves"]

    def built(arrays: dict[str, Any]) -> PagedCache:
        fields: dict[str, Any] = {"pools": {}, "states": {}, "boundaries": {}, "window_table": None}
        for name, array in arrays.items():
            field, _, key = name.partition(".")
            if key:
                fields[field][key] = array
            else:
                fields[field] = array
        facts = {"layouts": layouts, "layers": layers, "chunk": body["chunk"], "max_seq_len": body["max_seq_len"]}
        return PagedCache(**fields, **facts, config=spec.config)

    shapes = {name: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"]) for name, leaf in leaves.items()}
    check_cache(model, built(shapes), len(shapes["lengths"]))
    arrays = _read_arrays(folder / body["arrays"], [name for name, shape in shapes.items() if shape.size])
    arrays |= {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items() if not shape.size}
    for name, leaf in leaves.items():
        if _described(arrays[name]) != leaf:
            raise ValueError(f"Expected {name} in {folder} to hold what was saved: a file is damaged")
    return built(jax.device_put(arrays, _placement(model)))


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise TypeError(f"Expected path={shown(path)} to be the path of a directory")
    folder = Path(path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"Expected {folder} to be a directory: caches are saved as directories")
    return folder


def _check_target(folder: Path, overwrite: bool) -> None:
    """Refuses a directory with a save that is to be kept, or with anything else but what killed saves leave."""
    names = [file.name for file in folder.iterdir()] if folder.exists() else []
    if MANIFEST in names:
        if not overwrite:
            raise FileExistsError(f"Expected {folder} to hold no saved cache; pass overwrite=True to replace that one")
    elif others := [name for name in names if not name.startswith(ARRAYS)]:
        raise FileExistsError(f"Expected {folder} to be empty, or a saved cache; it holds {shown(sorted(others))}")


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "Saving and loading caches needs orbax-checkpoint; install it (pip install 'jmla[save]')"
        ) from error
    return ocp


def _facts(
    config: V4Config | DsaConfig, layouts: tuple[tuple[str, KVLayout], ...], layers: tuple[tuple[str, int], ...]
) -> dict[str, Any]:
    """What decides which caches a model can go on from, by name, as JSON gives it back."""
    out = {name: value for name, value in dataclasses.asdict(config).items() if name not in UNRELATED}
    out |= {f"layers.{name}": count for name, count in layers}
    for name, layout in layouts:
        form = {"name": layout.name} | dataclasses.asdict(layout)
        out |= {f"layouts.{name}.{field}": value for field, value in form.items()}
    return json.loads(json.dumps(out))


def _check_facts(folder: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = [
        f"{name}: found {shown(found.get(name))}, expected {shown(expected.get(name))}"
        for name in expected | found
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise ValueError(
            f"Expected {folder} to hold a cache of a model like the one given; {'; '.join(wrong[:NAMED])}{more}"
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    """What ``save`` wrote of a cache beside its arrays."""
    file = folder / MANIFEST
    try:
        text = file.read_bytes()
    except OSError as error:
        raise FileNotFoundError(
            f"Expected {folder} to be a saved cache, whose saving has ended: cannot read its {MANIFEST} "
            f"({error.strerror})"
        ) from error
    try:
        manifest = json.loads(text)
        form, version = manifest["format"], manifest["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"Expected {file} to be that of a saved cache: it is damaged, or something else") from error
    if (form, version) != (FORMAT, VERSION):
        raise ValueError(
            f"Expected {folder} to be a {FORMAT} of version {VERSION}; found {shown(form)} of version {shown(version)}"
        )
    body = manifest.get("cache")
    if _body_checksum(body) != manifest.get("crc32"):
        raise ValueError(f"Expected {file} to hold what was saved: it is damaged")
    return body


def _read_arrays(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    ocp = _orbax()
    wanted = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=wanted))
    except MemoryError:
        raise
    except Exception as error:  # orbax and TensorStore have many for files that are missing, truncated or damaged
        raise ValueError(
            f"Cannot read the arrays of a cache in {folder}; is a file missing or damaged? {error}"
        ) from error


def _second(array: Any) -> Any:
    """A second array over the same buffers. What is read of an array on the host stays with it, and where that is the
    buffer itself, as on the CPU, no step can take it over any more."""
    if not isinstance(array, jax.Array):
        return array
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _described(array: jax.Array | np.ndarray) -> dict[str, Any]:
    """Shape, dtype and checksum: TensorStore notices files that are too short, but not bytes that have changed."""
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"shape": list(array.shape), "dtype": array.dtype.name, "crc32": zlib.crc32(values)}


def _body_checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _placement(model: Model) -> Sharding | None:
    """Where the model's weights are bound to be: whole on all devices of their mesh. None: the default device."""
    for leaf in jax.tree.leaves(model.params):
        if getattr(leaf, "committed", False):
            at = leaf.sharding
            return NamedSharding(at.mesh, PartitionSpec()) if isinstance(at, NamedSharding) else at
    return None


def _remove(files: Any) -> None:
    for file in files:
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)

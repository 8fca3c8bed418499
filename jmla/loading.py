"""From a checkpoint to a model that can speak."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jmla import hub
from jmla.models import Model, make_model
from jmla.models.checkpoint import load_params
from jmla.models.config import read_config
from jmla.models.options import check_dtype, check_flag, check_max_seq_len
from jmla.models.spec import check_implementation, resolve_format
from jmla.text import read_text_support

PROGRESS_FROM = 2 << 30  # bytes of checkpoint from which a progress bar is shown


@contextmanager
def _progress(path: Path) -> Iterator[Any]:
    """A callback ``(bytes done, bytes in all)`` that draws a bar on a terminal if there is much to load, else None."""
    size = sum(file.stat().st_size for file in path.glob("*.safetensors") if file.is_file())
    if size < PROGRESS_FROM or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=size)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _on_device(tree: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a nested dict on the default device, taken out of ``tree`` one by one.

    On the CPU nothing is copied: the loader's arrays are aligned as JAX wants them, and become its buffers. Elsewhere
    each host array is let go once it has been copied, before the next one.
    """
    out = {}
    for key in list(tree):
        value = tree.pop(key)
        if isinstance(value, dict):
            out[key] = _on_device(value)
        else:
            out[key] = jax.device_put(value, may_alias=True).block_until_ready()
    return out


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    kv_layout: str = "auto",
    implementation: str | None = None,
    deterministic: bool | None = None,
    max_seq_len: int | None = None,
) -> Model:
    """Loads a checkpoint of DeepSeek-V4, DeepSeek-V3.2 or GLM-5.

    Args:
        path: a checkpoint directory in any published dialect; a hub id ``owner/name`` (needs huggingface-hub); or
            ``"jmla-tiny-v4"``, the model that ships with the package.
        dtype: "bfloat16" or "float32", of the weights; quantised ones are dequantised to it, and what the family
            keeps in float32 stays so.
        kv_layout: format of the cache. "auto" is the family's FP8 format: "footer584" for V4, "inline656" for V3.2
            and GLM. "bfloat16" and "float32" keep every stream plain.
        implementation: passed to every operation; None lets each choose the best that can run.
        deterministic: results bitwise independent of batch mates and chunking, at some cost. Default False.
        max_seq_len: most tokens of a sequence; default what the checkpoint allows.

    Returns:
        The model, on the default device.

    Raises:
        OSError, ImportError: nothing to load there (see ``jmla.hub.resolve``).
        TypeError: ``path`` is no path, or ``deterministic`` no bool.
        ValueError: an unsupported configuration or option, or tensors that do not fit; the message lists all.
    """
    directory = hub.resolve(path)
    check_dtype(dtype)
    config = read_config(directory)
    resolve_format(config, kv_layout)  # a wrong option should not wait for the weights
    check_implementation(implementation)
    if deterministic is not None:
        check_flag("deterministic", deterministic)
    check_max_seq_len(max_seq_len, config.max_position_embeddings)
    text = read_text_support(directory, config.vocab_size)
    with _progress(directory) as progress:
        params, report = load_params(directory, config, dtype, progress=progress)
    return make_model(
        config,
        _on_device(params),
        dtype=dtype,
        kv_layout=kv_layout,
        implementation=implementation,
        deterministic=deterministic,
        max_seq_len=max_seq_len,
        drafting=report.drafting,
        text=text,
    )

"""What a checkpoint recommends for generation: generation_config.json."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmla.models.config.common import INT32_MAX, Fields
from jmla.models.config.files import naming, read_object


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Recommended sampling and special tokens; None (or no token) where the checkpoint says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    do_sample: bool | None = None
    eos_token_id: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


def generation_from_dict(values: Mapping[str, Any], vocab_size: int = INT32_MAX) -> GenerationDefaults:
    """Checks the fields of a generation_config.json; end and begin tokens must be in the vocabulary.

    Raises:
        ConfigError: a value out of range.
    """
    fields = Fields(values)
    return GenerationDefaults(
        temperature=fields.number("temperature", None, closed=True),
        top_p=fields.number("top_p", None, high=1),
        top_k=fields.integer("top_k", None, low=0),
        min_p=fields.number("min_p", None, high=1, closed=True),
        repetition_penalty=fields.number("repetition_penalty", None),
        max_new_tokens=fields.integer("max_new_tokens", None),
        do_sample=fields.get("do_sample", bool, "true or false", None),
        eos_token_id=fields.tokens("eos_token_id", vocab_size),
        bos_token_id=fields.token("bos_token_id", vocab_size),
        pad_token_id=fields.token("pad_token_id"),
    )


def read_generation_config(path: str | os.PathLike[str], vocab_size: int = INT32_MAX) -> GenerationDefaults:
    """Reads generation_config.json of a checkpoint directory, or such a file; no file gives no defaults.

    Args:
        path: the directory or the file.
        vocab_size: the model's, which end and begin tokens must be in.

    Raises:
        ConfigError: a file that is not a JSON object, or a value out of range; the message names the file.
        OSError: a file that cannot be read.
    """
    file = Path(path)
    file = file / "generation_config.json" if file.is_dir() else file
    if not file.exists() and not file.is_symlink():
        return GenerationDefaults()
    values = read_object(file)
    with naming(file):
        return generation_from_dict(values, vocab_size)

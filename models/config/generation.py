"""What a checkpoint recommends for generation: generation_config.json."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmla.models.config.common import ConfigError, Fields, unsupported


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


def generation_from_dict(values: Mapping[str, Any]) -> GenerationDefaults:
    """Checks the fields of a generation_config.json.

    Raises:
        ConfigError: a value out of range.
    """
    fields = Fields(values)
    temperature = fields.get("temperature", (int, float), "a number", None)
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise unsupported("temperature", temperature, "a finite number, 0 or more")
    top_p = fields.number("top_p", None)
    if top_p is not None and top_p > 1:
        raise unsupported("top_p", top_p, "in (0, 1]")
    min_p = fields.get("min_p", (int, float), "a number", None)
    if min_p is not None and not 0 <= min_p <= 1:
        raise unsupported("min_p", min_p, "in [0, 1]")
    return GenerationDefaults(
        temperature=None if temperature is None else float(temperature),
        top_p=top_p,
        top_k=fields.integer("top_k", None, low=0),
        min_p=min_p,
        repetition_penalty=fields.number("repetition_penalty", None),
        max_new_tokens=fields.integer("max_new_tokens", None),
        do_sample=fields.get("do_sample", bool, "true or false", None),
        eos_token_id=fields.tokens("eos_token_id"),
        bos_token_id=fields.token("bos_token_id"),
        pad_token_id=fields.token("pad_token_id"),
    )


def read_generation_config(path: str | os.PathLike[str]) -> GenerationDefaults:
    """Reads generation_config.json of a checkpoint directory, or such a file; no file gives no defaults.

    Raises:
        ConfigError: a file that is not a JSON object, or a value out of range.
    """
    file = Path(path)
    file = file / "generation_config.json" if file.is_dir() else file
    if not file.is_file():
        return GenerationDefaults()
    return generation_from_dict(read_object(file))


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"Expected {file} to be JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"Expected {file} to hold a JSON object, got {type(values).__name__}")
    return values

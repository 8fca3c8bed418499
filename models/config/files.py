"""JSON files: what stands in one, and errors that name it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jmla.models.config.common import ConfigError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"the name {name!r} twice in one object")
        out[name] = value
    return out


def parse_json(data: bytes) -> Any:
    """What UTF-8 JSON says.

    Raises:
        ValueError: not UTF-8, not JSON, a name twice in one object, or too many levels.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("too many levels of lists and objects") from None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: the file holds something else.
        OSError: it cannot be read.
    """
    try:
        values = parse_json(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"Expected {file} to be JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"Expected {file} to hold a JSON object, got {type(values).__name__}")
    return values


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Puts the file before the message of a ConfigError about its fields."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error

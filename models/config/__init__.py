"""Configurations: one frozen dataclass a family, read from every dialect of config.json. Needs no JAX."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmla.models.config.common import ConfigError, Yarn, unsupported
from jmla.models.config.dsa import DsaConfig, dsa_to_dict, read_dsa
from jmla.models.config.files import naming, read_object
from jmla.models.config.generation import GenerationDefaults, read_generation_config
from jmla.models.config.v4 import V4Config, read_v4, v4_to_dict

__all__ = [
    "ConfigError",
    "DsaConfig",
    "GenerationDefaults",
    "V4Config",
    "Yarn",
    "from_dict",
    "read_config",
    "read_generation_config",
    "to_dict",
]

SUPPORTED = ("deepseek_v4", "deepseek_v32", "glm_moe_dsa")
_RELATIVES = {
    "deepseek_v41": "DeepSeek-V4.1 is another architecture",
    "glm5_next": "GLM-5.3-Flash is another architecture (linear attention)",
    "glm5_next_text": "GLM-5.3-Flash is another architecture (linear attention)",
}


def from_dict(values: Mapping[str, Any]) -> V4Config | DsaConfig:
    """The configuration that a parsed config.json describes.

    DeepSeek-V4: the dialects of its repository, of DeepSeek's inference/config.json (which has no model_type) and of
    transformers. DeepSeek-V3.2 and GLM-5: with the old and the new rope fields.

    Raises:
        ConfigError: an unsupported model, or a missing, contradictory or unsupported field. The message names the
            field, its value and what is supported.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"Expected a configuration to be an object with named fields, got {type(values).__name__}")
    model_type = values.get("model_type")
    if model_type is None and "dim" in values and "compress_ratios" in values:
        model_type = "deepseek_v4"
    if model_type == "deepseek_v4":
        return read_v4(values)
    if model_type in ("deepseek_v32", "glm_moe_dsa"):
        return read_dsa(values)
    reason = f": {_RELATIVES[model_type]}" if isinstance(model_type, str) and model_type in _RELATIVES else ""
    raise unsupported("model_type", model_type, f"one of {', '.join(SUPPORTED)}{reason}")


def read_config(path: str | os.PathLike[str]) -> V4Config | DsaConfig:
    """Reads config.json of a checkpoint directory, or such a file.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: as ``from_dict``; also a file that is not a JSON object. The message names the file.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"Expected {file} to be a config.json")
    values = read_object(file)
    with naming(file):
        return from_dict(values)


def to_dict(config: V4Config | DsaConfig) -> dict[str, Any]:
    """A config.json, in the published dialect of the family, from which ``from_dict`` gives ``config`` back."""
    return v4_to_dict(config) if isinstance(config, V4Config) else dsa_to_dict(config)

"""Checkpoints: safetensors in every published dialect and number format, to and from a model's parameters."""

from jmla.models.checkpoint.errors import CheckpointError, CheckpointWarning
from jmla.models.checkpoint.load import LoadReport, load_params
from jmla.models.checkpoint.write import (
    collect_tensors,
    quantise_fp4,
    quantise_fp8,
    save_checkpoint,
    write_safetensors,
)

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "LoadReport",
    "collect_tensors",
    "load_params",
    "quantise_fp4",
    "quantise_fp8",
    "save_checkpoint",
    "write_safetensors",
]

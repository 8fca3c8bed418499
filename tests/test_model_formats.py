"""Quantised checkpoints give the logits of their dequantised twins, to the last bit."""

import numpy as np
import pytest

import jmla
from jmla.models import forward
from tests import fixtures_checkpoint as fx

IDS = np.random.default_rng(0).integers(2, 40, (1, 24)).astype(np.int32)
CASES = [
    ("v4", "original", "published"),
    ("v4", "original", "fp8_u8"),
    ("v4", "hybrid", "published"),
    ("v4", "transformers", "fp8"),
    ("v4", "mixed", "nvfp4"),
    ("v32", "transformers", "fp8_float32"),
    ("v32", "transformers", "fp8"),
    ("v32", "transformers", "nvfp4"),
    ("glm", "transformers", "nvfp4"),
    ("glm", "fused", "fp8"),
    ("glm", "transformers", "nvfp4_compressed"),
    ("glm", "transformers", "fp8_tensor"),
]


@pytest.fixture(scope="module")
def drawn():
    return {family: fx.draw(config) for family, config in fx.CONFIGS.items()}


@pytest.mark.parametrize(("family", "dialect", "number_format"), CASES)
def test_logits_equal_those_of_the_twin(family, dialect, number_format, drawn, tmp_path):
    config = fx.CONFIGS[family]
    twin = fx.write_fixture(tmp_path / "a", config, drawn[family], dialect=dialect, number_format=number_format)
    plain = "original" if family == "v4" else "transformers"
    fx.write_fixture(tmp_path / "b", config, twin, dialect=plain, number_format="float32")
    quantised, dequantised = (jmla.load(tmp_path / x, dtype="float32", kv_layout="float32") for x in "ab")
    logits = np.asarray(forward(quantised, IDS))
    np.testing.assert_array_equal(logits, np.asarray(forward(dequantised, IDS)))
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1

"""The Triton kernels of the index scores, compiled for GPUs that are not here."""

import jax
import jax.numpy as jnp
import pytest

from jmla.kernels import index_scores
from jmla.kernels.layouts import index132, plain
from jmla.kernels.shapes import INDEX
from tests import lowering

pytestmark = pytest.mark.lowering

V32, GLM = INDEX["v3.2"], INDEX["glm-5"]
BF16 = plain(128, "bfloat16", 64)
PAGES = 300_000  # of the pool: more than 2 GiB
SPILLS = {90: 0, 100: 220, 120: 452}  # bytes of a thread, the most that Triton 3.6 or 3.9 gave
CASES = {
    # layout, heads, requests, rows a request, pages of a request (0: by bounds)
    "decode short": (V32.layout, V32.heads, 1, 1, 128),
    "decode medium": (V32.layout, V32.heads, 1, 1, 2048),
    "decode long": (V32.layout, V32.heads, 64, 1, 2048),
    "decode two rows": (V32.layout, V32.heads, 64, 2, 2048),
    "decode 32 heads": (GLM.layout, GLM.heads, 64, 1, 2048),
    "decode bf16": (BF16, 64, 64, 1, 512),
    "prefill by table": (V32.layout, V32.heads, 1, 4096, 512),
    "prefill by bounds": (V32.layout, V32.heads, 1, 4096, 0),
    "prefill 32 heads": (GLM.layout, GLM.heads, 1, 4096, 0),
    "prefill bf16": (BF16, 64, 1, 4096, 0),
    "odd pages": (index132(61), 43, 2, 2, 512),
}
USUAL = ("decode long", "decode bf16", "prefill by bounds", "odd pages")


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
@pytest.mark.parametrize("case", lowering.cases(CASES, USUAL))
def test_fits(case, capability):
    layout, heads, requests, steps, pages = CASES[case]
    rows, spec = requests * steps, jax.ShapeDtypeStruct
    lengths = spec((rows,), jnp.int32)
    q, weights = spec((rows, heads, layout.width), jnp.bfloat16), spec((rows, heads), jnp.float32)
    pool = spec(layout.pool_shape(PAGES if pages else 512), layout.pool_dtype())

    def paged(q, weights, pool, lengths, table):
        return index_scores(q, weights, pool, layout=layout, lengths=lengths, table=table, implementation="triton")

    def contiguous(q, weights, pool, start, end):
        return index_scores(q, weights, pool, layout=layout, bounds=(start, end), implementation="triton")

    where = spec((requests, pages), jnp.int32) if pages else lengths
    found = lowering.lower(paged if pages else contiguous, q, weights, pool, lengths, where, capability=capability)
    quantised_apart = layout.kind == "index" and steps > 2
    assert [kernel.name for kernel in found] == ["_quantise_queries"] * quantised_apart + ["_index_scores"]
    for kernel in found:
        assert kernel.spills <= SPILLS[capability], kernel

"""Float64 NumPy forms of the operations, and pools of random bytes; nothing here uses the library's own readers."""

import ml_dtypes
import numpy as np


def random_pool(rng, layout, pages):
    """A pool of plausible rows; what lies between and behind them is 0xFF bytes, which are NaN everywhere."""
    pool = np.full((pages, layout.page_stride), 0xFF, np.uint8)
    size = layout.page_size
    if layout.kind == "plain":
        return rng.normal(scale=0.3, size=(pages, size * layout.width)).astype(layout.value_dtype)
    for page in pool:
        for t in range(size):
            at = t * layout.row_bytes
            codes = rng.normal(scale=100, size=layout.nope).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
            page[at : at + layout.nope] = codes.view(np.uint8)
            rope = rng.normal(scale=0.3, size=layout.rope).astype(ml_dtypes.bfloat16)
            page[at + layout.row_bytes - 2 * layout.rope : at + layout.row_bytes] = rope.view(np.uint8)
            if layout.kind == "footer":
                at = size * layout.row_bytes + t * layout.scale_bytes
                page[at : at + layout.num_tiles] = rng.integers(116, 120, layout.num_tiles)
            else:
                at = at + layout.nope if layout.kind == "inline" else size * layout.row_bytes + 4 * t
                scales = rng.uniform(0.001, 0.008, layout.num_tiles).astype(np.float32)
                if layout.scale_form == "power_of_two":
                    scales = 2.0 ** np.round(np.log2(scales))
                    scales = scales.astype(np.float32)
                page[at : at + 4 * layout.num_tiles] = scales.view(np.uint8)
    return pool


def unpack(pool, layout):
    """All rows of a pool, ``[slots, width]`` float64."""
    pool = np.asarray(pool)
    if layout.kind == "plain":
        return pool.reshape(-1, layout.width).astype(np.float64)
    out = []
    for page in pool:
        for t in range(layout.page_size):
            at = t * layout.row_bytes
            codes = page[at : at + layout.nope].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            if layout.kind == "footer":
                foot = layout.page_size * layout.row_bytes + t * layout.scale_bytes
                scales = 2.0 ** (page[foot : foot + layout.num_tiles].astype(np.float64) - 127)
            else:
                foot = at + layout.nope if layout.kind == "inline" else layout.page_size * layout.row_bytes + 4 * t
                scales = page[foot : foot + 4 * layout.num_tiles].view(np.float32).astype(np.float64)
            rope = page[at + layout.row_bytes - 2 * layout.rope : at + layout.row_bytes].view(ml_dtypes.bfloat16)
            out.append(np.concatenate([codes * np.repeat(scales, layout.tile)[: layout.nope], rope.astype(np.float64)]))
    return np.array(out)


def attention(q, sources, scale, v_dim, sinks=None):
    """``sources``: (unpacked rows, indices, lengths or None) each; ``q [R, H, D]``. Returns (out, lse) in float64."""
    q = np.asarray(q).astype(np.float64)
    out, lse = np.zeros((*q.shape[:2], v_dim)), np.full(q.shape[:2], -np.inf)
    for r in range(q.shape[0]):
        keys = []
        for rows, indices, lengths in sources:
            counted = indices[r] if lengths is None else indices[r][: max(int(lengths[r]), 0)]
            keys += [rows[i] for i in counted if 0 <= i < len(rows)]
        if not keys:
            continue
        keys = np.array(keys)
        logits = scale * q[r] @ keys.T
        for h in range(q.shape[1]):
            top = logits[h].max()
            weights = np.exp(logits[h] - top)
            lse[r, h] = top + np.log(weights.sum())
            sink = -np.inf if sinks is None else float(sinks[h])
            with np.errstate(over="ignore"):
                share = 1 / (1 + np.exp(sink - lse[r, h]))
            out[r, h] = weights @ keys[:, :v_dim] / weights.sum() * share
    return out, lse


def sylvester(width):
    """The orthonormal Hadamard matrix in Sylvester order."""
    m = np.ones((1, 1))
    while len(m) < width:
        m = np.block([[m, m], [m, -m]])
    return m / np.sqrt(width)


def index_scores(q, weights, rows, columns, counted, layout):
    """Scores ``[R, n]``; ``columns [R, n]`` are slots and ``counted [R, n]`` tells which take part."""
    q = np.asarray(q).astype(np.float32).astype(np.float64)
    weights = np.asarray(weights).astype(np.float64)
    out = np.full(columns.shape, -np.inf)
    if layout.kind == "index":
        if layout.hadamard:
            q = q @ sylvester(q.shape[-1])
        scale = np.maximum(np.abs(q).max(-1, keepdims=True), 1e-4) / 448
        q = (q / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    for r in range(q.shape[0]):
        for c in np.flatnonzero(counted[r]):
            out[r, c] = weights[r] @ np.maximum(q[r] @ rows[columns[r, c]], 0)
    return out


def assert_attention_close(got, expected, tight=False):
    """The tolerances of decode outputs: absolute or relative error of each value, and distance of the whole."""
    out, lse = (np.asarray(x).astype(np.float64) for x in got)
    want, want_lse = expected
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    error, some = np.abs(out - want), np.isfinite(want_lse)
    if tight:
        assert (error <= 2e-5 * max(1.0, np.abs(want).max())).all(), error.max()
    assert ((error <= 1e-3) | (error <= 2.01 / 128 * np.abs(want))).all(), error.max()
    if want.any():
        assert 1 - 2 * np.sum(out * want) / np.sum(out**2 + want**2) <= 5e-6
    lse_error = np.abs(lse[some] - want_lse[some])
    assert ((lse_error <= 1e-6) | (lse_error <= 8.01 / 65536 * np.abs(want_lse[some]))).all(), lse_error.max()

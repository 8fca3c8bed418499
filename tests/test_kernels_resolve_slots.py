"""Index conversion: every width, holes, bounds of each request, the window, and what attention makes of the result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla import kernels
from jmla.kernels import layouts

resolve = jax.jit(kernels.resolve_slots, static_argnames=("page_size", "split", "implementation"))


def expected(local: np.ndarray, rows: np.ndarray, table: np.ndarray, size: int, offset: int = 0) -> np.ndarray:
    """The definition, one id at a time in Python integers."""
    out = np.full(local.shape, -1, np.int64)
    for r, c in np.ndindex(*local.shape):
        i, b = int(local[r, c]), int(rows[r])
        if 0 <= b < len(table) and 0 <= i < table.shape[1] * size and table[b, i // size] >= 0:
            out[r, c] = int(table[b, i // size]) * size + i % size + offset
    return out


def bound(slots: np.ndarray) -> list[int]:
    return [max((c + 1 for c in range(len(row)) if row[c] >= 0), default=0) for row in slots]


@pytest.mark.parametrize("width", [1, 5, 51, 133, 192, 1024, 2048, 2051, 4100])
def test_b3_any_width_and_ids_past_the_table(width: int, implementation: str) -> None:
    rng = np.random.default_rng(width)
    table = rng.permutation(60).reshape(3, 20).astype(np.int32)
    table[1, 7:] = -1  # a hole where a request ends
    local = rng.integers(-2, 165, (5, width)).astype(np.int32)  # the table holds 160 rows of a request
    local[0, -1], local[2, 0] = 160, 2147480000
    rows = np.array([0, 1, 2, 1, -1], np.int32)
    slots, lengths = resolve(
        local, rows, table, page_size=8, layer_offset=jnp.int32(4800), implementation=implementation
    )
    want = expected(local, rows, table, 8, 4800)
    np.testing.assert_array_equal(slots, want)
    np.testing.assert_array_equal(lengths, bound(want))
    assert slots.dtype == lengths.dtype == jnp.int32
    assert slots[0, -1] == -1
    assert lengths[4] == 0


def test_length_is_a_bound_on_columns_and_not_a_count(implementation: str) -> None:
    table = np.array([[4, -1, 2]])
    local = np.array([[-1, 0, 5, 9, -1, 12]])
    slots, lengths = kernels.resolve_slots(local, np.array([0]), table, page_size=4, implementation=implementation)
    np.testing.assert_array_equal(slots, [[-1, 16, -1, 9, -1, -1]])
    assert lengths.tolist() == [4]


def test_layer_offset_may_be_traced_in_a_scan(implementation: str) -> None:
    local, rows, table = jnp.array([[0, 3, -1]]), jnp.array([0]), jnp.array([[1, 0]])

    def layer(offset: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        slots, _ = kernels.resolve_slots(
            local, rows, table, page_size=2, layer_offset=offset, implementation=implementation
        )
        return offset + 10, slots

    _, slots = jax.lax.scan(layer, jnp.int32(0), None, length=3)
    np.testing.assert_array_equal(slots[:, 0], [[2, 1, -1], [12, 11, -1], [22, 21, -1]])


def test_slots_beyond_int32_are_holes(implementation: str) -> None:
    table = np.array([[2**31 - 1, (2**31 - 1) // 64, 5]])

    def slots(ids: list[int], offset: int = 0, size: int = 64) -> list[list[int]]:
        return resolve(
            np.array([ids]), np.array([0]), table, page_size=size, layer_offset=offset, implementation=implementation
        )[0].tolist()

    assert slots([0, 64, 127, 128]) == [[-1, 2**31 - 64, 2**31 - 1, 320]]
    assert slots([64, 128], 64) == [[-1, 384]]
    assert slots([127, 128], 1) == [[-1, 321]]
    assert slots([64, 128, 129], 2**31 - 1 - 320) == [[-1, 2**31 - 1, -1]]
    assert slots([128, 191], 2**31 - 1) == [[-1, -1]]
    assert slots([0, 1, 2], size=1) == [[2**31 - 1, (2**31 - 1) // 64, 5]]
    pages = np.array([[0, -1]])  # a negative room must not round up to a page
    shifted, _ = resolve(
        np.array([[0, 7]]),
        np.array([0]),
        pages,
        page_size=8,
        layer_offset=2**31 - 1,
        implementation=implementation,
    )
    assert shifted.tolist() == [[2**31 - 1, -1]]


@pytest.mark.parametrize(
    ("rows", "match"), [([0, 1], r"local.*\[4, any\]|local.*\[2, any\]"), ([0], "local"), ([[0, 0, 0, 0]], "rows")]
)
def test_b4_shapes_that_do_not_agree_are_an_error(rows: list, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kernels.resolve_slots(np.zeros((4, 3), np.int32), np.array(rows), np.array([[0], [1]]), page_size=4)


def test_b5_lengths_that_do_not_match_the_scores_are_an_error() -> None:
    with pytest.raises(ValueError, match="lengths"):
        kernels.top_k(jnp.zeros((4, 8)), jnp.array([1, 2, 3]), 2)
    got = kernels.top_k(jnp.zeros((4, 8)), jnp.array([1, 2, 3, 0]), 2)  # 3 real rows padded to 4
    np.testing.assert_array_equal(got, [[0, -1], [0, 1], [0, 1], [-1, -1]])


def test_other_wrong_arguments_are_named() -> None:
    good = {"local": np.zeros((1, 2), np.int32), "rows": np.array([0]), "table": np.array([[0]]), "page_size": 4}
    window = (np.array([[0]]), 4, 8, np.array([3]), 0)
    cases = [
        (ValueError, "local.*int32", {"local": np.array([[2**32, 0]])}),
        (ValueError, "layer_offset", {"layer_offset": 2**31}),
        (ValueError, "layer_offset", {"layer_offset": np.array([1])}),
        (TypeError, "table", {"table": jnp.zeros((1, 1))}),
        (ValueError, "table", {"table": np.array([0])}),
        (ValueError, "page_size", {"page_size": 0}),
        (ValueError, "window", {"local": None}),
        (ValueError, "positions", {"window": (*window[:3], np.array([3, 4]), 0)}),
        (ValueError, "window_table", {"window": (np.array([[0], [1]]), *window[1:])}),
        (ValueError, "window_length", {"window": (*window[:2], 0, *window[3:])}),
    ]
    for error, match, change in cases:
        with pytest.raises(error, match=match):
            kernels.resolve_slots(**{**good, **change})


def windowed(
    positions: list[int], local: np.ndarray | None, implementation: str, split: bool = True, length: int = 128
) -> Any:
    """Two requests; window pages of 64 rows, compressed pages of 2."""
    rows = np.array([0, 1, 1, -1][: len(positions)])
    window_table = np.array([[3, 1, 4, 9], [-1, 0, 2, 5]])  # the first page of request 1 was freed
    table = np.array([[5, 3], [0, 1]])
    window = (window_table, 64, length, np.array(positions), jnp.int32(1000))
    got = kernels.resolve_slots(
        local, rows, table, page_size=2, layer_offset=50, window=window, split=split, implementation=implementation
    )
    ids = np.stack([np.arange(max(p - length + 1, 0), max(p - length + 1, 0) + length) for p in positions])
    ids[ids > np.array(positions)[:, None]] = -1
    return got, expected(ids, rows, window_table, 64, 1000), rows, table


def test_window_is_ascending_and_left_packed(implementation: str) -> None:
    (slots, lengths), want, *_ = windowed([0, 200, 127, 3], None, implementation)
    np.testing.assert_array_equal(slots, want)
    assert lengths.tolist() == [1, 128, 128, 0]
    assert slots[0, :2].tolist() == [1192, -1]  # page 3
    assert slots[1, 0] == 1000 + 9  # position 73
    assert slots[2, 63] == -1  # position 63 is in the freed page
    assert slots[2, 64] == 1000


def test_split_segments_and_the_combined_row(implementation: str) -> None:
    local = np.array([[0, -1, 3], [1, 2, 9], [-1, -1, -1], [0, 1, 2]])
    split, want, rows, table = windowed([130, 200, 70, -1], local, implementation)
    (slots, lengths), (extra, extra_lengths) = split
    np.testing.assert_array_equal(slots, want)
    np.testing.assert_array_equal(extra, expected(local, rows, table, 2, 50))
    assert lengths.tolist() == [128, 128, 71, 0]
    assert extra_lengths.tolist() == [3, 2, 0, 0]
    (combined, total), *_ = windowed([130, 200, 70, -1], local, implementation, split=False)
    np.testing.assert_array_equal(combined, np.concatenate([slots, extra], axis=1))
    assert total.tolist() == [131, 130, 128, 0]  # all 128 window columns count, short windows being holes


def test_lengths_of_the_specification(implementation: str) -> None:
    """kv tokens: split window min(kv, 128), extra kv // 4; combined 128 + kv // 4."""
    for kv in (1, 3, 4, 127, 128, 129, 200):
        chosen = np.where(np.arange(64) < kv // 4, np.arange(64), -1)[None]
        table = np.arange(4)[None]
        window = (table, 64, 128, np.array([kv - 1]), 0)
        args = (chosen, np.array([0]), table)
        given = {"page_size": 16, "window": window, "implementation": implementation}
        (_, lengths), (_, extra) = kernels.resolve_slots(*args, **given)
        _, combined = kernels.resolve_slots(*args, split=False, **given)
        assert (int(lengths[0]), int(extra[0]), int(combined[0])) == (min(kv, 128), kv // 4, 128 + kv // 4)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize(("length", "columns"), [(128, 33), (5, 513), (200, 3), (1, 1), (130, 0), (0, 40)])
def test_every_form_agrees_with_xla(length: int, columns: int, count: int, split: bool, implementation: str) -> None:
    rng = np.random.default_rng(count)
    table = rng.integers(-1, 40, (4, 9)).astype(np.int32)
    window_table = rng.integers(-1, 40, (4, 7)).astype(np.int32)
    rows = rng.integers(-1, 5, count).astype(np.int32)
    local = rng.integers(-3, 9 * 6 + 3, (count, columns)).astype(np.int32)
    positions = np.array([220, -1, 0, 100, 300, -(2**31)], np.int32)[:count]  # 300 lies past the table
    window = (window_table, 32, length, positions, jnp.int32(7)) if length else None

    def run(name: str) -> Any:
        if not columns and window is not None:
            return kernels.resolve_slots(
                None, rows, table, page_size=6, window=window, split=split, implementation=name
            )
        return kernels.resolve_slots(
            local, rows, table, page_size=6, layer_offset=3, window=window, split=split, implementation=name
        )

    got, want = jax.jit(run, static_argnums=0)(implementation), run("xla")
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.int32
        np.testing.assert_array_equal(a, b)


def test_what_is_empty(implementation: str) -> None:
    table, window = np.array([[1, 2]]), (np.array([[3]]), 8, 4, np.array([2]), 0)
    given: dict[str, Any] = {"page_size": 4, "implementation": implementation}
    slots, lengths = kernels.resolve_slots(np.zeros((0, 3), np.int32), np.zeros(0, np.int32), table, **given)
    assert slots.shape == (0, 3)
    assert lengths.shape == (0,)
    slots, lengths = kernels.resolve_slots(np.zeros((1, 0), np.int32), np.array([0]), table, **given)
    assert slots.shape == (1, 0)
    assert lengths.tolist() == [0]
    slots, lengths = kernels.resolve_slots(np.array([[0]]), np.array([0]), np.zeros((0, 2), np.int32), **given)
    assert (slots.tolist(), lengths.tolist()) == ([[-1]], [0])
    none = np.zeros((1, 0), np.int32)
    (slots, lengths), (extra, extra_lengths) = kernels.resolve_slots(
        np.array([[0]]), np.array([0]), none, window=window, **given
    )
    assert (slots.tolist(), lengths.tolist()) == ([[24, 25, 26, -1]], [3])
    assert (extra.tolist(), extra_lengths.tolist()) == ([[-1]], [0])


def test_vmap_and_gradients_around_it(implementation: str) -> None:
    local, rows, table = jnp.array([[[0, 5]], [[3, -1]]]), jnp.array([[0], [1]]), jnp.array([[4, 2], [1, 0]])

    def one(local: jax.Array, rows: jax.Array) -> Any:
        return kernels.resolve_slots(local, rows, table, page_size=4, implementation=implementation)

    slots, lengths = jax.jit(jax.vmap(one))(local, rows)
    assert (slots.tolist(), lengths.tolist()) == ([[[16, 9]], [[7, -1]]], [[2], [1]])

    def loss(values: jax.Array) -> jax.Array:
        return jnp.sum(values[one(local[0], rows[0])[0]] ** 2)

    grad = jax.jit(jax.grad(loss))(jnp.arange(20.0))
    assert np.flatnonzero(grad).tolist() == [9, 16]


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "window", "columns"), [(64, 0, 2048), (4096, 0, 2048), (4096, 128, 1024)])
def test_many_rows_on_the_device(count: int, window: int, columns: int) -> None:
    if all(device.platform != "gpu" for device in jax.devices()):
        pytest.skip("needs an NVIDIA GPU")
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.permutation(64 * 512).reshape(64, 512), jnp.int32)
    rows = jnp.asarray(rng.integers(-1, 64, count), jnp.int32)
    local = jnp.asarray(rng.integers(-9, 512 * 64, (count, columns)), jnp.int32)
    positions = jnp.asarray(rng.integers(0, 512 * 256, count), jnp.int32)
    segment = (table, 256, window, positions, jnp.int32(5)) if window else None

    def run(name: str, split: bool) -> Any:
        return kernels.resolve_slots(
            local, rows, table, page_size=64, layer_offset=64, window=segment, split=split, implementation=name
        )

    for split in (True, False):
        want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(run, static_argnums=(0, 1))("xla", split))]
        for _ in range(20):
            got = jax.tree.leaves(jax.jit(run, static_argnums=(0, 1))("triton", split))
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a, b)


def test_debug_checks_name_the_bad_id() -> None:
    table, rows = np.array([[0, 1]]), np.array([0])
    with pytest.raises(kernels.ValueCheckError, match=r"local.*local\[0, 1\] = 8"), kernels.debug_checks():
        resolve(np.array([[0, 8]]), rows, table, page_size=4)
    with pytest.raises(kernels.ValueCheckError, match="rows"), kernels.debug_checks():
        resolve(np.array([[0, 1]]), np.array([1]), table, page_size=4)
    with kernels.debug_checks():
        resolve(np.array([[0, -1]]), rows, table, page_size=4)


# What attention makes of the slots: two requests of a page each, rows of one value and a logit of its own.

LAYOUT = layouts.plain(8, "float32", 4)
POOL = np.zeros((3, 32), np.float32)
POOL.reshape(12, 8)[:] = np.random.default_rng(0).standard_normal((12, 8))
QUERY = np.random.default_rng(1).standard_normal((2, 2, 8)).astype(np.float32)


@jax.jit
def attend(slots: jax.Array, pool: jax.Array = POOL, lengths: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    return kernels.sparse_mla(jnp.asarray(QUERY), pool, slots, lengths, layout=LAYOUT, scale=0.5)


def attended(slots: list[int], row: int, weights: list[float] | None = None) -> np.ndarray:
    keys = POOL.reshape(12, 8)[slots]
    p = np.exp(0.5 * QUERY[row] @ keys.T) * (1 if weights is None else np.array(weights))
    return p @ keys / p.sum(1, keepdims=True)


def test_b2_padded_rows_give_nothing_whatever_slot_0_holds() -> None:
    pool = POOL.copy()
    pool[0] = np.nan
    slots, lengths = kernels.resolve_slots(np.array([[0, 1], [0, 1]]), np.array([0, 1]), np.array([[2]]), page_size=4)
    out, lse = attend(slots, pool, lengths)
    np.testing.assert_allclose(out[0], attended([8, 9], 0), atol=1e-6)
    np.testing.assert_array_equal(out[1], np.zeros((2, 8)))
    np.testing.assert_array_equal(lse[1], [-np.inf, -np.inf])


def test_b6_an_id_past_a_request_is_not_that_of_the_next() -> None:
    table = np.array([[1], [2]])  # S_k is 4
    wrong, _ = kernels.resolve_slots(np.array([[0, 5], [1, 4]]), np.array([0, 1]), table, page_size=4)
    hole, _ = kernels.resolve_slots(np.array([[0, -1], [1, -1]]), np.array([0, 1]), table, page_size=4)
    np.testing.assert_array_equal(wrong, hole)
    out, _ = attend(wrong)
    np.testing.assert_allclose(out[0], attended([4], 0), atol=1e-6)
    np.testing.assert_allclose(out[1], attended([9], 1), atol=1e-6)


def test_b9_duplicates_count_twice() -> None:
    out, _ = attend(jnp.array([[3, 3, 5, -1], [3, 3, -1, -1]]))
    np.testing.assert_allclose(out[0], attended([3, 5], 0, [2, 1]), atol=1e-6)
    np.testing.assert_allclose(out[1], attended([3], 1), atol=1e-6)


def test_b10_a_hole_is_a_hole_with_or_without_lengths() -> None:
    slots = jnp.array([[3, 5, -1, -1], [1, -1, -1, -1]])
    bare, with_lengths = attend(slots), attend(slots, POOL, jnp.array([2, 1]))
    np.testing.assert_array_equal(bare[0], with_lengths[0])
    np.testing.assert_array_equal(bare[1], with_lengths[1])
    np.testing.assert_allclose(bare[0][0], attended([3, 5], 0), atol=1e-6)


def test_b11_huge_and_negative_ids_are_both_holes() -> None:
    out, lse = attend(jnp.array([[1, 2147480000, -1], [1, 12, -7]]))
    same, same_lse = attend(jnp.array([[1, -1, -1], [1, -1, -1]]))
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(lse, same_lse)
    np.testing.assert_allclose(out[0], attended([1], 0), atol=1e-6)

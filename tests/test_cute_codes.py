"""Parts of the CuTe attention kernel on the CPU, each thread of a warp: codes of its output, values of cached codes."""

import dataclasses
import functools
import inspect
import threading
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from jmla.kernels.sparse_mla import cute_codes, cute_output, cute_plan
from jmla.kernels.sparse_mla.cute_place import Arrays
from jmla.kernels.sparse_mla.epilogue import Epilogue, assemble, finish

pytestmark = pytest.mark.lowering

HEADS, ORDER = 64, (1, 3, 0, 2)  # values of codes, as four of them stand in keys and sums
OUT, SCALES, ANGLES = (n << 40 for n in (1, 2, 3))  # addresses


class Warp:
    """32 threads that exchange words."""

    def __init__(self) -> None:
        self.barrier, self.words, self.own = threading.Barrier(32), [0] * 32, threading.local()

    def exchange(self, word: Any, distance: int) -> Any:
        self.words[self.own.lane] = word
        self.barrier.wait(60)
        got = self.words[self.own.lane ^ distance]
        self.barrier.wait(60)
        return got

    def run(self, work: Any) -> None:
        errors = []

        def one(lane: int) -> None:
            self.own.lane = lane
            try:
                with np.errstate(all="ignore"):
                    work(lane)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(lane,)) for lane in range(32)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if errors:
            raise errors[0]


class Memory:
    """Arrays at addresses, each of whose bytes is written once at most."""

    def __init__(self, **arrays: tuple[int, np.ndarray]):
        self.arrays = [(start, x.view(np.uint8).reshape(-1)) for start, x in arrays.values()]
        self.written: set[int] = set()

    def at(self, address: int, size: int) -> np.ndarray:
        for start, x in self.arrays:
            if start <= address and address + size <= start + len(x):
                return x[address - start : address - start + size]
        raise AssertionError(f"{address:x} is nowhere")

    def store(self, address: Any, *words: Any, size: int = 4) -> None:
        place = self.at(int(address), size * len(words))
        assert int(address) % (size * len(words)) == 0
        for i, word in enumerate(words):
            bytes_ = {int(address) + size * i + n for n in range(size)}
            assert not bytes_ & self.written
            self.written |= bytes_
            place[size * i : size * (i + 1)] = np.frombuffer(int(word).to_bytes(4, "little"), np.uint8)[:size]

    def load(self, address: Any) -> np.uint32:
        return self.at(int(address), 4).view(np.uint32)[0]


def permute(a: Any, b: Any, selector: Any) -> np.uint32:
    bytes_ = int(a).to_bytes(4, "little") + int(b).to_bytes(4, "little")
    return np.uint32(int.from_bytes(bytes(bytes_[(int(selector) >> 4 * i) & 7] for i in range(4)), "little"))


def e4m3x4(*values: Any) -> np.uint32:
    clipped = np.clip(np.array(values, np.float32), -448, 448)
    codes = np.where(np.isnan(clipped), 0x7F, clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    return np.uint32(int.from_bytes(bytes(codes.astype(np.uint8)), "little"))


def scalar(kind: Any) -> Any:
    """A number of a DSL's kind, whose operators wrap as those on the device do."""
    return lambda x: np.asarray(x).astype(kind)[()]


def python_of(module: Any, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Functions of a module as Python runs them, with others in place of what the DSL and the device would do."""
    space = dict(vars(module)) | given
    for name in names:
        source = inspect.getsource(inspect.unwrap(getattr(module, name))).replace("@cute.jit\n", "")
        exec(compile(source, f"<{name}>", "exec"), space)
    return space


def stand_ins(memory: Memory, warp: Warp) -> dict[str, Any]:
    class Arch:
        fmax = staticmethod(lambda a, b: np.fmax(a, b))

    class Cutlass:
        Constexpr = Any
        select_ = staticmethod(lambda condition, a, b: a if condition else b)

    class Cute:
        arch = Arch

    kinds = {"Int32": np.int32, "Int64": np.int64, "Uint32": np.uint32, "Float32": np.float32}
    return {name: scalar(kind) for name, kind in kinds.items()} | {
        "cutlass": Cutlass,
        "cute": Cute,
        "const_expr": lambda x: x,
        "range_constexpr": range,
        "bits_of": lambda x: np.float32(x).view(np.uint32),
        "float_of": lambda x: np.uint32(x).view(np.float32),
        "magnitude": lambda x: np.uint32(x) & np.uint32(0x7FFFFFFF),
        "divide": lambda a, b: np.float32(a) / np.float32(b),
        "e4m3x4": e4m3x4,
        "permute": permute,
        "shuffle_xor": warp.exchange,
        "load_global": memory.load,
        "store_global": memory.store,
        "store_global_4": memory.store,
        "store_global_byte": lambda address, word: memory.store(address, int(word) & 0xFF, size=1),
    }


class Cell(NamedTuple):
    """What is asked of ``cute_output.Cell``."""

    consumer: int
    quad: Any
    h: Any
    head: Any
    row: Any


def profile(rows: int, ending: cute_plan.Ending) -> cute_plan.Profile:
    return cute_plan.Profile(
        rows=rows,
        heads=HEADS,
        data=cute_plan.Rows("footer", 512, True),
        sources=(),
        scale=1.0,
        sinks=False,
        q_codes=False,
        q_scale=False,
        out_scale=False,
        ending=ending,
        splits=1,
        split_blocks=0,
        groups=1,
        value_parts=1,
        teams=rows,
        tuning=cute_plan.Tuning(),
    )


def one_thread(
    write: Any, p: cute_plan.Profile, arrays: Arrays, sums: np.ndarray, row: int, consumer: int, warp: int, lane: int
) -> None:
    h = (warp << 4) + (lane >> 2)
    c = Cell(consumer, np.int32(lane & 3), np.int32(h), np.int32(0), np.int32(row))
    own = sums[[h, h + 8]].reshape(2, 64, 4, 2)[:, 32 * consumer : 32 * (consumer + 1), lane & 3]
    acc = list(own.swapaxes(0, 1).reshape(-1))  # of each 8 two of head h, then two of head h + 8
    write(p, arrays, c, acc, np.float32(1), np.float32(1))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("block", "form", "rope"),
    [(128, "ue8m0", 64), (32, "fp32", 16), *(slow(*case) for case in ((128, "fp32", 64), (32, "ue8m0", 64)))],
)
def test_codes_of_a_consumer_are_those_of_xla(block: int, form: str, rope: int) -> None:
    rows, groups = 3, 8
    rng = np.random.default_rng(block + rope)
    values = (rng.standard_normal((rows, HEADS, 512)) * 2.0 ** rng.integers(-8, 9, (rows, HEADS, 1))).astype(np.float32)
    values[1, 5] = 0
    angles = rng.standard_normal((rows, rope)).astype(np.float32)
    ending = Epilogue(jnp.asarray(angles), groups, block, form)
    want = assemble(*finish(jnp.asarray(values), None, ending, ending.cos_sin, None), ending)
    codes = np.zeros(want.codes.shape, np.uint8)
    scales = np.full(want.scales.shape, -1, np.asarray(want.scales).dtype)
    memory = Memory(out=(OUT, codes), scales=(SCALES, scales), angles=(ANGLES, angles))
    p = profile(rows, cute_plan.Ending(groups, block, form == "ue8m0", rope))
    assert p.fused
    arrays = Arrays(out=np.int64(OUT), scales=np.int64(SCALES), cos_sin=np.int64(ANGLES))
    stored = values.reshape(rows, HEADS, 128, 4)  # as sums have them: values of codes out of order
    stored = np.where(np.arange(128)[:, None] < 112, stored[..., ORDER], stored).reshape(values.shape)

    for row in range(rows):
        for consumer in range(2):
            for number in range(4):
                warp = Warp()
                given = stand_ins(memory, warp)
                moved = python_of(cute_output, ("either", "selector", "transposed"), given)
                names = ("write_unit", "write_units", "codes_at", "angle", "turned", "scale_of", "write_scales")
                space = python_of(
                    cute_codes,
                    (*names, "write_scale", "larger_word", "padded"),
                    given | {"transposed": moved["transposed"]},
                )

                write = space["write_units"]
                warp.run(functools.partial(one_thread, write, p, arrays, stored[row], row, consumer, number))
    np.testing.assert_array_equal(scales, np.asarray(want.scales))
    np.testing.assert_array_equal(codes, np.asarray(want.codes).view(np.uint8))


# ---- values of codes


def bf16(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def halves(word: Any) -> Any:
    return np.array([word], np.uint32).view(ml_dtypes.bfloat16)


def word_of(values: Any) -> np.uint32:
    return np.ascontiguousarray(values, ml_dtypes.bfloat16).view(np.uint32)[0]


def product(x: Any, y: Any, z: Any = 0) -> np.uint32:
    """Of two bf16 each, plus two; rounded once."""
    added = halves(z).astype(np.float64) if isinstance(z, np.uint32) else 0.0
    return word_of(bf16(halves(x).astype(np.float64) * halves(y).astype(np.float64) + added))


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-30, 127.9, 128.0, 200.3, 255.4, 255.75, 256.0, 1e4, 2.0**40])
def test_values_of_codes_under_any_float32_scale(scale: float) -> None:
    """Their bits are those of the rounded product but where its own rounding hardly shows; none becomes NaN."""
    from jmla.kernels.sparse_mla import cute_gather

    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    codes = np.pad(codes, (0, -len(codes) % 16))
    p = dataclasses.replace(profile(1, cute_plan.Ending(8, 128, True, 64)), data=cute_plan.Rows("inline", 576, False))
    bits = np.float32(scale).view(np.uint32)
    given = stand_ins(Memory(), Warp()) | {
        "load_shared": lambda at: bits,
        "pack_bf16x2": lambda low, high: word_of(bf16([low, high])),
        "multiply_bf16x2": product,
        "fma_bf16x2": product,
    }
    space = python_of(cute_gather, ("exceeds_inline", "dequantised"), given)
    got = []
    with np.errstate(all="ignore"):
        large = space["exceeds_inline"]([bits] * 4)
        for some in codes.reshape(-1, 16):
            words = [np.uint32(x) for x in some.view(np.uint32)]
            values = np.concatenate([halves(word) for word in space["dequantised"](p, 0, words, 0, large)])
            got.append(values.reshape(4, 4)[:, np.argsort(ORDER)].reshape(-1))
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float64(np.float32(scale))
    np.testing.assert_allclose(np.concatenate(got).astype(np.float64), want, rtol=2.0**-8, atol=0)

"""Parts of the CuTe attention kernel on the CPU, thread by thread: its producers, softmax and values of codes, how the
CTAs of a cluster merge a row, the second kernel, and codes of the output."""

import dataclasses
import functools
import inspect
import itertools
import threading
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from jmla.kernels.sparse_mla import (
    cute_codes,
    cute_consume,
    cute_finish,
    cute_merge,
    cute_output,
    cute_place,
    cute_plan,
)
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

    def take(self, word: Any, lane: int) -> Any:
        return self.exchange(word, self.own.lane ^ lane)

    def any(self, word: Any) -> np.uint32:
        self.words[self.own.lane] = word
        self.barrier.wait(60)
        found = any(int(word) for word in self.words)
        self.barrier.wait(60)
        return np.uint32(found)

    def run(self, work: Any) -> None:
        run_together([(self, work)])


def run_together(works: list[tuple[Warp, Any]]) -> None:
    """Each warp does its work, which takes a lane."""
    errors = []

    def one(warp: Warp, work: Any, lane: int) -> None:
        warp.own.lane = lane
        try:
            with np.errstate(all="ignore"):
                work(lane)
        except BaseException as error:
            errors.append(error)
            [other.barrier.abort() for other, _ in works]

    threads = [threading.Thread(target=one, args=(*each, lane)) for each in works for lane in range(32)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))


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

    def load_many(self, words: int, address: Any) -> tuple[np.uint32, ...]:
        assert int(address) % (4 * words) == 0
        return tuple(self.at(int(address), 4 * words).view(np.uint32))


class Shared(Memory):
    """Memory of a CTA, written as often as it is, where what a thread copies is not before the thread waits for it."""

    def __init__(self, size: int, **arrays: tuple[int, np.ndarray]):
        super().__init__(**arrays)
        self.bytes = np.full(size, 0x7E, np.uint8)
        self.own = threading.local()

    def place(self, at: Any, size: int) -> np.ndarray:
        assert int(at) % size == 0 <= int(at) <= len(self.bytes) - size
        return self.bytes[int(at) : int(at) + size]

    def copy(self, to: Any, source: Any, size: Any, whole: int) -> None:
        assert int(source) % whole == 0
        data = np.zeros(whole, np.uint8)
        if size:
            data[: int(size)] = self.at(int(source), int(size))
        self.own.__dict__.setdefault("copies", []).append((self.place(to, whole), data))

    def commit(self) -> None:
        self.own.__dict__.setdefault("groups", []).append(self.own.__dict__.pop("copies", []))

    def wait(self, pending: int) -> None:
        groups = self.own.__dict__.get("groups", [])
        while len(groups) > pending:
            for place, data in groups.pop(0):
                place[:] = data

    def words(self, at: Any, count: int) -> Any:
        found = self.place(at, 4 * count).view(np.uint32)
        return found[0] if count == 1 else tuple(found)

    def put(self, at: Any, word: Any, size: int) -> None:
        self.place(at, size)[:] = np.frombuffer(int(word).to_bytes(4, "little"), np.uint8)[:size]

    def stand_ins(self) -> dict[str, Any]:
        return {
            "commit_copies": self.commit,
            "wait_copies": self.wait,
            "copy_4": lambda to, source: self.copy(to, source, 4, 4),
            "copy_8": lambda to, source, size: self.copy(to, source, size, 8),
            "copy_16": lambda to, source, size: self.copy(to, source, size, 16),
            "load_shared": lambda at: self.words(at, 1),
            "load_shared_2": lambda at: self.words(at, 2),
            "load_shared_4": lambda at: self.words(at, 4),
            "store_shared": lambda at, word: self.put(at, word, 4),
            "store_shared_byte": lambda at, word: self.put(at, word, 1),
        }


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
        fmax, fmin = staticmethod(np.fmax), staticmethod(np.fmin)
        make_warp_uniform = staticmethod(lambda x: x)
        block_idx = staticmethod(lambda: (0, 0, 0))

    class Cutlass:
        Constexpr = Any
        select_ = staticmethod(lambda condition, a, b: a if condition else b)
        min, max = staticmethod(min), staticmethod(max)
        range = staticmethod(lambda *ends, unroll: range(*ends))

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
        "shuffle_from": warp.take,
        "shuffle_xor": warp.exchange,
        "any_lane": warp.any,
        "load_global": memory.load,
        "load_ordered": memory.load,
        "load_ordered_2": functools.partial(memory.load_many, 2),
        "load_ordered_4": functools.partial(memory.load_many, 4),
        "load_ordered_if": lambda here, at: memory.load(at) if here else np.uint32(0),
        "store_global": memory.store,
        "store_global_2": memory.store,
        "store_global_4": memory.store,
        "store_global_byte": lambda address, word: memory.store(address, int(word) & 0xFF, size=1),
    }


class Cell(NamedTuple):
    """What is asked of ``cute_output.Cell``."""

    consumer: int
    thread: Any
    lane: Any
    quad: Any
    h: Any
    head: Any
    row: Any
    part: Any
    group: Any

    @classmethod
    def of(cls, consumer: int, thread: int, row: int = 0, part: int = 0) -> "Cell":
        lane = thread & 31
        h = ((thread >> 5) << 4) + (lane >> 2)
        return cls(consumer, *(np.int32(x) for x in (thread, lane, lane & 3, h, 0, row, part, 0)))


def profile(rows: int, ending: cute_plan.Ending | None, **changes: Any) -> cute_plan.Profile:
    usual = cute_plan.Profile(
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
    return dataclasses.replace(usual, **changes)


def one_thread(
    write: Any, p: cute_plan.Profile, arrays: Arrays, sums: np.ndarray, row: int, consumer: int, warp: int, lane: int
) -> None:
    c = Cell.of(consumer, 32 * warp + lane, row)
    write(p, arrays, c, held(p, c, sums), np.float32(1), np.float32(1))


def held(p: cute_plan.Profile, c: Cell, sums: np.ndarray) -> list[Any]:
    """What a thread has of the sums of all heads: of each 8 two of head h, then two of head h + 8."""
    start = (2 * c.part + c.consumer) * p.values
    own = sums[[c.h, c.h + 8], start : start + p.values].reshape(2, -1, 4, 2)[:, :, c.quad]
    return list(own.swapaxes(0, 1).reshape(-1))


def as_stored(values: np.ndarray, order: Any = ORDER) -> np.ndarray:
    """As sums have them: values of codes out of order."""
    fours = values.reshape(*values.shape[:-1], 128, 4)
    return np.where(np.arange(128)[:, None] < 112, fours[..., order], fours).reshape(values.shape)


def rotated(values: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """With the last 64 values of each head turned back."""
    cos, sin = angles[0, :32].astype(np.float64), angles[0, 32:].astype(np.float64)
    even, odd = values[:, 448::2], values[:, 449::2]
    pairs = np.stack([even * cos + odd * sin, odd * cos - even * sin], -1)
    return np.concatenate([values[:, :448], pairs.reshape(len(values), 64)], -1)


OUTPUT = ("either", "selector", "transposed", "whole_piece", "is_rope", "line_of", "load_head", "load_sink", "lift")
OUTPUT += ("share_of_head", "write_lse", "write_chunk", "write_part", "write_all", "write_four", "biggest_of", "finite")
OUTPUT += ("packed", "column_of", "values_at")
CODES = ("write_units", "write_chunks", "codes_at", "angles", "turned", "turned_pair", "scale_of", "write_scales")
CODES += ("write_scale", "larger_word", "padded", "angle", "write_codes")
FINISH = ("known_before", "complete", "merged_groups", "natural")
MERGE = ("part_at", "known_at", "merge", "send_head", "merge_owned", "added", "merged_weights")

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("block", "form", "rope"),
    [(128, "ue8m0", 64), *(slow(*case) for case in ((32, "fp32", 16), (128, "fp32", 64), (32, "ue8m0", 64)))],
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
    stored = as_stored(values)

    for row in range(rows):
        for consumer in range(2):
            for number in range(4):
                warp = Warp()
                given = stand_ins(memory, warp)
                moved = python_of(cute_output, OUTPUT, given)
                write = python_of(cute_codes, CODES, given | {"transposed": moved["transposed"]})["write_units"]
                warp.run(functools.partial(one_thread, write, p, arrays, stored[row], row, consumer, number))
    np.testing.assert_array_equal(scales, np.asarray(want.scales))
    np.testing.assert_array_equal(codes, np.asarray(want.codes).view(np.uint8))


# ---- merging


class Cluster:
    """Shared memories of CTAs, and the bytes that each CTA's barrier has counted."""

    def __init__(self, size: int, splits: int):
        self.bytes = np.full((splits, size), 0x7E, np.uint8)
        self.came, self.share = [0] * splits, 0

    def map(self, at: Any, rank: Any) -> int:
        return (int(rank) + 1 << 24) | int(at)

    def store(self, at: Any, *words: Any) -> None:
        rank, place = (int(at) >> 24) - 1, int(at) & 0xFFFFFF
        assert place % (4 * len(words)) == 0
        self.bytes[self.share if rank < 0 else rank, place : place + 4 * len(words)].view(np.uint32)[:] = words

    def send(self, at: Any, *words: Any) -> None:
        *words, barrier = words
        rank = (int(barrier) >> 24) - 1
        assert rank == (int(at) >> 24) - 1 != self.share
        self.store(at, *words)
        self.came[rank] += 4 * len(words)

    def load(self, at: Any) -> list[Any]:
        return list(self.bytes[self.share, int(at) : int(at) + 16].view(np.uint32))


def merging(cluster: Cluster, given: dict[str, Any]) -> dict[str, Any]:
    def f16(*values: Any) -> np.uint32:
        return np.array(values, np.float32).astype(np.float16).view(np.uint32)[0]

    given = given | {
        "map_shared": cluster.map,
        "load_shared_4": cluster.load,
        "mbarrier_arrive": lambda at: None,
        "mbarrier_wait_cluster": lambda at, parity: None,
        "sync_warp": lambda: None,
        "exp2": lambda x: np.exp2(np.float32(x)),
        "log2": lambda x: np.log2(np.float32(x)),
        "larger_magnitude": lambda a, b: np.fmax(a, abs(b)),
        "pack_f16x2": f16,
        "unpack_f16x2": lambda x: np.array([x], np.uint32).view(np.float16).astype(np.float32),
        "pack_bf16x2": lambda low, high: word_of(bf16([low, high])),
        "Boolean": bool,
        **{f"send_{n}": cluster.send for n in (1, 2, 4)},
        **dict.fromkeys(("store_shared", "store_shared_2", "store_shared_4"), cluster.store),
    }
    given |= python_of(cute_place, ("origin", "shuffled", "largest_of_quad"), given)
    given |= python_of(cute_output, OUTPUT, given)
    given |= python_of(cute_codes, CODES, given)
    return python_of(cute_merge, MERGE, given)


@pytest.mark.parametrize(
    ("splits", "parts", "heads", "kind"),
    [
        (3, 1, 64, "bf16"),
        (2, 2, 40, "codes"),
        (2, 1, 64, "partial"),
        *(slow(*case) for case in ((10, 4, 64, "bf16"), (7, 1, 20, "partial"), (5, 1, 64, "codes"))),
        *(slow(*case) for case in ((2, 1, 64, "bf16"), (2, 1, 64, "codes"), (3, 1, 12, "partial"))),
    ],
)
def test_a_cluster_merges_what_its_ctas_have(splits: int, parts: int, heads: int, kind: str) -> None:
    rng = np.random.default_rng(splits)
    ending = cute_plan.Ending(heads // 4, 128, False, 64) if kind == "codes" else None
    shared = {"heads": heads, "splits": splits, "value_parts": parts, "sinks": True}
    p = profile(1, ending, **shared, groups=2 if kind == "partial" else 1)
    assert p.fused == (kind == "codes")
    assert p.partial == (kind == "partial")

    # Of the last CTA no slot took part, and of one head none of any.
    tops = rng.uniform(-3, 3, (splits, HEADS)).astype(np.float32)
    masses = rng.uniform(0.5, 200, (splits, HEADS)).astype(np.float32)
    sums = rng.standard_normal((splits, HEADS, 512)) * 2.0 ** rng.integers(
        *((-8, 9) if ending else (-30, 20)), (splits, HEADS, 1)
    )
    tops[-1], masses[-1], sums[-1] = -np.inf, 0, 0
    tops[:, 5], masses[:, 5], sums[:, 5] = -np.inf, 0, 0
    sums, sinks = sums.astype(np.float32), rng.standard_normal(heads).astype(np.float32)
    angles = rng.standard_normal((1, 64)).astype(np.float32)
    width = {"bf16": 2, "codes": 1, "partial": 2}[kind]
    out = np.zeros((heads, 512 * width), np.uint8)
    lse = np.full((heads, p.marks if p.partial else 1), 9, np.float32)
    scales = np.zeros((heads * 4, 4), np.float32)
    places = [n << 40 for n in range(4, 9)]
    memory = Memory(**{str(at): (at, x) for at, x in zip(places, (out, lse, scales, angles, sinks), strict=True)})
    addresses = [np.int64(at) for at in places]
    arrays = Arrays(**dict(zip(("out", "lse", "scales", "cos_sin", "sinks"), addresses, strict=True)))
    cluster = Cluster(cute_plan.Memory.of(p).size, splits)

    class At(NamedTuple):
        share: Any
        queries: Any = np.int32(0)
        ready: Any = 0
        merged: Any = np.int32(8)

    def phase(name: str, part: int) -> None:
        for share in range(splits):
            for number in range(8):
                warp = Warp()
                cluster.share = share
                space = merging(cluster, stand_ins(memory, warp))
                if name == "merge":  # what it ends with is a phase of its own
                    space["merge_owned"] = lambda *_: None
                warp.run(functools.partial(one, space[name], share, number, part, name == "merge"))

    def one(work: Any, share: int, number: int, part: int, sends: bool, lane: int) -> None:
        c = Cell.of(number >> 2, 32 * (number & 3) + lane, part=part)
        known = [(tops[share, c.h + n], masses[share, c.h + n]) if c.consumer == 0 else () for n in (0, 8)]
        own = (held(p, c, as_stored(sums[share])), *known) if sends else ()
        work(p, At(np.int32(share)), arrays, c, *own)

    for part in range(parts):
        cluster.came = [0] * splits
        phase("merge", part)
        assert cluster.came == [cute_merge.bytes_of_parts(p, share) for share in range(splits)]
        phase("merge_owned", part)

    # What it should be, in float64.
    top = np.maximum(tops.max(0).astype(np.float64), -100)
    weights = np.exp2(tops - top)
    mass = (weights * masses).sum(0)[:heads]
    total = mass + (0 if p.partial else np.exp2(sinks * np.log2(np.e) - top[:heads]))
    with np.errstate(all="ignore"):
        merged = (weights[..., None] * sums).sum(0)[:heads] * np.where(mass == 0, 0, 1 / total)[:, None]
        log = tops.max(0)[:heads] + np.log2(mass)
        biggest = (
            np.abs(weights[..., None] * sums).max((0, 2))[:heads, None] * np.where(mass == 0, 0, 1 / total)[:, None]
        )
    np.testing.assert_allclose(lse[:, 0], log if p.partial else log * np.log(2), rtol=1e-5, atol=1e-5)
    if kind == "partial":
        values = out.view(np.float16).astype(np.float64).reshape(heads, -1, p.values) * lse[:, 1:, None]
        got, step, want = values.reshape(heads, 512), 2.0**-10, as_stored(merged)
    elif kind == "bf16":
        got, step, want = out.view(ml_dtypes.bfloat16).astype(np.float64), 2.0**-8, merged
    else:
        merged = rotated(merged, angles)
        got = out.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        got = (got.reshape(heads, 4, 128) * scales[:, 0].reshape(heads, 4, 1)).reshape(heads, 512)
        step, want = 2.0**-4, merged
        biggest = biggest * 4
    np.testing.assert_array_less(np.abs(got - want), step * np.abs(want) + biggest * (step * 2.0**-6 + 2.0**-9) + 1e-30)


@pytest.mark.parametrize("parts", [1, slow(4)])
def test_parts_of_a_cta_for_the_second_kernel(parts: int) -> None:
    """Lifted to float16 and back; beside an infinite value others keep theirs."""
    rng, groups = np.random.default_rng(parts), 2 if parts == 1 else 1
    ending = None if parts == 1 else cute_plan.Ending(1, 128, True, 512)  # which nothing but a second kernel does
    p = profile(1, ending, groups=groups, value_parts=parts)
    assert p.partial
    sums = (rng.standard_normal((groups, HEADS, 512)) * 2.0 ** rng.integers(-60, 60, (groups, HEADS, 1))).astype(
        np.float32
    )
    shares = (2.0 ** rng.uniform(-9, 3, (groups, HEADS))).astype(np.float32)
    for head in (3, 11 + 16):  # of a warp a first and, in another one, a second head
        sums[-1, head] = rng.standard_normal(512) * 1e6
        sums[-1, head, 77] = np.inf
    out, marks = np.zeros((groups, HEADS, 512), np.uint16), np.zeros((groups, HEADS, p.marks), np.float32)
    memory = Memory(out=(OUT, out), marks=(SCALES, marks))
    arrays = Arrays(out=np.int64(OUT), lse=np.int64(SCALES))
    for group, part, number in itertools.product(range(groups), range(parts), range(8)):
        warp = Warp()
        write = merging(Cluster(0, 1), stand_ins(memory, warp))["write_all"]

        def one(lane: int, group: int = group, part: int = part, number: int = number, write: Any = write) -> None:
            c = Cell.of(number >> 2, 32 * (number & 3) + lane, part=part)
            acc = held(p, c, sums[group])
            write(p, arrays, c, np.int32(group), acc, *(shares[group, c.h + n] for n in (0, 8)))

        warp.run(one)
    assert (marks[..., 0] == 0).all()  # it is the first consumer's to write
    values = out.view(np.float16).astype(np.float64).reshape(groups, HEADS, -1, p.values) * marks[..., 1:, None]
    want = sums.astype(np.float64) * shares[..., None]
    values = values.reshape(want.shape)
    assert (values[-1, [3, 27], 77] == np.inf).all()
    finite = np.isfinite(want)
    biggest = np.abs(np.where(finite, want, 0)).max(-1, keepdims=True) * np.ones_like(want)
    error = np.abs(values[finite] - want[finite])
    np.testing.assert_array_less(error, 2.0**-11 * np.abs(want[finite]) + 2.0**-38 * biggest[finite])


@pytest.mark.parametrize(
    ("block", "heads", "groups", "value_parts", "threads"),
    [
        (None, 2, 3, 2, 128),
        (None, 800, 3, 1, 64),
        (128, 2, 3, 2, 128),
        (128, 800, 3, 1, 64),
        (128, 2, 1, 4, 128),
        slow(32, 2, 3, 2, 128),
        slow(32, 800, 3, 1, 64),
    ],
)
def test_the_second_kernel_adds_up_groups(
    block: int | None, heads: int, groups: int, value_parts: int, threads: int
) -> None:
    """Of the first and the last head; that one has a group in which no slot took part."""
    rng = np.random.default_rng(7)
    ending = block and cute_plan.Ending(1, block, False, 64)
    p = profile(1, ending, heads=heads, groups=groups, sinks=True, value_parts=value_parts)
    assert p.partial
    assert p.finish_threads == threads
    parts = rng.standard_normal((groups, heads, 512)).astype(np.float16)
    marks = np.zeros((groups, heads, p.marks), np.float32)
    marks[..., 0] = rng.uniform(-2, 2, (groups, heads))
    marks[..., 1:] = 2.0 ** rng.integers(-3, 3, (groups, heads, p.marks - 1))
    marks[1:2, -1, 0], parts[1:2, -1] = -np.inf, 0
    angles, sinks = rng.standard_normal((1, 64)).astype(np.float32), rng.standard_normal(heads).astype(np.float32)
    out, lse = np.zeros((heads, 512), np.uint8 if block else np.uint16), np.zeros(heads, np.float32)
    scales = np.zeros((heads * 512 // (block or 512), 4), np.float32)
    names = ("parts", "masses", "cos_sin", "sinks", "out", "lse", "scales")
    places = {
        name: (n << 40, x)
        for n, (name, x) in enumerate(zip(names, (parts, marks, angles, sinks, out, lse, scales), strict=True), 4)
    }
    arrays = Arrays(**{name: np.int64(at) for name, (at, _) in places.items()})
    memory = Memory(**places)
    some = [0, heads - 1]
    for head in some:
        works = []
        for number in range(p.finish_threads // 32):
            warp = Warp()
            space = python_of(cute_finish, FINISH, merging(Cluster(0, 1), stand_ins(memory, warp)))

            def run(lane: int, number: int = number, head: int = head, space: dict[str, Any] = space) -> None:
                place = np.int32(0), np.int32(head), np.int32(32 * number + lane)
                space["complete"](p, arrays, *place, *space["known_before"](p, arrays, *place))

            works.append((warp, run))
        run_together(works)
    weights = np.exp2(marks[..., 0].astype(np.float64))
    downs = np.repeat(marks[..., 1:], p.values, axis=-1)
    mass = weights.sum(0)
    merged = (weights[..., None] * downs * parts).sum(0) / (mass + np.exp(sinks))[:, None]
    merged = as_stored(merged, np.argsort(ORDER))
    np.testing.assert_allclose(lse[some], np.log(mass)[some], rtol=1e-5)
    if block is None:
        got = out.view(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_allclose(got[some], merged[some], rtol=2.0**-8, atol=1e-6)
        return
    merged = rotated(merged, angles)[some]
    codes = out.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(heads, -1, block)
    got = (codes * scales[:, 0].reshape(heads, -1, 1)).reshape(heads, 512)
    np.testing.assert_allclose(got[some], merged, rtol=2.0**-4, atol=np.abs(merged).max() * 2.0**-10)


# ---- gathering


PLACE = ("share_of", "advance", "row_of", "magnitude")
GATHER = ("Thread", "gather", "swaps", "slot_at", "copy_slot", "copy_index", "issue", "in_source", "column_in")
GATHER += ("locate", "locate_in", "addresses", "exceeds", "exceeds_inline", "hand_over")


@pytest.mark.parametrize(
    ("kind", "columns", "lengths", "groups"),
    [
        ("footer", (128, 224), None, 3),
        ("inline", (150,), (117,), 1),
        ("plain", (40, 30), (40, 0), 2),
        *(("footer", (100, 190), lengths, 4) for lengths in ((0, 0), (0, 7), (100, 65), (64, 190))),
    ],
)
def test_every_slot_is_gathered_once(
    kind: str, columns: tuple[int, ...], lengths: tuple[int, ...] | None, groups: int
) -> None:
    """By the CTAs that share a row, which has blocks of both sources in order; with its scales."""
    from jmla.kernels.sparse_mla import cute_gather

    rng = np.random.default_rng(len(columns))
    data = cute_plan.Rows(kind, 512 if kind == "footer" else 576, True)
    page, stride = 4, 4 * (data.row_bytes + data.scale_bytes) // 16 * 16 + 16
    footer = page * data.row_bytes if kind == "footer" else 0
    sources = tuple(cute_plan.Form(n, 40, page, stride, footer, lengths is not None) for n in columns)
    p = profile(2, None, data=data, sources=sources, groups=groups, tuning=cute_plan.tuned(data))
    memory = cute_plan.Memory.of(p)
    pools = [rng.integers(0, 256, (10, stride)).astype(np.uint8) for _ in columns]
    for pool in pools:  # few rows have a scale that is large
        for offset in range(page if data.scale_bytes else 0):
            some = rng.random(10) < 0.1
            if kind == "footer":
                pool[:, footer + 8 * offset : footer + 8 * offset + 7] = rng.integers(90, 134, (10, 7))
                pool[some, footer + 8 * offset + rng.integers(7, size=some.sum())] = 140
            else:
                start = offset * data.row_bytes + 512
                scales = rng.uniform(0.5, 2, (10, 4)).astype(np.float32)
                scales[some, rng.integers(4, size=some.sum())] = 300
                pool[:, start : start + 16] = scales.view(np.uint8)
    slots = [rng.integers(-2, 42, (2, n)).astype(np.int32) for n in columns]
    counts = [np.array([5, n], np.int32) for n in lengths or columns]
    names = [f"{name}{i}" for name in ("pool", "slots", "count") for i in range(len(columns))]
    places = {name: (n << 40, x) for n, (name, x) in enumerate(zip(names, (*pools, *slots, *counts), strict=True), 1)}
    three = [
        tuple(np.int64(places[f"{name}{i}"][0]) for i in range(len(columns))) for name in ("pool", "slots", "count")
    ]
    arrays = Arrays(pools=three[0], indices=three[1], lengths=three[2])

    # Of a CTA and a place in its blocks: bytes by piece, whether it counts, scales by piece, whether some are large.
    seen: dict[tuple[int, int], list[Any]] = {}

    def run(group: int, number: int) -> None:
        warp, shared = Warp(), Shared(memory.size, **places)
        turns = [0] * 32

        def place_piece(p: Any, t: Any, piece: int, words: Any, scale: Any, large: Any, half: Any, rope: Any) -> None:
            block = turns[t.number & 31] // 2
            here = seen.setdefault((group, 64 * block + int(t.lane)), [{}, None, {}, set()])
            assert (piece, int(t.part)) not in here[0]
            here[0][piece, int(t.part)] = np.array(words, np.uint32).tobytes()
            here[1] = shared.words(at.bias + (block & 3) * 256 + t.lane * 4, 1).view(np.float32) > 0
            assert here[1] or shared.bytes[at.holes + (block & 3) * 8 + (t.lane >> 3)]
            if p.data.width > 512 and piece >= data.chunks - 2:
                assert rope == at.rope + (block & 1) * cute_place.TILE + t.rope
            else:
                assert half == at.keys + turns[t.number & 31] % p.tuning.stages * 4 * cute_place.TILE
            if piece < data.codes:
                here[3].add(bool(large))
                here[2][piece] = int(scale) >> 8 * (piece % 4) & 0xFF
                if kind == "inline":
                    here[2][piece] = int(shared.words(scale + 4 * (piece // 2), 1))

        given = stand_ins(shared, warp) | shared.stand_ins()
        given |= {
            "sync_warp": lambda: warp.barrier.wait(60),
            "mbarrier_wait": lambda at, parity: None,
            "mbarrier_arrive": lambda at: None,
        }
        given |= python_of(cute_place, PLACE, given)
        at = cute_place.Place(memory, None, np.int32(0), np.int32(0))

        def advance(*place: Any) -> Any:
            turns[warp.own.lane] += 1
            return given["advance"](*place)

        own = {"thread_index": lambda: np.int32(256 + 32 * number + warp.own.lane), "advance": advance}
        space = python_of(cute_gather, GATHER, given | own | {"place_piece": place_piece})

        def one(lane: int) -> None:
            where = np.int32(groups + group), np.int32(0), np.int32(1), np.int32(0)
            slot, _, done = space["gather"](p, at, arrays, *where)
            assert slot == 2 * done % p.tuning.stages
            assert turns[lane] == 2 * done

        warp.run(one)

    for group, number in itertools.product(range(groups), range(8)):
        run(group, number)
    blocks = [(i, 64 * n) for i, count in enumerate(lengths or columns) for n in range(-(-count // 64))]
    want: dict[tuple[int, int], Any] = {}
    for group in range(groups):
        own = blocks[group * len(blocks) // groups : (group + 1) * len(blocks) // groups]
        for n, (i, start) in enumerate(own):
            for lane in range(64):
                column = start + lane
                slot = slots[i][1, column] if column < (lengths or columns)[i] else -1
                here = 0 <= slot < 40
                want[group, 64 * n + lane] = pools[i][slot // 4 if here else 0], slot % 4 if here else None
    assert seen.keys() == want.keys()
    largest: dict[tuple[int, int], set[bool]] = {}  # of a warp's rows of a block
    for place, (pieces, counted, scales, large) in seen.items():
        row, offset = want[place]
        assert counted == (offset is not None), place
        assert pieces.keys() == {(piece, part) for piece in range(data.chunks) for part in range(4)}
        for (piece, part), found in pieces.items():
            if offset is None:
                assert not any(found)
            else:
                apart = 16 if kind == "inline" and piece >= 8 else 0
                # Threads of odd rows take two pieces that are not codes the other way round.
                other = piece if piece < data.codes or place[1] % 2 == 0 else data.codes + ((piece - data.codes) ^ 1)
                start = offset * data.row_bytes + 64 * other + 16 * part + apart
                assert found == row[start : start + 16].tobytes(), (place, piece, part)
        if kind != "plain":
            own = np.zeros(8, np.uint32)
            if offset is not None and kind == "footer":
                own = row[footer + 8 * offset :][:7].astype(np.uint32)
            elif offset is not None:
                own = np.repeat(row[offset * data.row_bytes + 512 :][:16].view(np.uint32), 2)
            assert scales == {piece: own[piece] for piece in range(data.codes)}, place
            limit = 134 if kind == "footer" else np.float32(128).view(np.uint32) - 1
            largest.setdefault((place[0], place[1] // 8), set()).add(bool((own > limit).any()))
            assert len(large) == 1
    for (group, rows), found in largest.items():
        assert {large for n in range(8) for large in seen[group, 8 * rows + n][3]} == {max(found)}


# ---- the softmax


class Product(NamedTuple):
    """What is asked of ``cute_consume.Logits``."""

    logits: list[Any]
    factor_0: Any
    factor_1: Any


class Sums(NamedTuple):
    """What is asked of ``cute_consume.Sums``."""

    weights: list[Any]


class Addresses(NamedTuple):
    """What is asked of ``cute_place.Place``."""

    bias: int = 0
    holes: int = 1024
    weights: int = 2048
    decays: int = 65536


def bounds(absent: np.ndarray, at: int) -> tuple[Any, Any]:
    """Two words of what producers say of a block of those slots: of the bounds, or where there are holes."""
    if at >= Addresses().holes:
        return tuple(absent.reshape(8, 8).any(1).astype(np.uint8).view(np.uint32))
    slot = at % 256 // 4
    return tuple(np.where(absent[slot : slot + 2], -np.inf, np.inf).astype(np.float32).view(np.uint32))


RISES = (0, 3, -40, 9, 5, 30, -3, 7)  # by what logits of a block lie above those of the first, to the base 2


@pytest.mark.parametrize("holes", [False, True], ids=["full", "holes"])
def test_weights_follow_logits_that_rise(holes: bool) -> None:
    """Of a warp's 16 heads, whose logits rise and fall by block, some heads' earlier than others'; with holes, of which
    some logits are NaN."""
    rng = np.random.default_rng(3)
    p = profile(1, None, scale=0.25)
    logits = rng.standard_normal((len(RISES), 16, 64)) * 8
    for block, rise in enumerate(RISES):
        logits[block] += (rise + np.where(np.arange(16) % 3 == 0, 4 * block, 0))[:, None] / (0.25 * np.log2(np.e))
    values = rng.standard_normal((len(RISES), 64))
    absent = rng.random((len(RISES), 64)) < 0.3 if holes else np.zeros((len(RISES), 64), bool)
    absent[2] |= holes  # one block of nothing else, and one of a single one behind
    absent[4] = np.arange(64) == (50 if holes else 64)
    logits = logits.astype(np.float32)
    logits[np.broadcast_to(absent[:, None], logits.shape)] = np.nan
    found = np.zeros((4, 3, 16))  # by thread of a quad: what logits were taken from, masses and sums
    changes = []
    warp = Warp()
    given = stand_ins(Memory(), warp) | {
        "barrier_sync": lambda *_: None,
        "barrier_arrive": lambda *_: None,
        "store_shared": lambda *_: None,
        "store_shared_4": lambda *_: None,
        "exp2": lambda x: np.exp2(np.float32(x)),
        "pack_bf16x2": lambda low, high: word_of(bf16([low, high])),
        "load_shared_2": lambda at: bounds(absent[warp.own.block], int(at)),
    }
    given["cute"].recast_tensor = staticmethod(lambda x, kind: x)
    given |= python_of(cute_place, ("origin", "shuffled", "largest_of_quad"), given)
    space = python_of(cute_consume, ("weigh", "above", "store_for_quad"), given)

    def one(lane: int) -> None:
        c, quad, h = Cell.of(0, lane), lane & 3, lane >> 2
        slots = np.array([8 * i + 2 * quad + n for i in range(8) for n in (0, 1)])
        state, acc = [np.float32(-np.inf)] * 2 + [np.float32(0)] * 2, np.zeros(2)
        for block in range(len(RISES)):
            warp.own.block = block
            own = logits[block][[h, h + 8]][:, slots].reshape(2, 8, 2).swapaxes(0, 1).reshape(-1)
            factor = np.float32(p.scale * np.log2(np.e))
            x = Product(list(own), factor, factor)
            words = Sums([np.uint32(0)] * 16)
            *state, decay_0, decay_1, changed = space["weigh"](p, Addresses(), c, x, words, np.int32(block), *state)
            if lane == 0:
                changes.append(bool(changed))
            weights = np.array([halves(word) for word in words.weights]).astype(np.float64).reshape(8, 2, 2)
            assert np.nanmax(weights) <= 256
            acc = acc * (np.array([decay_0, decay_1]) if changed else 1) + np.einsum(
                "ihn,in->h", weights, values[block][slots].reshape(8, 2)
            )
        for n in range(2):
            found[quad, :, h + 8 * n] = state[n], state[2 + n], acc[n]

    warp.run(one)
    top, (mass, total) = found[0, 0], found[:, 1:].sum(0)
    exponents = np.where(
        np.broadcast_to(absent[:, None], logits.shape), -np.inf, logits.astype(np.float64) * 0.25 * np.log2(np.e)
    )
    exponents = exponents.swapaxes(0, 1).reshape(16, -1)
    want = np.exp2(exponents - exponents.max(1)[:, None])
    np.testing.assert_allclose(top + np.log2(mass), exponents.max(1) + np.log2(want.sum(1)), rtol=1e-5)
    expected = (want * values.reshape(-1)).sum(1) / want.sum(1)
    np.testing.assert_allclose(total / mass, expected, atol=2.0**-8 * np.abs(values).max())
    assert (exponents.max(1) - top <= 8.01).all()
    assert 1 < sum(changes) < len(RISES)


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

"""Runs the packer's CuTe kernel on the CPU: the code of one thread, on NumPy arrays of the values of all threads.

What is run is all that the kernel says in Python; its instructions are told again here.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from jmla.kernels.kv_pack import cute

SPACE = 64  # bytes between operands, so that what reads or writes beside one is seen
START = 1 << 40  # an address


class _Operand:
    """What the kernel asks of a tensor."""

    def __init__(self, address: int, shape: tuple[int, ...]):
        self.iterator, self.shape, self.address = self, shape, address

    def toint(self) -> np.ndarray:
        return np.int64(self.address)


def _float(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def _e4m3(values: list[np.ndarray]) -> np.ndarray:
    word = np.zeros(np.broadcast_shapes(*(np.shape(x) for x in values)), np.uint32)
    for i, x in enumerate(values):
        code = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        word = word | (np.where(np.isnan(x), 0x7F, code).astype(np.uint32) << np.uint32(8 * i))
    return word.view(np.int32)


def _bfloat16(values: list[np.ndarray]) -> np.ndarray:
    words = [np.asarray(x).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for x in values]
    return (words[0] | (words[1] << np.uint32(16) if len(words) > 1 else np.uint32(0))).view(np.int32)


class _Memory:
    """Bytes of all operands, and the instructions that reach them."""

    def __init__(self, arrays: Sequence[np.ndarray | None], kept: Collection[int]):
        blocks, self.operands, at = [], [], SPACE
        for i, x in enumerate(arrays):
            if x is None:
                self.operands.append(None)
                continue
            aligned = i in kept or (x.ndim > 1 and x.shape[-1] * x.itemsize % 16 == 0)
            start = -(-at // 64) * 64 + (0 if aligned else x.itemsize)
            self.operands.append(_Operand(START + start, x.shape))
            blocks.append((start, x))
            at = start + x.nbytes + SPACE
        self.bytes = np.full(at, 0xEE, np.uint8)
        self.written = np.zeros(at, bool)
        for start, x in blocks:
            self.bytes[start : start + x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
        self.allowed = np.zeros(at, bool)
        for start, x in blocks:
            self.allowed[start : start + x.nbytes] = True

    def load(self, address: np.ndarray, size: int) -> list[np.ndarray]:
        at = np.asarray(address) - START
        assert (at % size == 0).all(), "an address that is not aligned"
        index = at[..., None] + np.arange(size)
        assert self.allowed[index].all(), "a load beside the operands"
        raw = self.bytes[index]
        if size < 4:
            return [sum(raw[..., i].astype(np.int32) << 8 * i for i in range(size))]
        return list(np.moveaxis(np.ascontiguousarray(raw).view(np.int32), -1, 0))

    def store(self, address: np.ndarray, words: list[np.ndarray], size: int, where: np.ndarray) -> None:
        address, where, *words = np.broadcast_arrays(address, where, *words)
        at = (address - START)[where]
        assert (at % size == 0).all(), "an address that is not aligned"
        raw = np.stack([w[where] for w in words], axis=-1).astype("<i4").view(np.uint8)[..., :size]
        index = at[:, None] + np.arange(size)
        assert self.allowed[index].all(), "a store beside the operands"
        assert not self.written[index].any(), "a byte that is written twice"
        self.written[index] = True
        self.bytes[index] = raw


@contextmanager
def _told(memory: _Memory, lanes: int) -> Iterator[None]:
    def exchange(x: np.ndarray, distance: int) -> np.ndarray:
        x = np.broadcast_to(x, lanes)
        return x[np.arange(lanes) ^ distance]

    def fma(a: Any, b: Any, c: Any) -> np.ndarray:
        return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)

    with (
        np.errstate(all="ignore"),
        mock.patch.multiple(
            cute,
            Int32=lambda x: np.asarray(x).astype(np.int32),
            Int64=lambda x: np.asarray(x).astype(np.int64),
            Float32=_float,
            _mul=lambda a, b: _float(a) * _float(b),
            _add=lambda a, b: _float(a) + _float(b),
            _sub=lambda a, b: _float(a) - _float(b),
            _div=lambda a, b: _float(a) / _float(b),
            _fma=fma,
            _rsqrt=lambda x: (1 / np.sqrt(np.float64(x))).astype(np.float32),
            _clip=lambda x, bound: np.clip(x, np.float32(-bound), np.float32(bound)),
            _max=np.maximum,
            _min=np.minimum,
            _pick=np.where,
            _float=lambda x: np.asarray(x, np.int32).view(np.float32),
            _bits=lambda x: np.asarray(x, np.float32).view(np.int32),
            _exchange=exchange,
            _load=memory.load,
            _store=memory.store,
            _e4m3=_e4m3,
            _bfloat16=_bfloat16,
        ),
    ):
        yield


def call(
    build: Any,
    profile: cute.Profile,
    inputs: Sequence[jax.Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
    **_: Any,
) -> tuple[jax.Array]:
    """Stands in for ``launch_cute.call`` in the packer's module."""
    assert build is cute.build
    assert aliases == {2: 0}

    def run(*present: Any) -> np.ndarray:
        arrays = iter(present)
        given = [None if x is None else np.asarray(next(arrays)) for x in inputs]
        memory = _Memory(given, aliases)
        blocks = -(-given[0].shape[0] // profile.block_rows)
        threads = np.arange(profile.warps * cute.WARP, dtype=np.int32)
        thread, number = np.tile(threads, blocks), np.repeat(np.arange(blocks, dtype=np.int32), threads.size)
        with _told(memory, thread.size):
            operands = tuple(memory.operands)
            align = 4 if operands[3] is None or operands[3].address % 16 else 16
            cute._Packer(profile, thread, operands, align).run(cute.first_row(profile, thread, number))
        start = memory.operands[2].address - START
        return memory.bytes[start : start + given[2].nbytes].view(given[2].dtype).reshape(given[2].shape)

    present = [x for x in inputs if x is not None]
    return (jax.pure_callback(run, outputs[0], *present, vmap_method="sequential"),)

"""Where every byte of a cached token is.

A ``KVLayout`` is the one source of offsets for packers, readers and every implementation. A pool is a two-dimensional
array whose leading axis is pages; a slot id is ``page * page_size + offset``. Rows are reached by (page, offset in the
page) pairs, both int32: a flat byte index would overflow int32 from 2 GiB on.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .quant import ScaleForm, dequantise, e8m0_value, from_bytes, hadamard

Kind = Literal["inline", "footer", "index", "plain"]

MAX_SLOTS = 2**31 - 1  # slot ids are int32
VALUE_DTYPES = ("bfloat16", "float32", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The bytes of a page of cached rows; hashable, a static argument under jit.

    Byte b of the data of offset t lies at ``t * row_bytes + b`` of its page. By kind, the data of a row is

    * inline: ``nope`` e4m3 codes, one float32 scale a tile, ``rope`` bf16 values;
    * footer: ``nope`` e4m3 codes, ``rope`` bf16 values; the scales (UE8M0, one byte a tile, 8 bytes a row or a
      multiple of that) follow the data of all rows, at ``footer_offset + t * scale_bytes``;
    * index: ``nope`` e4m3 codes; one float32 scale a row at ``footer_offset + 4 * t``;
    * plain: ``nope`` values of ``value_dtype``.

    Everything is little-endian. What lies behind the last row up to ``page_stride`` is padding.

    Attributes:
        kind: "inline", "footer", "index" or "plain".
        nope: leading values, quantised except in plain rows.
        rope: trailing bf16 values.
        page_size: rows a page.
        page_stride: bytes a page.
        tile: values under one scale; the last tile may be shorter.
        value_dtype: dtype of the leading values.
        scale_form: how the writer forms scales. Readers take both forms; a kernel may read those of a "power_of_two"
            layout in bfloat16, so that a pool of other scales should be read by a "float32" layout.
        min_amax: the writer raises the largest magnitude of a tile to this.
        hadamard: index rows, and the queries that meet them, are rotated by the orthonormal Hadamard matrix.
    """

    kind: Kind
    nope: int
    rope: int
    page_size: int
    page_stride: int
    tile: int
    value_dtype: str
    scale_form: ScaleForm
    min_amax: float
    hadamard: bool

    def __post_init__(self) -> None:
        if self.nope < 1 or self.rope < 0 or self.page_size < 1 or self.tile < 1:
            raise ValueError(
                f"Expected nope, page_size and tile of at least 1 and rope of at least 0, got {self.nope=}, "
                f"{self.rope=}, {self.page_size=}, {self.tile=}"
            )
        needed = self.page_size * self.bytes_per_token
        if not needed <= self.page_stride <= MAX_SLOTS:
            raise ValueError(
                f"Expected {self.page_stride=} to be at least {needed}, the bytes of {self.page_size} rows of "
                f"{self.bytes_per_token}, and at most {MAX_SLOTS}"
            )
        if self.scale_form not in ("power_of_two", "float32"):
            raise ValueError(f"Expected {self.scale_form=} to be one of: power_of_two, float32")
        if self.kind == "footer" and (self.scale_form != "power_of_two" or self.min_amax < 448 * 2.0**-126):
            raise ValueError(
                f"Expected footer scales to be powers of two above 2^-127, got {self.scale_form=}, {self.min_amax=}"
            )
        if not 0 <= self.min_amax < 2.0**127:
            raise ValueError(f"Expected {self.min_amax=} to be finite and not negative")
        if self.hadamard and self.nope & (self.nope - 1):
            raise ValueError(f"Expected the width of rotated rows to be a power of two, got {self.nope}")

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.nope + self.rope

    @property
    def num_tiles(self) -> int:
        """Scales of a row."""
        return 0 if self.kind == "plain" else -(-self.nope // self.tile)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a row, with their padding."""
        if self.kind == "footer":
            return -(-self.num_tiles // 8) * 8
        return 4 * self.num_tiles

    @property
    def row_bytes(self) -> int:
        """Bytes of the data of a row: 656, 576, 128, or those of the plain values."""
        codes = self.nope * jnp.dtype(self.value_dtype).itemsize
        return codes + 2 * self.rope + (self.scale_bytes if self.kind == "inline" else 0)

    @property
    def rope_offset(self) -> int:
        """Where the bf16 values start in the data of a row."""
        return self.row_bytes - 2 * self.rope

    @property
    def has_footer(self) -> bool:
        """Whether the scales lie behind the data of all rows."""
        return self.kind in ("footer", "index")

    @property
    def footer_offset(self) -> int:
        """Where the footer starts in a page."""
        return self.page_size * self.row_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a row, scales included: 656, 584, 132, or those of the plain values."""
        return self.row_bytes + (self.scale_bytes if self.has_footer else 0)

    @property
    def name(self) -> str:
        """A short name: "inline656", "footer584", "index132", "plain-bfloat16"."""
        return f"plain-{self.value_dtype}" if self.kind == "plain" else f"{self.kind}{self.bytes_per_token}"

    def data_address(self, slot: int) -> int:
        """Byte address of the data of a slot in the pool, as an exact Python int (for hosts, never for indices)."""
        page, offset = divmod(slot, self.page_size)
        return page * self.page_stride + offset * self.row_bytes

    def rope_address(self, slot: int) -> int:
        """Byte address of the bf16 values of a slot."""
        return self.data_address(slot) + self.rope_offset

    def scale_address(self, slot: int, tile: int = 0) -> int:
        """Byte address of the scale of a tile of a slot."""
        if not 0 <= tile < self.num_tiles:
            raise ValueError(f"Expected {tile=} to be in [0, {self.num_tiles}) for layout {self.name}")
        if self.kind == "inline":
            return self.data_address(slot) + self.nope + 4 * tile
        page, offset = divmod(slot, self.page_size)
        size = 1 if self.kind == "footer" else 4
        return page * self.page_stride + self.footer_offset + offset * self.scale_bytes + size * tile

    def pages_for_budget(self, budget: int) -> int:
        """Whole pages that fit in a number of bytes."""
        return budget // self.page_stride

    def pool_shape(self, pages: int, raw: bool = False) -> tuple[int, int]:
        """Shape of a pool of so many pages: typed for plain rows unless ``raw``, else bytes.

        Raises:
            ValueError: when int32 slot ids cannot address the pool.
        """
        if pages < 0 or pages * self.page_size > MAX_SLOTS:
            raise ValueError(
                f"Expected {pages=} of {self.page_size} rows to have at most {MAX_SLOTS} slots (slot ids are int32), "
                f"got {pages * self.page_size}; supported: up to {MAX_SLOTS // self.page_size} pages"
            )
        return pages, self.page_size * self.width if self.kind == "plain" and not raw else self.page_stride

    def pool_dtype(self, raw: bool = False) -> Any:
        """Dtype of a pool: ``value_dtype`` for plain rows unless ``raw``, else uint8."""
        return jnp.dtype(self.value_dtype if self.kind == "plain" and not raw else "uint8")

    def zeros(self, pages: int, raw: bool = False) -> jax.Array:
        """A pool of zeros; see ``pool_shape``."""
        return jnp.zeros(self.pool_shape(pages, raw), self.pool_dtype(raw))


def inline656(
    page_size: int = 64,
    *,
    nope: int = 512,
    rope: int = 64,
    scale_form: ScaleForm = "power_of_two",
    page_stride: int | None = None,
    min_amax: float | None = None,
) -> KVLayout:
    """Rows of V3.2 and GLM: e4m3 codes, a float32 scale for each 128 of them, bf16 rope values.

    ``min_amax`` is by default the FlashMLA rule (scale of at least 1e-4) for powers of two, and 1e-4 for float32
    scales; 0 leaves zero tiles with scale 0 and codes 0. ``rope=0`` gives rows without a rope section.
    """
    if min_amax is None:
        min_amax = 448e-4 if scale_form == "power_of_two" else 1e-4
    stride = page_size * (nope + 4 * -(-nope // 128) + 2 * rope) if page_stride is None else page_stride
    return KVLayout("inline", nope, rope, page_size, stride, 128, "float8_e4m3fn", scale_form, min_amax, False)


def footer584(
    page_size: int,
    *,
    nope: int = 448,
    rope: int = 64,
    padded: bool = True,
    page_stride: int | None = None,
    min_amax: float = 1e-8,
) -> KVLayout:
    """Rows of V4: e4m3 codes and bf16 rope values, the UE8M0 scales of 64 codes each behind all rows of the page.

    The page stride is by default a multiple of the row's data bytes (576), the form of FlashMLA, SGLang and vLLM;
    ``padded=False`` gives tight pages, and ``page_stride`` any other number of bytes.
    """
    row = nope + 2 * rope
    tiles = -(-nope // 64)
    stride = page_size * (row + -(-tiles // 8) * 8)
    if page_stride is not None:
        stride = page_stride
    elif padded:
        stride = -(-stride // row) * row
    return KVLayout("footer", nope, rope, page_size, stride, 64, "float8_e4m3fn", "power_of_two", min_amax, False)


def index132(
    page_size: int = 64,
    *,
    width: int = 128,
    hadamard: bool = True,
    scale_form: ScaleForm = "float32",
    page_stride: int | None = None,
    min_amax: float = 1e-4,
) -> KVLayout:
    """Indexer keys: e4m3 codes, one float32 scale a row, the scales behind all codes of the page."""
    stride = page_size * (width + 4) if page_stride is None else page_stride
    return KVLayout("index", width, 0, page_size, stride, width, "float8_e4m3fn", scale_form, min_amax, hadamard)


def plain(width: int, dtype: str, page_size: int) -> KVLayout:
    """Rows of plain values: "bfloat16", "float32", or "float8_e4m3fn" with one scale for the pool (``kv_scale``)."""
    if dtype not in VALUE_DTYPES:
        raise ValueError(f"Expected {dtype=} to be one of: {', '.join(VALUE_DTYPES)}")
    stride = page_size * width * jnp.dtype(dtype).itemsize
    return KVLayout("plain", width, 0, page_size, stride, width, dtype, "float32", 0.0, False)


def is_raw(pool: jax.Array) -> bool:
    """Whether a pool holds bytes rather than plain typed rows."""
    return pool.dtype == jnp.uint8


def locate(slots: jax.Array, layout: KVLayout, pages: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits slots into (page, offset), and tells which exist; those that do not are sent to page 0, offset 0."""
    valid = (slots >= 0) & (slots < pages * layout.page_size)
    slots = jnp.where(valid, slots, 0)
    return slots // layout.page_size, slots % layout.page_size, valid


def _slices(pool: jax.Array, page: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """``pool[page, start:start + width]`` for every (page, start): one contiguous slice each."""
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    starts = jnp.stack([page, start], axis=-1)
    return jax.lax.gather(pool, starts, dimensions, (1, width), mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def decode_rows(
    data: jax.Array, scales: jax.Array | None, layout: KVLayout, kv_scale: jax.Array | float | None = None
) -> jax.Array:
    """Turns the stored form of rows into float32 values; the one place where rows are unpacked.

    Args:
        data: ``[..., row_bytes]`` uint8, or ``[..., width]`` of ``value_dtype`` for typed plain rows.
        scales: ``[..., scale_bytes]`` uint8 for layouts with a footer, else None.
        layout: the layout.
        kv_scale: the scale of plain e4m3 rows.

    Returns:
        ``[..., width]`` float32, as stored: rotated rows stay rotated.
    """
    if layout.kind == "plain":
        values = from_bytes(data, layout.value_dtype) if data.dtype == jnp.uint8 else data
        values = values.astype(jnp.float32)
        return values if kv_scale is None else values * kv_scale
    codes = from_bytes(data[..., : layout.nope], jnp.float8_e4m3fn)
    if scales is None:
        scales = data[..., layout.nope : layout.rope_offset]
    if layout.kind == "footer":
        tile_scales = e8m0_value(scales[..., : layout.num_tiles])
    else:
        tile_scales = from_bytes(scales, jnp.float32)
    values = dequantise(codes, tile_scales, layout.tile)
    if layout.rope == 0:
        return values
    rope = from_bytes(data[..., layout.rope_offset :], jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([values, rope], axis=-1)


def gather_rows(
    pool: jax.Array, slots: jax.Array, layout: KVLayout, kv_scale: jax.Array | float | None = None
) -> jax.Array:
    """Reads rows by slot; a slot that does not exist (negative, or past the pool) gives zeros.

    Args:
        pool: a pool of the layout, bytes or typed.
        slots: ``[...]`` int32.
        layout: the layout.
        kv_scale: the scale of plain e4m3 rows.

    Returns:
        ``[..., width]`` float32, as stored: rotated rows stay rotated.
    """
    if pool.shape[0] == 0:
        return jnp.zeros((*slots.shape, layout.width), jnp.float32)
    page, offset, valid = locate(slots, layout, pool.shape[0])
    size = layout.row_bytes if is_raw(pool) else layout.width
    data = _slices(pool, page, offset * size, size)
    scales = None
    if layout.has_footer:
        start = layout.footer_offset + offset * layout.scale_bytes
        scales = _slices(pool, page, start, layout.scale_bytes)
    return jnp.where(valid[..., None], decode_rows(data, scales, layout, kv_scale), 0.0)


def unpack_pages(pages: jax.Array, layout: KVLayout, kv_scale: jax.Array | float | None = None) -> jax.Array:
    """Unpacks whole pages that were taken from a pool along its leading axis.

    Args:
        pages: ``[..., page_stride]`` uint8, or ``[..., page_size * width]`` typed.
        layout: the layout.
        kv_scale: the scale of plain e4m3 rows.

    Returns:
        ``[..., page_size, width]`` float32, as stored: rotated rows stay rotated.
    """
    size = layout.row_bytes if is_raw(pages) else layout.width
    data = pages[..., : layout.page_size * size].reshape(*pages.shape[:-1], layout.page_size, size)
    scales = None
    if layout.has_footer:
        end = layout.footer_offset + layout.page_size * layout.scale_bytes
        scales = pages[..., layout.footer_offset : end].reshape(*pages.shape[:-1], layout.page_size, layout.scale_bytes)
    return decode_rows(data, scales, layout, kv_scale)


def unrotate(rows: jax.Array, layout: KVLayout) -> jax.Array:
    """Undoes the rotation of stored rows (the transform is its own inverse); other layouts are left alone."""
    return hadamard(rows) if layout.hadamard else rows

"""Shapes of the released models, by name: what tests and benchmarks of the operations run over."""

import dataclasses
import math

from .layouts import KVLayout, footer584, index132, inline656

HEAD_SHARDS = (8, 16, 32, 64, 128)  # heads of one shard under tensor parallelism


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One kind of layer of one model, as ``sparse_mla`` meets it.

    Attributes:
        name: of the model and layer.
        heads: of the whole model.
        layout: of the pool.
        columns: attended slots of a row, at most.
        scale: factor of the logits.
        extra_layout: of the second pool, or None.
        extra_columns: attended slots in the second pool.
        sinks: whether heads have sinks.
        groups: of heads in the output projection, 0 for none.
    """

    name: str
    heads: int
    layout: KVLayout
    columns: int
    scale: float
    extra_layout: KVLayout | None = None
    extra_columns: int = 0
    sinks: bool = False
    groups: int = 0

    @property
    def width(self) -> int:
        """Values of a key row."""
        return self.layout.width

    @property
    def v_dim(self) -> int:
        """Values of an output row."""
        return self.layout.nope if self.layout.kind == "inline" else self.layout.width

    def flops(self, rows: int, heads: int | None = None) -> int:
        """Multiplications and additions of ``rows`` full rows."""
        return 2 * rows * (heads or self.heads) * (self.columns + self.extra_columns) * (self.width + self.v_dim)

    def shards(self) -> tuple[int, ...]:
        """Head counts of the shards that the model can be cut into."""
        return tuple(heads for heads in HEAD_SHARDS if heads <= self.heads)


@dataclasses.dataclass(frozen=True)
class IndexShape:
    """The indexer of one model: ``heads`` query heads of ``layout.width``, of whose keys ``top_k`` are chosen."""

    name: str
    heads: int
    layout: KVLayout
    top_k: int


@dataclasses.dataclass(frozen=True)
class CompressShape:
    """One compressor: windows of ``ratio`` tokens, entries of ``width`` values."""

    name: str
    ratio: int
    overlap: bool
    width: int


_V4_SCALE = 512**-0.5
_WINDOW, _CSA, _HCA = footer584(256), footer584(64), footer584(2)
_HCA_COLUMNS = 8192  # a million tokens, 128 an entry


def _v4(name: str, heads: int, groups: int, top_k: int) -> tuple[AttentionShape, ...]:
    window = AttentionShape(f"{name}-window", heads, _WINDOW, 128, _V4_SCALE, sinks=True, groups=groups)
    csa = dataclasses.replace(window, name=f"{name}-csa", extra_layout=_CSA, extra_columns=top_k)
    hca = dataclasses.replace(window, name=f"{name}-hca", extra_layout=_HCA, extra_columns=_HCA_COLUMNS)
    return window, csa, hca


ATTENTION = {
    shape.name: shape
    for shape in (
        # (128 + 64)^-0.5, times the square of YaRN's 0.1 ln 40 + 1
        AttentionShape("v3.2", 128, inline656(64), 2048, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
        AttentionShape("glm-5", 64, inline656(64, scale_form="float32"), 2048, 256**-0.5),
        *_v4("v4-flash", 64, 8, 512),
        *_v4("v4-pro", 128, 16, 1024),
    )
}
INDEX = {
    shape.name: shape
    for shape in (
        IndexShape("v3.2", 64, index132(64), 2048),
        IndexShape("glm-5", 32, index132(64), 2048),
        IndexShape("v4-flash", 64, index132(64), 512),
        IndexShape("v4-pro", 64, index132(64), 1024),
    )
}
COMPRESS = {
    shape.name: shape
    for shape in (
        CompressShape("v4-csa", 4, True, 512),
        CompressShape("v4-index", 4, True, 128),
        CompressShape("v4-hca", 128, False, 512),
    )
}

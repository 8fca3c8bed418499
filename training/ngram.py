"""The yardstick for the bundled model: a byte 5-gram model of the same training text.

Three smoothings are fitted, and the best of them on the held-out text is the baseline, so that it is an honest one:

- interpolated modified Kneser-Ney (Chen and Goodman, 1998): absolute discounts D1, D2, D3+ from the counts of counts of
  each order, and lower orders that count distinct left neighbours;
- the same discounts with plain counts at every order;
- Witten-Bell: an event never seen after a context weighs as much as the number of distinct ones that were.

Every document starts from four NUL bytes of context, which are never predicted themselves; the lowest order falls back
to 1/256 a byte, so no probability is zero.

    python -m training.ngram [--corpus runs/corpus]
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .corpus import read_side

ORDER = 5


def grams(documents: Sequence[bytes], order: int = ORDER) -> NDArray[np.uint64]:
    """One number for each byte of the documents: the byte in the low 8 bits, its order - 1 predecessors above them."""
    if not 1 <= order <= 8:
        raise ValueError(f"Expected {order=} to be from 1 to 8.")
    pad = b"\0" * (order - 1)
    text = np.frombuffer(b"".join(pad + document for document in documents), np.uint8)
    keys = np.zeros(max(len(text) - order + 1, 0), np.uint64)
    for back in range(order):
        keys |= text[order - 1 - back : len(text) - back].astype(np.uint64) << np.uint64(8 * back)
    # A document's first byte has its pad just before it; what predicts bytes of a pad is left out.
    lengths = np.array([len(document) for document in documents])
    starts = np.cumsum(lengths + order - 1) - lengths - (order - 1)
    keep = np.zeros(len(keys), bool)
    for start, length in zip(starts, lengths, strict=True):
        keep[start : start + length] = True
    return keys[keep]


@dataclass(frozen=True)
class Level:
    """One order of a model. Sorted n-gram keys with their discounted mass, sorted contexts with the mass left over."""

    keys: NDArray[np.uint64]
    mass: NDArray[np.float64]  # of a seen n-gram: its share of the context's count after the discount
    contexts: NDArray[np.uint64]
    rest: NDArray[np.float64]  # of a seen context: the share that goes to the next lower order

    def probabilities(self, keys: NDArray[np.uint64], lower: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(byte | context) of each key, given the probabilities `lower` of the next lower order."""
        mass, _ = look_up(self.keys, self.mass, keys)
        rest, known = look_up(self.contexts, self.rest, keys >> np.uint64(8))
        return mass + np.where(known, rest, 1.0) * lower


def look_up(
    table: NDArray[np.uint64], values: NDArray[np.float64], keys: NDArray[np.uint64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(value or 0, whether found) of each key in a sorted table."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    known = table[at] == keys
    return np.where(known, values[at], 0.0), known


def modified_discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What modified Kneser-Ney takes from each count: D1, D2 or D3+ from the counts of counts, never more than it."""
    n = [int(np.count_nonzero(counts == c)) for c in range(5)]
    share = n[1] / (n[1] + 2 * n[2]) if n[1] else 0.0
    steps = [c - (c + 1) * share * n[c + 1] / n[c] if n[c] else 0.0 for c in (1, 2, 3)]
    return np.clip(np.array([0.0, *steps])[np.minimum(counts, 3)], 0.0, counts)


def discounted(keys: NDArray[np.uint64], counts: NDArray[np.int64]) -> Level:
    """A level whose n-grams give up their modified Kneser-Ney discount to the next lower order."""
    contexts, of = np.unique(keys >> np.uint64(8), return_inverse=True)
    totals = np.bincount(of, counts)
    taken = modified_discounts(counts)
    return Level(keys, (counts - taken) / totals[of], contexts, np.bincount(of, taken) / totals)


def witten_bell(keys: NDArray[np.uint64], counts: NDArray[np.int64]) -> Level:
    """A level that leaves T / (C + T) to the next lower order: T distinct bytes seen in C events after the context."""
    contexts, of = np.unique(keys >> np.uint64(8), return_inverse=True)
    totals, kinds = np.bincount(of, counts), np.bincount(of)
    return Level(keys, counts / (totals + kinds)[of], contexts, kinds / (totals + kinds))


def low(keys: NDArray[np.uint64], order: int) -> NDArray[np.uint64]:
    """The keys cut to their last `order` bytes."""
    return keys & np.uint64((1 << (8 * order)) - 1)


def fit[T](keys: NDArray[np.uint64], level: Callable[..., T], neighbours: bool, order: int = ORDER) -> tuple[T, ...]:
    """Levels of order 1 to `order` from the keys of `grams`.

    `neighbours`: below the highest order an n-gram counts its distinct left neighbours (Kneser-Ney), not its events.
    """
    unique, counts = np.unique(keys, return_counts=True)
    levels = [level(unique, counts)]
    for n in range(order - 1, 0, -1):
        shorter, of = np.unique(low(unique, n), return_inverse=True)
        counts = np.bincount(of) if neighbours else np.bincount(of, counts).astype(np.int64)
        unique = shorter
        levels.append(level(unique, counts))
    return tuple(reversed(levels))


def bits_per_byte(levels: Sequence[Level], keys: NDArray[np.uint64]) -> float:
    """Mean -log2 P over the keys of `grams` (of the same order as the model)."""
    chance = np.full(len(keys), 1 / 256)
    for n, level in enumerate(levels, 1):
        chance = level.probabilities(low(keys, n), chance)
    return float(-np.log2(chance).mean())


SMOOTHINGS: dict[str, tuple[Callable[..., Level], bool]] = {
    "modified Kneser-Ney": (discounted, True),
    "absolute discounts": (discounted, False),
    "Witten-Bell": (witten_bell, False),
}


def compare(train: Sequence[bytes], heldout: Sequence[bytes], order: int = ORDER) -> dict[str, float]:
    """Held-out bits per byte of each smoothing."""
    keys, tests = grams(train, order), grams(heldout, order)
    return {
        name: bits_per_byte(fit(keys, level, neighbours, order), tests)
        for name, (level, neighbours) in SMOOTHINGS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out bits per byte of a byte 5-gram model.")
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    corpus = parser.parse_args().corpus
    found = compare(read_side(corpus, "train"), read_side(corpus, "heldout"))
    best = min(found, key=lambda name: found[name])
    report = {"order": ORDER, "smoothing": best, "bits_per_byte": found[best], "all": found}
    (corpus / "ngram.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, bits in found.items():
        print(f"byte {ORDER}-gram, {name}: {bits:.4f} bits per byte on the held-out text")
    print(f"baseline: {best}, {found[best]:.4f} bits per byte")


if __name__ == "__main__":
    main()

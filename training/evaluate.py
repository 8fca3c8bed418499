"""What the bundled model is measured by, apart from the model itself.

- Bits per byte: the loss of every text token of the held-out documents, over the bytes that those tokens stand for. The
  end-of-sentence ids between documents stand for no byte and are not counted, in the baseline either (training.ngram).
- Acceptance: 50 fixed prompts (prompts.json, written for this purpose) are continued by 64 tokens, and Python's own
  `tokenize` reads prompt and continuation.

A cut after 64 tokens often falls inside a bracket or a string of sound code as well, so there are two figures: `strict`
counts texts that raise nothing at all, `lenient` also those whose only fault is that the input ends too soon.
"""

import io
import json
import math
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONTINUATION_TOKENS = 64
# A bracket or a triple-quoted string still open at the end; the two spellings are those of Python 3.12 and before it.
OPEN_AT_END = ("unexpected EOF in multi-line statement", "EOF in multi-line")
# A quote or a line continuation on the last line; excused only if nothing, not even a line end, comes after it.
OPEN_ON_LAST_LINE = ("unterminated string literal", "unterminated f-string literal", "unexpected EOF")


def prompts() -> list[str]:
    """The 50 fixed prompts, in order."""
    return json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))


def fault(text: str) -> tuple[str, int] | None:
    """(message, line) of the first thing in `text` that Python's `tokenize` does not accept, or None.

    Where Python only hands on a stray character ($, ?, a curly quote) that no Python text holds, that is a fault too.
    """
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            stray = token.exact_type in (tokenize.ERRORTOKEN, tokenize.OP)  # OP: not one of the known operators
            if stray or (token.type == tokenize.NAME and not token.string.isidentifier()):
                return f"stray {token.string!r}", token.start[0]
    except tokenize.TokenError as error:
        message, (line, _) = error.args
        return message, line
    except SyntaxError as error:  # inconsistent dedent
        return error.msg, error.lineno or 0
    return None


def accepts(text: str, strict: bool = True) -> bool:
    """Whether Python's `tokenize` runs over `text`; with strict=False an end of input that comes too soon is excused.

    Excused are an open bracket or triple-quoted string at the end, a string open on the last line when the text ends
    inside that line, and a character of which the cut left only some bytes (decoded as U+FFFD at the very end).
    """
    if not strict:
        text = text.rstrip("\ufffd")
    found = fault(text)
    if found is None or strict:
        return found is None
    message, line = found
    if message.startswith(OPEN_AT_END):
        return True
    return message.startswith(OPEN_ON_LAST_LINE) and line == text.count("\n") + 1


def acceptance(texts: Sequence[str]) -> dict[str, float]:
    """The shares of texts accepted: {"strict": ..., "lenient": ...}. Raises ValueError when there is no text."""
    if not texts:
        raise ValueError("Expected at least one text.")
    return {
        "strict": sum(accepts(text) for text in texts) / len(texts),
        "lenient": sum(accepts(text, strict=False) for text in texts) / len(texts),
    }


def bits_per_byte(losses: ArrayLike, targets: ArrayLike, sizes: NDArray[np.int64]) -> float:
    """Bits per byte of text from the loss of each target.

    losses: [n] floats, -ln P(target); targets: [n] ids; sizes: [vocab] bytes of each id, 0 for marks, whose loss is
    left out (`training.tokenizer.token_bytes`). Sums in float64. Raises ValueError when shapes differ or no target
    stands for a byte.
    """
    nats, ids = np.asarray(losses, np.float64), np.asarray(targets)
    if nats.shape != ids.shape:
        raise ValueError(f"Expected {nats.shape=} to equal {ids.shape=}.")
    taken = sizes[ids]
    if not taken.any():
        raise ValueError("Expected at least one target that stands for text.")
    return float(nats[taken > 0].sum() / (math.log(2) * taken.sum()))


def windows(count: int, length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a row of `count` tokens in which every token but the first is a target just once.

    Yields (start, stop, first): feed tokens[start : stop - 1], whose targets are tokens[start + 1 : stop]; the targets
    tokens[first:stop] count in this window. `length` targets at most a window; each window after the first looks back
    over `context` targets of the one before it.
    """
    if not 0 <= context < length:
        raise ValueError(f"Expected {context=} to be from 0 to less than {length=}.")
    first, start = 1, 0
    while first < count:
        stop = min(start + length + 1, count)
        yield start, stop, first
        first, start = stop, stop - 1 - context

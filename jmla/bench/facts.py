"""Facts planted in long texts and asked for later: ``# key WORD WORD = WORD WORD``, on a line of its own.

Two words are the key and two the value, each one token, so that a fact's five tokens from the first key word to the
last of the value always lie in one compressed entry of DeepSeek-V4's CSA layers, whose windows are 8 tokens wide and
begin every 4. A question is the line again, up to the equals sign. ``training.long_context`` trains with these lines
and ``python -m jmla.bench ladder`` asks for them; nothing here but tokens and NumPy.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WORDS = 2  # of a key, and of a value
LINE = 9  # tokens of a line: line end, two of the mark, key, equals sign, value, line end
KEY, VALUE = 3, 6  # where key and value begin in a line
FEWEST = 16  # words that make keys unlike enough


Pair = tuple[int, int]  # the words of a key, or of a value


@dataclass(frozen=True)
class Facts:
    """The tokens of the lines.

    Attributes:
        words: ids of the words that keys and values are drawn from.
        head: three ids before the key.
        equals: id between key and value.
        end: id after the value.
    """

    words: tuple[int, ...]
    head: tuple[int, int, int]
    equals: int
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> "Facts":
        """The lines in a tokenizer's ids; its words are all ids of a space and two or more small letters.

        Raises:
            ValueError: the tokenizer cuts the lines otherwise, or has too few such words.
        """
        head, rest = tokenizer.encode("\n# key"), tokenizer.encode(" =")
        end = tokenizer.encode("\n")
        if len(head) != 3 or len(rest) != 1 or len(end) != 1:
            raise ValueError(f"Expected a tokenizer that makes 3, 1 and 1 ids of a fact's parts, got {head, rest, end}")
        words = []
        for number in range(tokenizer.vocab_size):
            text = tokenizer.decode([number])
            if re.fullmatch(r" [a-z]{2,}", text) and text != " key" and tokenizer.encode(text) == [number]:
                words.append(number)
        if len(words) < FEWEST:
            raise ValueError(f"Expected a tokenizer with at least {FEWEST} words of one token, got {len(words)}")
        return cls(tuple(words), (head[0], head[1], head[2]), rest[0], end[0])

    def draw(self, rng: np.random.Generator, taken: Sequence[Pair] = ()) -> tuple[Pair, Pair]:
        """A key that is none of ``taken``, and a value. Three keys of ten share a word with a key of ``taken``."""
        while True:
            key = self._two(rng)
            if taken and rng.random() < 0.3:
                near = taken[int(rng.integers(len(taken)))]
                key = (near[0], key[1]) if rng.random() < 0.5 else (key[0], near[1])
            if key not in taken:
                return key, self._two(rng)

    def _two(self, rng: np.random.Generator) -> Pair:
        first, second = rng.integers(0, len(self.words), WORDS)
        return self.words[first], self.words[second]

    def question(self, key: Pair) -> list[int]:
        """The line up to the equals sign: the value comes next."""
        return [*self.head, *key, self.equals]

    def line(self, key: Pair, value: Pair) -> list[int]:
        """The whole line, ``LINE`` ids."""
        return [*self.question(key), *value, self.end]

    def plant(
        self, rng: np.random.Generator, text: np.ndarray, count: int
    ) -> tuple[np.ndarray, list[tuple[Pair, Pair]], list[int]]:
        """Writes ``count`` lines over the text, one anywhere in each of ``count`` equal parts.

        Args:
            rng: of keys, values and places.
            text: ``[T]`` ids, of at least ``count * LINE``.
            count: lines.

        Returns:
            The text with them, the pairs of key and value, and where each line begins.

        Raises:
            ValueError: too short a text.
        """
        part = len(text) // max(count, 1)
        if part < LINE:
            raise ValueError(f"Expected a text of at least {count * LINE} tokens for {count} facts, got {len(text)}")
        out = np.array(text)
        planted: list[tuple[Pair, Pair]] = []
        places: list[int] = []
        for number in range(count):
            key, value = self.draw(rng, [known for known, _ in planted])
            at = number * part + int(rng.integers(0, part - LINE + 1))
            out[at : at + LINE] = self.line(key, value)
            planted.append((key, value))
            places.append(at)
        return out, planted, places

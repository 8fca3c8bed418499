"""Text to token ids and back, also piece by piece while tokens arrive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmla.models.config.common import shown
from jmla.models.config.files import read_object

_BROKEN = "\ufffd"  # what decoders give for bytes that are not (yet) a character
_HELD = 3  # an unfinished UTF-8 character has at most three bytes


def _token_text(value: Any) -> str | None:
    """The text of a special token, which tokenizer_config.json writes as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class Tokenizer:
    """The tokenizer of a checkpoint directory (tokenizer.json, and tokenizer_config.json for the BOS rule)."""

    def __init__(self, path: str | Path):
        """Reads ``path/tokenizer.json``.

        Raises:
            ValueError: if it cannot be read as a tokenizer, or tokenizer_config.json says nothing usable.
        """
        import tokenizers

        file = Path(path) / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"Expected {file} to be a tokenizer of the tokenizers library: {error}") from error
        self._bos: int | None = None
        settings = Path(path) / "tokenizer_config.json"
        if settings.is_file():
            values = read_object(settings)
            add_bos = values.get("add_bos_token")
            if not isinstance(add_bos, bool | None):
                raise ValueError(f"Expected add_bos_token={shown(add_bos)} of {settings} to be true or false")
            if add_bos:
                text = _token_text(values.get("bos_token"))
                self._bos = self._tokenizer.token_to_id(text) if text is not None else None
                if self._bos is None:
                    raise ValueError(f"Expected {settings} with add_bos_token to name a bos_token of {file}")

    @classmethod
    def find(cls, path: str | Path) -> "Tokenizer | None":
        """The tokenizer of a directory, or None if it has no tokenizer.json."""
        return cls(path) if (Path(path) / "tokenizer.json").is_file() else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; begins with BOS if the checkpoint says so."""
        ids = self._tokenizer.encode(text).ids
        if self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class Detokenizer:
    """Gives the text of a growing token list in pieces; the pieces joined are ``tokenizer.decode`` of the whole list.

    A character whose bytes are spread over tokens is given when it is complete.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding restarts at the last but one place where the text ended in whole characters, not at the last one:
        # some decoders drop the blank in front of the very first token.
        self._start = 0
        self._clean = 0
        self._given = 0  # characters given since _start

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is now certain, often empty inside a character."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        body = text.rstrip(_BROKEN)
        certain = text[: max(len(body), len(text) - _HELD)]
        piece = certain[self._given :]
        self._given = max(self._given, len(certain))
        if len(body) == len(text) and piece:
            self._start, self._clean = self._clean, len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids[self._start :]))
        return piece

    def flush(self) -> str:
        """What is left at the end: broken characters as U+FFFD."""
        piece = self._tokenizer.decode(self._ids[self._start :])[self._given :]
        self._given += len(piece)
        return piece


class StopStrings:
    """Cuts a text that arrives in pieces before the first stop string, wherever the pieces are cut."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Adds a piece; returns the text that can be given, and whether a stop string was met.

        Text that may be the beginning of a stop string is held back.
        """
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        hold = next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def flush(self) -> str:
        """The text held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held

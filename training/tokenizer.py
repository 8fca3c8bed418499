"""The bundled model's tokenizer: byte-level BPE on the training text, and the text as token ids.

Pieces that merges never cross: a word with at most one sign or space before it; a single digit; a run of signs; line
ends with the indentation that follows them (so an indented line starts with one token); other white space. Every byte
is a token, so any text makes the round trip. A prompt that ends after a word, a number or a colon is cut where the
pieces are cut as well.

    python -m training.tokenizer [--corpus runs/corpus] [--vocab 1024] [--compare 768 1536]

Reads what training.corpus wrote, and writes tokenizer.json, tokenizer_config.json, train.bin and heldout.bin (uint16
ids, little-endian: end-of-sentence, then every document with an end-of-sentence after it) and stats.json.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import read_side

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
EOS_ID = 1
MARKS = (BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")  # ids 0 to 5
INVISIBLE = (BOS, EOS)  # left out of decoded text; the other marks are text that a reader may want to see
PIECES = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n *|\s+"
BATCH = 64


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids, marks and the 256 bytes included, which adds no token of its own accord.

    Raises ValueError when the vocabulary cannot hold the marks and the bytes, or the texts cannot fill it.
    """
    if not len(MARKS) + 256 <= vocab_size <= 1 << 16:
        raise ValueError(f"Expected {vocab_size=} to be from {len(MARKS) + 256} to {1 << 16}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(MARKS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"Expected the texts to fill {vocab_size=} tokens; they gave {tokenizer.get_vocab_size()}.")
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in INVISIBLE
    return Tokenizer.from_str(json.dumps(description))


def compact(tokenizer: Tokenizer) -> str:
    """tokenizer.json in the fewest bytes: no white space, and each merge as one string."""
    description = json.loads(tokenizer.to_str())
    merges = description["model"]["merges"]
    description["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return json.dumps(description, ensure_ascii=False, separators=(",", ":")) + "\n"


def configuration() -> dict:
    """tokenizer_config.json: which marks play which part, and that prompts get no begin-of-sentence."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
    }


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """How many bytes of text each id stands for, `[vocab]`; 0 for the marks."""
    lengths = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token in MARKS else len(token)  # byte-level: one character a byte
    return lengths


def stream(tokenizer: Tokenizer, documents: Sequence[bytes]) -> NDArray[np.uint16]:
    """The documents as one row of ids, an end-of-sentence first and after each.

    Raises ValueError when a document holds a mark as text, or its ids do not stand for exactly its bytes.
    """
    sizes = token_bytes(tokenizer)
    parts = [np.array([EOS_ID], np.uint16)]
    for start in range(0, len(documents), BATCH):
        batch = documents[start : start + BATCH]
        encodings = tokenizer.encode_batch_fast([document.decode() for document in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            ids = np.array(encoding.ids, np.uint16)
            if ids.size and ids.min() < len(MARKS):
                raise ValueError(
                    f"Expected no document to hold a mark {MARKS}; the one that starts {document[:60]!r} does."
                )
            if sizes[ids].sum() != len(document):
                raise ValueError(f"Expected ids to stand for all bytes of the document that starts {document[:60]!r}.")
            parts += [ids, parts[0]]
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer and turn the text into token ids.")
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--compare", type=int, nargs="*", default=[], help="other vocabulary sizes to measure")
    arguments = parser.parse_args()
    out = arguments.corpus
    sides = {side: read_side(out, side) for side in ("train", "heldout")}
    texts = [document.decode() for document in sides["train"]]
    size = sum(map(len, sides["heldout"]))

    def bytes_per_token(tokenizer: Tokenizer) -> float:
        return size / (len(stream(tokenizer, sides["heldout"])) - len(sides["heldout"]) - 1)

    tokenizer = train(texts, arguments.vocab)
    written = compact(tokenizer)
    (out / "tokenizer.json").write_text(written, encoding="utf-8")
    described = json.dumps(configuration(), ensure_ascii=False, indent=1)
    (out / "tokenizer_config.json").write_text(described + "\n", encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    stats: dict = {
        "vocab": arguments.vocab,
        "tokenizer_bytes": len(written.encode()),
        "tokenizer_sha256": hashlib.sha256(written.encode()).hexdigest(),
        "bytes_per_token": {arguments.vocab: bytes_per_token(tokenizer)},
    }
    for vocab in arguments.compare:
        stats["bytes_per_token"][vocab] = bytes_per_token(train(texts, vocab))
    for side, documents in sides.items():
        ids = stream(tokenizer, documents)
        ids.astype("<u2").tofile(out / f"{side}.bin")
        stats[side] = {
            "documents": len(documents),
            "bytes": sum(map(len, documents)),
            "tokens": len(ids),
            "sha256": hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest(),
        }
    (out / "stats.json").write_text(json.dumps(stats, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(stats, indent=1))


if __name__ == "__main__":
    main()

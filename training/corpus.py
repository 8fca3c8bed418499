"""The text that the bundled model learns from: the Python sources of CPython's own standard library.

The library is on every machine that can run jmla, is free to use (PSF-2.0; a few modules carry their own permissive
notices), and is one kind of text, so that a model of a few megabytes has a chance to learn it.

    python -m training.corpus [--lib DIR] [--out runs/corpus]

Writes train.txt and heldout.txt (documents one after the other, nothing between them) and corpus.json (interpreter
version, per document: path, bytes, sha256, side). The order and the split depend on the files alone: a document's side
comes from the hash of its content, so equal files land on one side.
"""

import argparse
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

LICENCE = "PSF-2.0"
HELDOUT_ONE_IN = 50

# Not the library's own text: installed packages, files that the build generated, and inputs of tests that are
# deliberately not Python 3 or not in the encoding that they declare.
SKIPPED = (
    "site-packages/*",
    "_sysconfigdata*",
    "lib2to3/tests/data/*",
    "test/test_lib2to3/data/*",
    "test/tokenizedata/bad*",
    "test/bad_coding*",
    "test/badsyntax*",
    "test/encoded_modules/*",
)
# Numbers and character escapes: a document that is mostly these is a table, whatever it is called.
NUMBERS = re.compile(rb"0[xX][0-9a-fA-F]+|\\x[0-9a-fA-F]{2}|\\[uU][0-9a-fA-F]{4,8}|[0-9]+")
TABLE_SHARE = 0.15
TABLE_MIN_BYTES = 4096


@dataclass(frozen=True)
class Document:
    """One source file: `path` relative to the library in POSIX form, its bytes, and their SHA-256 in hex."""

    path: str
    data: bytes
    sha256: str

    @property
    def heldout(self) -> bool:
        """Whether the document is kept from training; about one in HELDOUT_ONE_IN is."""
        return int(self.sha256[:8], 16) % HELDOUT_ONE_IN == 0


def is_table(path: str, data: bytes) -> bool:
    """Whether a file is a generated or data-like table: a character map, or numbers and escapes for the most part."""
    if path.startswith("encodings/") and b"decoding_table" in data:
        return True
    if len(data) < TABLE_MIN_BYTES:
        return False
    return sum(len(found) for found in NUMBERS.findall(data)) > TABLE_SHARE * len(data)


def documents(lib: Path) -> Iterator[Document]:
    """Every `*.py` under `lib` that teaches something, in the order of the paths; byte-identical repeats come once.

    Raises ValueError when `lib` is not a standard library.
    """
    if not (lib / "tokenize.py").is_file():
        raise ValueError(f"Expected {lib=} to be the standard library of a CPython, with tokenize.py in it.")
    seen: set[str] = set()
    for path in sorted(file.relative_to(lib).as_posix() for file in lib.rglob("*.py")):
        if any(fnmatch(path, pattern) for pattern in SKIPPED):
            continue
        data = (lib / path).read_bytes()
        if not data or is_table(path, data):
            continue
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if b"\0" in data:  # the byte model marks the start of a document with it
            continue
        digest = hashlib.sha256(data).hexdigest()
        if digest not in seen:
            seen.add(digest)
            yield Document(path, data, digest)


def build(lib: Path, out: Path) -> dict:
    """Writes the two texts and corpus.json into `out`, and returns what corpus.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    found = list(documents(lib))
    report: dict = {"python": sys.version.split()[0], "licence": LICENCE}
    for side, heldout in (("train", False), ("heldout", True)):
        texts = [document.data for document in found if document.heldout is heldout]
        text = b"".join(texts)
        (out / f"{side}.txt").write_bytes(text)
        report[side] = {"documents": len(texts), "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    report["files"] = [
        {"path": d.path, "bytes": len(d.data), "sha256": d.sha256, "side": "heldout" if d.heldout else "train"}
        for d in found
    ]
    (out / "corpus.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def read_side(out: Path, side: str) -> list[bytes]:
    """The documents of one side ("train" or "heldout") as `build` wrote them, in order.

    Raises ValueError when the text is not the one that corpus.json describes.
    """
    report = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    text = (out / f"{side}.txt").read_bytes()
    if hashlib.sha256(text).hexdigest() != report[side]["sha256"]:
        raise ValueError(f"Expected {side}.txt in {out} to be the text that corpus.json describes; build it again.")
    found, start = [], 0
    for file in report["files"]:
        if file["side"] == side:
            found.append(text[start : start + file["bytes"]])
            start += file["bytes"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the training text from a CPython's standard library.")
    parser.add_argument("--lib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--out", type=Path, default=Path("runs/corpus"))
    arguments = parser.parse_args()
    report = build(arguments.lib, arguments.out)
    for side in ("train", "heldout"):
        print(f"{side:8}", *(f"{name} {value}" for name, value in report[side].items()))


if __name__ == "__main__":
    main()

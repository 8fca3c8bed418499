"""The training text, its tokenizer, the byte 5-gram baseline, and the measures that need no model."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # training/ is not part of the installed package
    sys.path.insert(0, str(ROOT))

from training import corpus, evaluate, ngram, tokenizer  # noqa: E402

SOURCE = (ROOT / "training" / "corpus.py").read_text("utf-8") + (ROOT / "training" / "ngram.py").read_text("utf-8")
COLUMN = "".join(f"{n} 0x{n:04x}," for n in range(1000))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_str(tokenizer.compact(tokenizer.train([SOURCE], 400)))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    files = {
        "tokenize.py": b"x = 1\n",
        "b/again.py": b"x = 1\n",
        "b/one.py": "s = 'é'\n".encode(),
        "latin.py": b"s = '\xe9'\n",
        "nul.py": b"s = '\0'\n",
        "empty.py": b"",
        "numbers_.py": f"TABLE = [{COLUMN}]\n".encode(),
        "encodings/cp1.py": b"decoding_table = ()\n",
        "site-packages/other.py": b"y = 2\n",
        "test/badsyntax_1.py": b"print 1\n",
    } | {f"many/m{n}.py": f"value = {n}\n".encode() for n in range(300)}
    for name, data in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "lib"


def test_corpus_keeps_library_text_only(library: Path, tmp_path: Path) -> None:
    report = corpus.build(library, tmp_path / "out")
    kept = [file["path"] for file in report["files"]]
    assert kept == sorted(kept)
    assert [path for path in kept if not path.startswith("many/")] == ["b/again.py", "b/one.py"]
    assert report == corpus.build(library, tmp_path / "out")
    assert 0 < report["heldout"]["documents"] < 20
    sides = {side: corpus.read_side(tmp_path / "out", side) for side in ("train", "heldout")}
    assert not set(sides["train"]) & set(sides["heldout"])
    for side, texts in sides.items():
        assert [len(text) for text in texts] == [f["bytes"] for f in report["files"] if f["side"] == side]
    (tmp_path / "out" / "train.txt").write_bytes(b"another text")
    with pytest.raises(ValueError, match="build it again"):
        corpus.read_side(tmp_path / "out", "train")


def test_corpus_needs_a_library(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="standard library"):
        list(corpus.documents(tmp_path))


def test_tokenizer_marks(bpe: Tokenizer) -> None:
    assert [bpe.token_to_id(mark) for mark in tokenizer.MARKS] == list(range(6))
    assert bpe.get_vocab_size() == 400
    ids = bpe.encode("<｜User｜>a<think>").ids
    assert ids == [2, bpe.token_to_id("a"), 4]
    assert bpe.decode(ids) == "<｜User｜>a<think>"
    assert bpe.decode([0, *ids, 1]) == "<｜User｜>a<think>"
    assert bpe.encode("a").ids == ids[1:2]  # no begin-of-sentence by itself


def test_tokenizer_pieces(bpe: Tokenizer) -> None:
    assert bpe.encode("x = 1234\n").tokens[-5:] == ["1", "2", "3", "4", "Ċ"]
    assert "Ċ" + "Ġ" * 8 in bpe.encode("if x:\n        return x").tokens
    assert len(tokenizer.compact(bpe).encode()) < 60_000
    json.dumps(tokenizer.configuration())
    with pytest.raises(ValueError, match="vocab_size"):
        tokenizer.train([SOURCE], 261)
    with pytest.raises(ValueError, match="fill"):
        tokenizer.train(["abc"], 400)


@settings(max_examples=100, deadline=None)
@given(st.text().filter(lambda text: not any(mark in text for mark in tokenizer.MARKS)))
def test_tokenizer_round_trip(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text).ids
    assert bpe.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_bytes(bpe)[ids].sum() == len(text.encode())


def test_stream(bpe: Tokenizer) -> None:
    ids = tokenizer.stream(bpe, [b"a = 1\n", "é".encode()])
    assert ids.dtype == np.uint16
    assert [int(at) for at in np.flatnonzero(ids == tokenizer.EOS_ID)] == [
        0,
        1 + len(bpe.encode("a = 1\n").ids),
        len(ids) - 1,
    ]
    assert bpe.decode(ids.tolist()) == "a = 1\né"
    with pytest.raises(ValueError, match="</think>"):
        tokenizer.stream(bpe, [b"</think>"])


def test_grams() -> None:
    found = ngram.grams([b"ab", b"", b"c"], 3)
    assert [int(key).to_bytes(3, "big") for key in found] == [b"\0\0a", b"\0ab", b"\0\0c"]


@pytest.mark.parametrize("name", ngram.SMOOTHINGS)
def test_ngram_is_a_distribution(name: str) -> None:
    level, neighbours = ngram.SMOOTHINGS[name]
    levels = ngram.fit(ngram.grams([SOURCE.encode()]), level, neighbours)
    for context in (b"\0\0\0\0", b"self", b"e th", b"\xff\xfe\xfd\xfc", b"\xffurn"):
        keys = np.array([int.from_bytes(context + bytes([byte]), "big") for byte in range(256)], np.uint64)
        chance = [2.0 ** -ngram.bits_per_byte(levels, keys[byte : byte + 1]) for byte in range(256)]
        assert sum(chance) == pytest.approx(1.0, abs=1e-9)
        assert min(chance) > 0.0


def test_ngram_witten_bell_by_hand() -> None:
    """Order 2 on "aab": contexts NUL -> a, a -> a, b."""
    levels = ngram.fit(ngram.grams([b"aab"], 2), ngram.witten_bell, False, 2)
    unigram = (1 + 2 / 256) / (3 + 2)
    bigram = (1 + 2 * unigram) / (2 + 2)
    assert ngram.bits_per_byte(levels, ngram.grams([b"ab"], 2)[1:]) == pytest.approx(-math.log2(bigram))


def test_ngram_kneser_ney_counts_neighbours() -> None:
    """ "b" comes 50 times but after one byte only; "c" comes three times, after three."""
    keys = ngram.grams([b"ab" * 50 + b"xcyczc"], 2)
    for neighbours, b, c in ((True, 1, 3), (False, 50, 3)):
        seen, _ = ngram.fit(
            keys, lambda keys, counts: dict(zip(keys.tolist(), counts.tolist(), strict=True)), neighbours, 2
        )
        assert (seen[ord("b")], seen[ord("c")]) == (b, c)


def test_modified_discounts() -> None:
    """Counts of counts 4, 3, 2, 1: Y = 4 / 10, D1 = 1 - 2Y * 3/4, D2 = 2 - 3Y * 2/3, D3+ = 3 - 4Y * 1/2."""
    counts = np.array([1] * 4 + [2] * 3 + [3] * 2 + [4, 9])
    assert ngram.modified_discounts(counts) == pytest.approx([0.4] * 4 + [1.2] * 3 + [2.2] * 4)


def test_prompts_end_where_pieces_end(bpe: Tokenizer) -> None:
    """The prompt's pieces are those that prompt and continuation begin with, so that the cut is a natural one."""
    found = evaluate.prompts()
    assert len(found) == len(set(found)) == 50
    split = bpe.pre_tokenizer.pre_tokenize_str
    for prompt in found:
        pieces = split(prompt)
        for following in (" x", "\nx", "\n        x"):
            assert split(prompt + following)[: len(pieces)] == pieces, prompt
        assert evaluate.accepts(prompt)


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("def f(x):\n    return x\n", True, True),
        ("def f(x):\n    return", True, True),
        ("x = (1,\n     2", False, True),
        ('def f():\n    """Text that goes', False, True),
        ("x = 'cut he", False, True),
        ("x = 'cut he\n", False, False),
        ("x = 'cut he\ny = 1", False, False),
        ("x = f'cut {he", False, True),
        ("x = 1__0\ny = 2\n", False, False),
        ("the “quoted” word\n", False, False),
        ("if x:\n        y\n    z\n", False, False),
        ("x = 1\ufffd", False, True),
        ("price is $5\n", False, False),
        ("x = 1 + \\", False, True),
    ],
)
def test_accepts(text: str, strict: bool, lenient: bool) -> None:
    assert (evaluate.accepts(text), evaluate.accepts(text, strict=False)) == (strict, lenient)


def test_acceptance() -> None:
    assert evaluate.acceptance(["x\n", "(", "$", "'"]) == {"strict": 0.25, "lenient": 0.75}
    with pytest.raises(ValueError, match="at least one"):
        evaluate.acceptance([])


def test_bits_per_byte() -> None:
    sizes = np.array([0, 0, 1, 3])
    bits = evaluate.bits_per_byte([math.log(2), 9.0, 3 * math.log(2)], [2, 1, 3], sizes)
    assert bits == pytest.approx(1.0)
    with pytest.raises(ValueError, match="equal"):
        evaluate.bits_per_byte([1.0], [2, 3], sizes)
    with pytest.raises(ValueError, match="stands for text"):
        evaluate.bits_per_byte([1.0], [1], sizes)


@pytest.mark.parametrize(("count", "length", "context"), [(0, 4, 1), (1, 4, 1), (2, 4, 0), (17, 4, 0), (100, 8, 5)])
def test_windows_score_each_target_once(count: int, length: int, context: int) -> None:
    scored: list[int] = []
    for start, stop, first in evaluate.windows(count, length, context):
        assert stop - start <= length + 1
        assert not scored or first - start - 1 == context
        scored += range(first, stop)
    assert scored == list(range(1, count))
    with pytest.raises(ValueError, match="context"):
        list(evaluate.windows(10, 4, 4))

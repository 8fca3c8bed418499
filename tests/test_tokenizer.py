"""Text to ids and back; streaming without broken characters; stop strings across pieces."""

import random

import pytest
from tiny_text import EOS, write_tokenizer

from jmla.tokenizer import Detokenizer, StopStrings, Tokenizer

TEXTS = ["the quick brown fox", "naïve café — 你好, мир! 👩‍👩‍👧 🇫🇷", "  two  spaces\n\tand tabs ", "\ufffd kept", ""]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_pieces(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


def test_a_character_is_given_when_whole(tokenizer):
    ids = tokenizer.encode("👧!")
    stream = Detokenizer(tokenizer)
    assert len(ids) == 5
    assert [stream.push(token) for token in ids] == ["", "", "", "👧", "!"]


def test_random_tokens_give_what_decode_gives(tokenizer):
    """Bytes that are no UTF-8 at all, special tokens among them."""
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 60))]
        stream = Detokenizer(tokenizer)
        assert "".join(stream.push(token) for token in ids) + stream.flush() == tokenizer.decode(ids)


def test_special_tokens_are_left_out(tokenizer):
    ids = tokenizer.encode(f"the{EOS}dog")
    assert 1 in ids
    assert tokenizer.decode(ids) == "thedog"


def test_begin_token_follows_the_checkpoint(tmp_path):
    with_bos = Tokenizer(write_tokenizer(tmp_path / "a", add_bos=True))
    without = Tokenizer(write_tokenizer(tmp_path / "b", add_bos=False))
    assert with_bos.encode("dog") == [0, *without.encode("dog")]
    assert with_bos.encode("<|begin|>dog") == with_bos.encode("dog")
    assert Tokenizer.find(tmp_path) is None


@pytest.mark.parametrize("cut", range(1, 13))
def test_stop_string_over_any_cut(cut):
    text = "ab ENOUGH, ENDING now"
    stops = StopStrings(["END", "ENDING no"])
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    given, stopped = "", False
    for piece in pieces:
        piece, stopped = stops.push(piece)
        given += piece
        if stopped:
            break
    assert stopped
    assert given == "ab ENOUGH, "


def test_held_text_comes_out_in_the_end():
    stops = StopStrings(["</stop>"])
    assert stops.push("so it goes </st") == ("so it goes ", False)
    assert stops.push("ar") == ("</star", False)
    assert stops.push("</sto") == ("", False)
    assert stops.flush() == "</sto"
    assert StopStrings([]).push("all") == ("all", False)

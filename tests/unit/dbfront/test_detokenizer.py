"""Text comes whole characters at a time, and stops where it must."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fix_text import byte_tokenizer
from tierkv.dbfront.tokens.detokenizer import Cut, Detokenizer, StopStrings

BYTES = byte_tokenizer()


def decode_with(tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = decode_with(tokenizer)
    return [*(stream.push([i]) for i in ids), stream.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    text = text.replace("\ufffd", "")
    ids = BYTES.encode(text, add_special_tokens=False).ids
    parts = pieces(BYTES, ids)
    assert "".join(parts) == BYTES.decode(ids)
    assert not any("\ufffd" in part for part in parts)


def test_an_emoji_waits_for_its_last_byte() -> None:
    ids = BYTES.encode("a😀b", add_special_tokens=False).ids
    assert pieces(BYTES, ids) == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    ids = BYTES.encode("é", add_special_tokens=False).ids
    assert pieces(BYTES, ids[:1]) == ["", "\ufffd"]


def test_endless_garbage_is_shown_and_bounded() -> None:
    garbage = BYTES.encode("é", add_special_tokens=False).ids[1:] * 40
    parts = pieces(BYTES, garbage)
    assert max(len(part) for part in parts) <= 8
    assert "".join(parts) == BYTES.decode(garbage)


def test_spaces_of_a_sentencepiece_decoder_survive() -> None:
    words = {"▁one": 0, "▁two": 1, "▁": 2, "x": 3}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ids = [0, 1, 2, 3, 1, 2, 2, 0]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_show_nothing() -> None:
    ids = [2, *BYTES.encode("ok", add_special_tokens=False).ids, *[3] * 20, 70]
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids, skip_special_tokens=True)


def test_a_stop_string_over_two_pieces_is_cut() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert stops.push("to the E") == Cut("to the ")
    assert stops.push("N") == Cut("")
    assert stops.push("D of it") == Cut("", "END")


def test_what_only_began_like_a_stop_string_is_given_back() -> None:
    stops = StopStrings(["END"])
    assert stops.push("E") == Cut("")
    assert stops.push("AT") == Cut("EAT")
    assert stops.push("EN") == Cut("")
    assert stops.flush() == "EN"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
)
def test_cutting_piecewise_equals_cutting_the_whole(parts: list[str], stops: list[str]) -> None:
    whole = "".join(parts)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    stream = StopStrings(stops)
    shown = ""
    stopped = False
    for part in parts:
        cut = stream.push(part)
        shown += cut.text
        if cut.stop:
            stopped = True
            break
    else:
        shown += stream.flush()
    assert stopped == bool(found)
    # A shorter stop string may end an answer before an earlier, longer one is complete.
    assert shown == whole[: len(shown)]
    if not found:
        assert shown == whole
    else:
        assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize("stops", [(), ("",)])
def test_without_stop_strings_nothing_is_held(stops: tuple[str, ...]) -> None:
    assert StopStrings(stops).push("E") == Cut("E")

"""Bytes of single tokens, and the tokens that belong to the text a client has seen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fix_scheduler import make_info
from tests.fix_text import (
    Front,
    byte_tokenizer,
    running_front,
    text_call,
    text_model,
    write_model_folder,
)
from tierkv.compute import demo_model
from tierkv.dbfront.answer_token import AnswerToken, SpelledToken
from tierkv.dbfront.contracts import TextAnswer
from tierkv.dbfront.http.endpoints.openai import chat_logprobs, completion_logprobs
from tierkv.dbfront.tokens.detokenizer import TokenReport, TokenSpelling, byte_of
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import FinishReason, TokenLogprobs

DEMO = Path(demo_model.__file__).parent / "weights" / "tokenizer.json"


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    assert set(byte_of()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_of().values()) == list(range(256))


@pytest.mark.parametrize("text", ["plain words", "Größe 3 €\n", "日本語 🙂 \x00\t"])
@pytest.mark.parametrize("source", ["bytes", "demo"])
def test_spelled_tokens_are_the_text(text: str, source: str) -> None:
    tokenizer = byte_tokenizer() if source == "bytes" else Tokenizer.from_file(str(DEMO))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    spelling = TokenSpelling(tokenizer)
    assert b"".join(map(spelling.spell, ids)).decode().strip(" ") == text.strip(" ")
    assert spelling.spell(0) in (b"<s>", b"<pad>")
    assert spelling.spell(1_000_000) == b""


def test_pieces_of_sentencepiece_have_spaces_and_bytes() -> None:
    pieces = {"<unk>": 0, "<0xE2>": 1, "\u2581the": 2, "a\u2581b": 3, "x": 4}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    spelled = [TokenSpelling(tokenizer).spell(i) for i in range(1, 5)]
    assert spelled == [b"\xe2", b" the", b"a b", b"x"]


def test_the_tokens_of_a_character_come_with_it() -> None:
    tokenizer = byte_tokenizer()
    report = TokenReport(TokenSpelling(tokenizer))
    ids = tokenizer.encode("a€b", add_special_tokens=False).ids
    gained = [1, 0, 0, 1, 1]
    seen = []
    for token, chars in zip(ids, gained, strict=True):
        report.add(token, TokenLogprobs(-1.0), gained=chars)
        seen.append([(one.spelled, one.start) for one in report.shown(chars)])
    euro = [(bytes([byte]), 1) for byte in "€".encode()]
    assert seen == [[(b"a", 0)], [], [], euro, [(b"b", 2)]]


def test_bytes_that_are_no_character_have_a_place() -> None:
    """The text is U+FFFD and ``;``, both certain with the second token."""
    tokenizer = byte_tokenizer()
    report = TokenReport(TokenSpelling(tokenizer))
    euro, semicolon = tokenizer.encode("€;", add_special_tokens=False).ids[::3]
    for token, gained in ((euro, 0), (semicolon, 2)):
        report.add(token, TokenLogprobs(-1.0), gained=gained)
    assert [one.start for one in report.shown(2)] == [0, 1]


def test_text_that_is_held_back_holds_its_tokens_back() -> None:
    tokenizer = byte_tokenizer()
    report = TokenReport(TokenSpelling(tokenizer))
    for token in tokenizer.encode("abc", add_special_tokens=False).ids:
        report.add(token, TokenLogprobs(-1.0), gained=1)
    assert [one.spelled for one in report.shown(2)] == [b"a", b"b"]
    assert [one.spelled for one in report.rest()] == [b"c"]
    assert report.rest() == ()


async def asked(front: Front, **changes: Any) -> tuple[TextAnswer, list[AnswerToken]]:
    """Return an answer, and the tokens of its stream."""
    fields = {"prompt": "Say something", "max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    prepared = await front.generation.prepare(text_call(**(fields | changes)))
    answer = await front.generation.answer(prepared)
    streamed: list[AnswerToken] = []
    async for event in front.generation.stream(prepared):
        told = "".join(one.spelled.decode() for one in event.tokens)
        assert told == (event.text if prepared.call.logprobs is not None else "")
        streamed += event.tokens
    return answer, streamed


async def test_tokens_come_with_their_text_and_stop_with_it(tmp_path: Path) -> None:
    async with running_front(write_model_folder(tmp_path)) as front:
        whole, streamed = await asked(front)
        assert list(whole.tokens) == streamed and len(streamed) == 40
        assert "".join(one.spelled.decode() for one in whole.tokens) == whole.text
        assert [one.start for one in whole.tokens] == list(range(40))
        stop = whole.text[10:13]
        cut, streamed = await asked(front, stop=(stop,))
        assert cut.finish_reason is FinishReason.STOP
        assert list(cut.tokens) == streamed == list(whole.tokens[: len(cut.text)])
        held, _ = await asked(front, max_tokens=12, stop=(f"{whole.text[10:12]}!",))
        assert held.text == whole.text[:12] and held.tokens == whole.tokens[:12]
        silent, _ = await asked(front, logprobs=None)
        assert silent.tokens == () and silent.text == whole.text


async def test_stop_strings_count_behind_min_tokens(tmp_path: Path) -> None:
    async with running_front(write_model_folder(tmp_path)) as front:
        whole, _ = await asked(front)
        stop = whole.text[4]
        for least in (0, 5, 6, 20):
            found = whole.text.find(stop, least)
            want = whole.text if found < 0 else whole.text[:found]
            for logprobs in (None, 0):
                cut, _ = await asked(front, stop=(stop,), min_tokens=least, logprobs=logprobs)
                assert cut.text == want


@pytest.mark.parametrize("roles", [(NodeRole.COMPUTE,) * 2, (NodeRole.PREFILL, NodeRole.DECODE)])
async def test_each_token_is_told_once_over_all_nodes(
    tmp_path: Path, roles: tuple[NodeRole, ...]
) -> None:
    """A node that dies in the middle, and a handoff: the answer's report has no gap."""
    model = text_model(write_model_folder(tmp_path))
    infos = [make_info(f"n{i}", role=role, models=(model,)) for i, role in enumerate(roles)]
    async with running_front(tmp_path, infos[0]) as front:
        want, _ = await asked(front) if NodeRole.COMPUTE in roles else (None, None)
    async with running_front(tmp_path, *infos) as front:
        if NodeRole.COMPUTE in roles:
            for node in front.nodes.values():
                node.die_after = 12
        got, _ = await asked(front)
        assert "".join(one.spelled.decode() for one in got.tokens) == got.text
        assert len(got.tokens) == 40
        assert want is None or got.tokens == want.tokens
        assert len(front.node.seen) + len(list(front.nodes.values())[1].seen) > 2


def test_json_of_both_apis() -> None:
    top = (SpelledToken(b"\xe2", -0.5), SpelledToken(b"\xe3", -2.0), SpelledToken(b"x", -3.0))
    token = AnswerToken(b"\xe2\x82", -math.inf, top, start=4)
    told = chat_logprobs([token])["content"][0]
    assert (told["token"], told["bytes"], told["logprob"]) == ("\ufffd", [0xE2, 0x82], -9999.0)
    assert [one["bytes"] for one in told["top_logprobs"]] == [[0xE2], [0xE3], [ord("x")]]
    assert completion_logprobs([token]) == {
        "tokens": ["\ufffd"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"\ufffd": -0.5, "x": -3.0}],
        "text_offset": [4],
    }

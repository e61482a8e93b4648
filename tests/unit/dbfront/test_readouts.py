"""Labels, embeddings and schemas through the front over fake nodes: checks, walks, accounts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.fix_scheduler import EOS, chances, make_info
from tests.fix_text import Front, running_front, text_call, text_model, write_model_folder
from tierkv.dbfront.accounts.ended_call import CallEnd, ModelRequest
from tierkv.dbfront.contracts import Message, TextAnswer
from tierkv.dbfront.tokens.tokenizer import load_tokenizer
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ContextTooLongError, UdfArgumentError
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import FinishReason, HitTokens

TALK = (Message("user", "Is it good?"),)
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}, indent=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


async def answer(front: Front, **changes: object) -> TextAnswer:
    call = text_call(**{"messages": TALK} | changes)
    return await front.generation.answer(await front.generation.prepare(call))


def scored(prompt: tuple[int, ...], label: str, labels: tuple[str, ...], folder: Path) -> float:
    """A label's chance, letter by letter, among what the labels go on with; one token a letter."""
    token = load_tokenizer(folder).tokenizer.token_to_id
    ended = {name: f"{name}." for name in labels}
    chance = 1.0
    for depth, letter in enumerate(ended[label]):
        ways = {w[depth] for w in ended.values() if w[:depth] == label[:depth] and len(w) > depth}
        table = chances((*prompt, *(token(x) for x in label[:depth])))
        weight = {way: table[EOS if way == "." else token(way)] for way in ways}
        chance *= weight[letter] / sum(weight.values())
    return chance


@pytest.mark.parametrize(
    "labels",
    [("yes", "no"), ("no", "yes", "not"), ("aa", "ab", "a"), ("red", "green", "blue", "read")],
)
async def test_the_likeliest_label_and_the_chances_of_all(
    folder: Path, labels: tuple[str, ...]
) -> None:
    async with running_front(folder) as front:
        got = await answer(front, labels=labels)
        seen = front.node.seen
        prompt = seen[0].token_ids[: got.usage.prompt_tokens]
        want = {label: scored(prompt, label, labels, folder) for label in labels}
        assert got.text == max(want, key=want.__getitem__)
        assert got.label_probabilities[labels.index(got.text)] == pytest.approx(want[got.text])
        assert sum(got.label_probabilities) == pytest.approx(1.0)
        assert got.finish_reason is FinishReason.STOP
        assert len({request.request_id for request in seen}) == len(seen) <= len(labels) - 1
        assert all(request.token_ids[: len(prompt)] == prompt for request in seen)


async def test_different_first_tokens_take_one_request(folder: Path) -> None:
    async with running_front(folder) as front:
        front.node.hits = HitTokens(l1=5)
        records: list[ModelRequest] = []
        front.generation.reducers.append(records.append)
        got = await answer(front, labels=("yes", "no", "maybe"))
        (request,) = front.node.seen
        tokens = load_tokenizer(folder).tokenizer
        assert request.score_token_ids == tuple(tokens.token_to_id(c) for c in "ynm")
        assert got.usage.completion_tokens == 0 and got.usage.hit_tokens.l1 == 5
        assert got.usage.prompt_tokens == len(request.token_ids)
        (record,) = records
        assert record.end is CallEnd.STOP and record.usage == got.usage
        assert record.ttft_s > 0


async def test_the_prompt_counts_once_however_many_steps_there_are(folder: Path) -> None:
    async with running_front(folder) as front:
        front.node.hits = HitTokens(l1=5)
        got = await answer(front, labels=("aaab", "aaac", "b"))
        steps = front.node.seen
        assert [len(r.token_ids) - len(steps[0].token_ids) for r in steps] in ([0], [0, 3])
        assert got.usage.prompt_tokens == len(steps[0].token_ids)
        assert got.usage.hit_tokens == HitTokens(l1=5) and got.usage.completion_tokens == 0
        written = sum(len(r.token_ids) - len(r.token_ids) % 16 for r in steps)
        assert got.usage.written_tokens == written


async def test_one_label_is_the_answer_without_a_request(folder: Path) -> None:
    async with running_front(folder) as front:
        got = await answer(front, labels=("only",))
        assert (got.text, got.label_probabilities) == ("only", (1.0,))
        assert not front.node.seen and got.usage.prompt_tokens == 0


async def test_labels_stream_as_text_with_their_chances_at_the_end(folder: Path) -> None:
    async with running_front(folder) as front:
        prepared = await front.generation.prepare(text_call(messages=TALK, labels=("yes", "no")))
        first, last = [event async for event in front.generation.stream(prepared)]
        assert first.text in ("yes", "no") and first.finish_reason is None
        assert len(last.label_probabilities) == 2 and last.usage is not None


async def test_a_raw_prompt_goes_on_with_the_label_as_it_stands(folder: Path) -> None:
    async with running_front(folder) as front:
        await answer(front, messages=None, prompt="It is", labels=(" good", "bad"))
        tokens = load_tokenizer(folder).tokenizer
        (request,) = front.node.seen
        assert request.score_token_ids == (tokens.token_to_id("Ġ"), tokens.token_to_id("b"))


async def test_an_embedding_comes_without_text(folder: Path) -> None:
    infos = [
        make_info("p", role=NodeRole.PREFILL, models=(text_model(folder),)),
        make_info("d", role=NodeRole.DECODE, models=(text_model(folder),)),
    ]
    async with running_front(folder, *infos) as front:
        got = await answer(front, embed=True)
        assert (got.text, got.embedding, got.usage.completion_tokens) == ("", (0.6, 0.8), 0)
        assert not front.nodes[NodeId("d")].seen


async def test_a_schema_travels_in_short_form(folder: Path) -> None:
    async with running_front(folder) as front:
        await answer(front, json_schema=SCHEMA)
        assert front.node.seen[0].guide == json.dumps(json.loads(SCHEMA), separators=(",", ":"))


async def test_closing_a_walk_cancels_its_request(folder: Path) -> None:
    async with running_front(folder) as front:
        front.node.gate.clear()
        prepared = await front.generation.prepare(text_call(messages=TALK, labels=("yes", "no")))
        stream = front.generation.stream(prepared)
        pending = asyncio.ensure_future(anext(stream))
        while not front.node.running:
            await asyncio.sleep(0)
        pending.cancel()
        with pytest.raises(BaseException):  # noqa: B017 - CancelledError is no Exception.
            await pending
        assert not front.node.running and front.node.cancelled


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": ("yes", "no"), "embed": True}, "one of"),
        ({"labels": ("yes",), "json_schema": "{}"}, "one of"),
        ({"json_schema": SCHEMA, "stop": ("x",)}, "stop strings"),
        ({"json_schema": "["}, "no JSON"),
        ({"json_schema": "[]"}, "a list, not an object"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json_schema": '{"type": "string", "pattern": "(?=a)"}'}, "look-around"),
        ({"json_schema": '{"enum": ["%s"]}' % ("x" * limits.MAX_SCHEMA_CHARS)}, "limit"),
        ({"labels": ("yes", "yes")}, "twice"),
        ({"labels": ("yes", " ")}, "empty"),
        ({"labels": ("yes", " yes ")}, "the same"),
        ({"labels": tuple(map(str, range(limits.MAX_LABELS + 1)))}, "at most 1024"),
    ],
)
async def test_what_cannot_be_answered_is_refused_before_any_model_runs(
    folder: Path, changes: dict[str, object], reason: str
) -> None:
    async with running_front(folder) as front:
        with pytest.raises(UdfArgumentError, match=reason):
            await front.generation.prepare(text_call(**{"messages": TALK} | changes))
        assert not front.node.seen


async def test_labels_that_only_an_end_tells_apart_need_one(folder: Path) -> None:
    info = make_info(models=(text_model(folder, eos_token_ids=()),))
    async with running_front(folder, info) as front:
        with pytest.raises(UdfArgumentError, match="ends an answer"):
            await front.generation.prepare(text_call(messages=TALK, labels=("no", "not")))
        assert (await answer(front, labels=("no", "yes"))).text in ("no", "yes")


async def test_a_prompt_that_fills_the_context_needs_no_room_for_an_answer(folder: Path) -> None:
    async with running_front(folder) as front:
        fits = (await front.generation.prepare(text_call(messages=TALK, embed=True))).request
    model = text_model(folder, context_tokens=len(fits.token_ids))
    async with running_front(folder, make_info(models=(model,))) as front:
        assert (await answer(front, embed=True)).embedding
        assert (await answer(front, labels=("y", "n"))).text in ("y", "n")
        for changes in ({"embed": True, "messages": (Message("user", "Is it good? No."),)},
                        {"labels": ("aa", "ab")}):  # fmt: skip
            with pytest.raises(ContextTooLongError, match=str(len(fits.token_ids))):
                await answer(front, **changes)

"""Labels and embeddings of engines that answer in text only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fix_scheduler import make_info
from tests.fix_text import running_front, text_call, text_model, write_model_folder
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.generation.readouts import label_schema, most_label_tokens, read_label
from tierkv.kvcore.errors import FeatureNotSupportedError, RowLevelError, UdfArgumentError

LABELS = ("yes", "Yes", "no", 'say "no"')
TALK = (Message("user", "Is it good?"),)


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ('"Yes"', 1),
        ('"yes"', 0),
        (" no.\n", 2),
        ("NO", 2),
        ('"yes', 0),
        ('"say \\"no\\""', 3),
        ("yes", 0),
    ],
)
def test_a_label_is_read_with_its_quotes_or_without(said: str, number: int) -> None:
    assert read_label(said, LABELS) == number


@pytest.mark.parametrize("said", ["", "maybe", "3", '["yes"]', "yes and no"])
def test_what_is_no_label_is_an_error_of_the_row(said: str) -> None:
    with pytest.raises(RowLevelError, match="none of the labels"):
        read_label(said, LABELS)


def test_an_answer_that_was_cut_is_no_label() -> None:
    with pytest.raises(RowLevelError, match="none of the labels"):
        read_label('"no', ("no", "nothing"), cut=True)


def test_the_schema_and_the_room_fit_every_label() -> None:
    schema = json.loads(label_schema(LABELS))
    assert schema == {"type": "string", "enum": list(LABELS)}
    call = text_call(messages=TALK, labels=LABELS)
    assert most_label_tokens(call) > max(len(json.dumps(label)) for label in LABELS)


async def test_the_engine_is_held_to_the_labels(tmp_path: Path) -> None:
    model = text_model(write_model_folder(tmp_path), score_refusal="text only")
    async with running_front(tmp_path, make_info("c1", models=(model,))) as front:
        call = text_call(messages=TALK, labels=("yes", "no"), temperature=0.7, max_tokens=1)
        prepared = await front.generation.prepare(call)
        request = prepared.request
        assert json.loads(request.guide)["enum"] == ["yes", "no"]
        assert request.score_token_ids == () and request.sampling.temperature == 0.0
        assert request.sampling.max_tokens == most_label_tokens(call)
        with pytest.raises(RowLevelError, match="none of the labels"):
            await front.generation.answer(prepared)  # This node heeds no schema.
        with pytest.raises(UdfArgumentError, match="given twice"):
            await front.generation.prepare(text_call(messages=TALK, labels=("a", "a")))


async def test_an_embedding_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = text_model(write_model_folder(tmp_path), embed_refusal="it gives none")
    async with running_front(tmp_path, make_info("c1", models=(model,))) as front:
        with pytest.raises(FeatureNotSupportedError, match="no embeddings: it gives none"):
            await front.generation.prepare(text_call(prompt="abc", embed=True))
        assert not front.node.seen

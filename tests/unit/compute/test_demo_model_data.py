"""Tests of the demo model's synthetic data: deterministic, truthful and split by name."""

from __future__ import annotations

import random

import pytest

from tierkv.compute.demo_model import data, dialogue, notes, phrasings, words
from tierkv.compute.demo_model.phrasings import INSTRUCTION, Head, make_head


def _conversations(count: int, progress: float) -> list[dialogue.TrainingDialogue]:
    rng = random.Random(5)
    return [data.sample_conversation(rng, make_head(rng, 0.5), progress) for _ in range(count)]


def test_records_depend_on_the_seed_only() -> None:
    assert data.make_records(20, 3) == data.make_records(20, 3)
    assert data.make_records(20, 3) != data.make_records(20, 4)
    assert data.make_records(20, 3)[:5] == data.make_records(5, 3)


def test_record_states_its_facts() -> None:
    for record in data.make_records(100, 1):
        for value in (record.name, record.city, record.job, record.product, record.order):
            assert value in record.text
        assert record.plan in record.text
        assert record.review in record.text
        assert record.category == words.CATEGORY_OF[record.product]
        assert record.sentiment in words.SENTIMENTS
        assert record.topic in words.TOPICS


def test_record_has_a_realistic_length_and_a_new_number() -> None:
    records = data.make_records(200, 2)
    lengths = [len(record.text.split()) for record in records]
    assert min(lengths) > 50
    assert max(lengths) < 180
    assert [record.record_id for record in records] == list(range(1, 201))


def test_labels_of_the_records_are_balanced() -> None:
    records = data.make_records(400, 0)
    positive = sum(record.sentiment == "positive" for record in records)
    assert 150 < positive < 250
    assert {record.topic for record in records} == set(words.TOPICS)
    assert {record.category for record in records} == set(words.CATEGORIES)


def test_demo_names_never_stand_in_training_data() -> None:
    held_out = {record.name for record in data.make_records(300, 0)}
    trained = {
        note.name
        for progress in (0.1, 0.5, 0.9)
        for conversation in _conversations(150, progress)
        for note in conversation.documents
        if note.name
    }
    assert all(notes.is_held_out(name) for name in held_out)
    assert not any(notes.is_held_out(name) for name in trained)
    assert not held_out & trained


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.95])
def test_answers_follow_from_the_documents(progress: float) -> None:
    for conversation in _conversations(150, progress):
        for turn in conversation.turns:
            note = conversation.documents[turn.document]
            assert turn.evidence in note.text
            if turn.answer in ("yes", "no"):
                continue
            stated = turn.answer in note.text
            label = turn.answer in {*words.TOPICS, *words.SENTIMENTS, *words.CATEGORIES}
            assert stated or label
            assert turn.answer in {*note.facts.values(), note.text}


def test_follow_up_stands_behind_the_note_with_its_name() -> None:
    seen = 0
    for conversation in _conversations(300, 0.5):
        for before, note in zip(conversation.documents, conversation.documents[1:], strict=False):
            if note.follow_up:
                seen += 1
                assert before.name == note.name
                assert note.name not in note.text
    assert seen > 20


def test_names_of_a_conversation_differ_in_every_part() -> None:
    names = notes.make_names(random.Random(0), 14, novel=0.3)
    parts = [part for name in names for part in name.split()]
    assert len(parts) == len(set(parts)) == 28


def test_messages_hold_instruction_documents_and_question() -> None:
    rng = random.Random(0)
    note = data.full_note(rng, "Vito Adams")
    turns = dialogue.single_turns(rng, note, 3)
    conversation = dialogue.TrainingDialogue(
        Head("Be brief.", INSTRUCTION), (note,), tuple(turns), ("Question: ", "", "")
    )
    messages = conversation.messages()
    roles = [message["role"] for message in messages]
    assert roles == ["system"] + ["user", "assistant"] * 3
    expected = f"{INSTRUCTION}\n{note.text}\nQuestion: {turns[0].question}"
    assert messages[1]["content"] == expected


def test_prompt_of_a_record_is_instruction_record_and_question() -> None:
    record = data.make_records(1, 0)[0]
    prompt = data.make_prompt(record, "City?")
    assert prompt == f"{INSTRUCTION}\n{record.text}\nQuestion: City?"


def test_every_kind_of_question_has_several_phrasings() -> None:
    for bank in (phrasings.ASK, phrasings.CHECK):
        for kind, variants in bank.items():
            assert len(set(variants)) >= 4, kind


def test_probes_are_deterministic_and_complete() -> None:
    probes = data.make_probes(data.PROBE_TASKS, 4, 9)
    assert probes == data.make_probes(data.PROBE_TASKS, 4, 9)
    assert [probe.task for probe in probes] == [t for t in data.PROBE_TASKS for _ in range(4)]
    for probe in probes:
        assert probe.messages[-1]["role"] == "user"
        if probe.task in data.SINGLE_TASKS:
            assert len(probe.messages) == 1
            assert probe.messages[0]["content"].startswith(INSTRUCTION)


def test_chats_have_ten_turns() -> None:
    for chat in data.make_chats(5, 0):
        assert len(chat.turns) == 10
        assert sum(message["role"] == "user" for message in chat.messages()) == 10


def test_articles_fit_the_next_word() -> None:
    assert notes.with_articles("She is a actor on a plan.") == "She is an actor on a plan."

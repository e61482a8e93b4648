"""Public data of the demo model: records for a table, training conversations, and test probes.

All data is made from a seed, with the standard library only. Names in `make_records`, `make_chats`
and `make_probes` never occur in training; training conversations come from `sample_conversation`,
whose mixture changes with the progress of the training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.compute.demo_model import dialogue, notes, phrasings
from tierkv.compute.demo_model.dialogue import TrainingDialogue
from tierkv.compute.demo_model.notes import Note
from tierkv.compute.demo_model.phrasings import INSTRUCTION, SHORT, Head

__all__ = [
    "INSTRUCTION",
    "PROBE_TASKS",
    "CustomerRecord",
    "Probe",
    "make_chats",
    "make_probes",
    "make_prompt",
    "make_records",
    "sample_conversation",
]

SINGLE_TASKS = (
    "lookup",
    "extract",
    "sentiment",
    "topic",
    "category",
    "review_filter",
    "fact_filter",
)
CHAT_TASKS = (
    "chat_lookup",
    "chat_sentiment",
    "chat_topic",
    "chat_category",
    "chat_review_filter",
    "chat_fact_filter",
    "cross_document",
)
PROBE_TASKS = SINGLE_TASKS + CHAT_TASKS


@dataclass(frozen=True)
class CustomerRecord:
    """One row of the demo table: the note as text and the facts in the note.

    Attributes:
        record_id: Number of the record, counted from 1.
        text: The note, as used in a prompt.
        review: The review within the note.
        name: The customer's name.
        city: The customer's home.
        job: The customer's job.
        product: The product that the customer bought.
        order: The order number.
        plan: The customer's plan.
        category: Kind of the product (not stated in the note).
        sentiment: Sentiment of the review, `positive` or `negative`.
        topic: Topic of the review.
    """

    record_id: int
    text: str
    review: str
    name: str
    city: str
    job: str
    product: str
    order: str
    plan: str
    category: str
    sentiment: str
    topic: str


@dataclass(frozen=True)
class Probe:
    """One held-out test.

    Attributes:
        task: Name of the task, from `PROBE_TASKS`.
        messages: Chat messages that end with a user message.
        answer: The exact answer.
    """

    task: str
    messages: tuple[dict[str, str], ...]
    answer: str


def full_note(rng: random.Random, name: str) -> Note:
    """Write a note of the demo's length, with all fields, remarks and a review."""
    facts = notes.sample_facts(rng, phrasings.FIELDS, review=True)
    return notes.write_note(rng, name, facts, fillers=rng.randint(3, 5), review_length=2)


def make_records(count: int, seed: int = 0) -> list[CustomerRecord]:
    """Make the records of the demo table.

    Args:
        count: Number of records.
        seed: The same seed always makes the same records.

    Returns:
        Records of customers with names that were held out of the training.
    """
    rng = random.Random(seed)
    found: list[CustomerRecord] = []
    for number in range(1, count + 1):
        note = full_note(rng, notes.make_names(rng, 1, held_out=True)[0])
        found.append(CustomerRecord(number, note.text, note.review, **note.facts))
    return found


def make_prompt(record: CustomerRecord, question: str, instruction: str = INSTRUCTION) -> str:
    """Return the single user message that a SQL query sends for a record."""
    return f"{instruction}\n{record.text}\nQuestion: {question}"


def make_documents(
    rng: random.Random,
    people: int,
    fields: tuple[int, int],
    review: float,
    fillers: int,
    follow_up: float,
    held_out: bool = False,
) -> list[Note]:
    """Write the notes of several customers.

    Args:
        rng: Source of randomness.
        people: Number of customers.
        fields: Least and greatest number of stated fields per note.
        review: Share of notes with a review.
        fillers: Greatest number of remarks per note.
        follow_up: Share of notes that are followed by a note without the name.
        held_out: Whether to use held-out names.

    Returns:
        The notes, each follow-up right after its first note.
    """
    found: list[Note] = []
    for name in notes.make_names(rng, people, held_out, 0.0 if held_out else 0.1):
        chosen = rng.sample(phrasings.FIELDS, rng.randint(*fields))
        with_review = rng.random() < review
        facts = notes.sample_facts(rng, chosen, with_review)
        length = rng.randint(1, 2) if with_review else 0
        found.append(notes.write_note(rng, name, facts, rng.randint(0, fillers), length))
        if rng.random() < follow_up:
            linked = rng.sample(phrasings.LINKED_FIELDS, rng.randint(1, 3))
            facts = notes.sample_facts(rng, linked, review=False)
            found.append(notes.write_follow_up(rng, name, facts))
    return found


def _sample_single(rng: random.Random, head: Head, full: bool) -> TrainingDialogue:
    name = notes.make_names(rng, 1, novel=0.1)[0]
    if full:
        note = full_note(rng, name)
    elif rng.random() < 0.15:
        facts = notes.sample_facts(rng, ("product",), review=True)
        review, key = notes.write_review(
            rng, facts["product"], facts["sentiment"], facts["topic"], rng.randint(1, 2)
        )
        labels = {"sentiment": facts["sentiment"], "topic": facts["topic"]}
        note = Note("", labels, review, dict.fromkeys(labels, key), review)
    else:
        review_too = rng.random() < 0.7
        facts = notes.sample_facts(rng, rng.sample(phrasings.FIELDS, rng.randint(1, 5)), review_too)
        length = rng.randint(1, 2) if review_too else 0
        note = notes.write_note(rng, name, facts, rng.randint(0, 1), length)
    turns = dialogue.single_turns(rng, note, rng.randint(8, 20))
    return dialogue.make_conversation(rng, head, [note], turns, rng.random() < 0.08)


def sample_conversation(rng: random.Random, head: Head, progress: float) -> TrainingDialogue:
    """Draw a training conversation.

    Args:
        rng: Source of randomness.
        head: System prompt and instruction to use.
        progress: Finished share of the training, from 0 to 1; texts grow with the progress.

    Returns:
        A conversation of 8 to 22 turns.
    """
    kind, early = rng.random(), progress < 0.35
    if kind < (0.3 if early else 0.45):
        return _sample_single(rng, head, full=rng.random() < (0.15 if early else 0.6))
    follow_up = 0.6 if kind > 0.75 else 0.0
    if early:
        documents = make_documents(rng, rng.randint(2, 4), (1, 2), 0.15, 0, follow_up)
        lookup, quote = 0.8, 0.15
    elif progress > 0.7 and rng.random() < 0.05:
        documents = make_documents(rng, rng.randint(6, 14), (2, 5), 0.8, 3, follow_up)
        lookup, quote = 0.6, 0.0
    else:
        documents = make_documents(rng, rng.randint(2, 5), (1, 5), 0.5, 1, follow_up)
        lookup, quote = 0.6, 0.02
    turns = dialogue.chat_turns(rng, documents, rng.randint(10, 22), lookup, quote)
    return dialogue.make_conversation(rng, head, documents, turns)


def make_chats(count: int, seed: int = 0, turns: int = 10) -> list[TrainingDialogue]:
    """Make held-out chats of several turns about three or four notes."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        documents = make_documents(rng, rng.randint(3, 4), (3, 5), 0.7, 1, 0.3, held_out=True)
        questions = dialogue.chat_turns(rng, documents, turns, 0.5, 0.0)
        head = Head("", rng.choice(SHORT))
        found.append(dialogue.make_conversation(rng, head, documents, questions))
    return found


def make_probes(tasks: Sequence[str], count: int, seed: int = 0) -> list[Probe]:
    """Make held-out tests.

    Args:
        tasks: Tasks of `PROBE_TASKS`. One-document tasks have the form of a SQL query's prompt,
            with `INSTRUCTION`; chat tasks ask in the tenth turn of a chat.
        count: Number of probes per task.
        seed: The same seed always makes the same probes.

    Returns:
        The probes, task by task.
    """
    rng = random.Random(f"probes {seed}")
    found: dict[str, list[Probe]] = {task: [] for task in tasks}
    while any(len(probes) < count for probes in found.values()):
        if any(len(found.get(task, ())) < count for task in SINGLE_TASKS if task in found):
            note = full_note(rng, notes.make_names(rng, 1, held_out=True)[0])
            turn = dialogue.single_turns(rng, note, 1)[0]
            content = f"{INSTRUCTION}\n{note.text}\nQuestion: {turn.question}"
            probe = Probe(turn.task, ({"role": "user", "content": content},), turn.answer)
        else:
            chat = make_chats(1, rng.randrange(2**32))[0]
            probe = Probe(chat.turns[-1].task, tuple(chat.messages()[:-1]), chat.turns[-1].answer)
        if len(found.get(probe.task, range(count))) < count:
            found[probe.task].append(probe)
    return [probe for task in tasks for probe in found[task]]

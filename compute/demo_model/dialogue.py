"""Questions about notes, and conversations of many turns made from the questions.

A conversation is a head (system prompt and instruction), one or more notes and a list of turns. The
first user message holds everything up to the first question, like the prompt of a SQL query. One
conversation supervises many answers, which makes training cheap.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.compute.demo_model import notes, phrasings, words
from tierkv.compute.demo_model.notes import Note
from tierkv.compute.demo_model.phrasings import Head

LABEL_FIELDS = ("sentiment", "topic", "category")
CHECK_FIELDS = (
    "city",
    "job",
    "product",
    "plan",
    "topic",
    "category",
    *("sentiment",) * 4,
)
CHOICES: dict[str, tuple[str, ...]] = {
    **notes.VALUES,
    "topic": words.TOPICS,
    "category": tuple(words.CATEGORIES),
}


@dataclass(frozen=True)
class DialogueTurn:
    """One question with its answer.

    Attributes:
        task: Name of the kind of question, for evaluation.
        question: The question itself.
        answer: The exact answer.
        document: Index of the document that decides the answer.
        evidence: The deciding words of the document.
        name: The name (or first name) in the question, or an empty string.
        asked: In a yes/no question, the word of the question to compare with the evidence.
    """

    task: str
    question: str
    answer: str
    document: int
    evidence: str
    name: str = ""
    asked: str = ""


@dataclass(frozen=True)
class TrainingDialogue:
    """Documents and turns of one training example.

    Attributes:
        head: System prompt and instruction.
        documents: The notes in the order of the prompt.
        turns: Questions and answers.
        prefixes: Text before each question, for example `Question: `.
        separator: Text between the parts of the first user message.
        question_first: Whether the first question stands before the documents.
    """

    head: Head
    documents: tuple[Note, ...]
    turns: tuple[DialogueTurn, ...]
    prefixes: tuple[str, ...]
    separator: str = "\n"
    question_first: bool = False

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as chat messages, every answer included."""
        found = [{"role": "system", "content": self.head.system}] if self.head.system else []
        for index, turn in enumerate(self.turns):
            text = self.prefixes[index] + turn.question
            if index == 0:
                body = [note.text for note in self.documents]
                parts = [text, *body] if self.question_first else [*body, text]
                first = [self.head.instruction] if self.head.instruction else []
                text = self.separator.join(first + parts)
            found.append({"role": "user", "content": text})
            found.append({"role": "assistant", "content": turn.answer})
        return found


def _who(rng: random.Random, note: Note, alone: bool) -> tuple[str, str]:
    """Return how a question refers to the customer, and the name in this reference if any."""
    if alone and (not note.name or rng.random() < 0.7):
        return "the customer", ""
    name = note.name if rng.random() < 0.75 else note.name.split()[0]
    return name, name


def _fill(rng: random.Random, template: str, who: str, name: str, **values: str) -> str:
    review = "the review"
    if name:
        review = rng.choice((f"the review of {name}", f"{name}'s review"))
    return notes.with_articles(template.format(w=who, r=review, **values))


def _hint(rng: random.Random, question: str, hints: Sequence[str]) -> str:
    return f"{question} {rng.choice(hints)}" if rng.random() < 0.12 else question


def _task(note: Note, field: str, alone: bool) -> str:
    kind = field if field in LABEL_FIELDS else "lookup"
    if note.follow_up:
        return "cross_document"
    return kind if alone else f"chat_{kind}"


def ask(rng: random.Random, note: Note, document: int, field: str, alone: bool) -> DialogueTurn:
    """Ask for a field or label of a note.

    Args:
        rng: Source of randomness.
        note: The note that states the field or label.
        document: Index of the note in the conversation.
        field: A key of `note.facts`.
        alone: Whether the note is the only note, so that "the customer" is clear.

    Returns:
        The turn.
    """
    answer, evidence = note.facts[field], note.evidence[field]
    if alone and field in phrasings.EXTRACT_NAMES and rng.random() < 0.4:
        called = rng.choice(phrasings.EXTRACT_NAMES[field])
        text = rng.choice(phrasings.EXTRACT).format(f=called, F=called.capitalize())
        task = field if field in LABEL_FIELDS else "extract"
        return DialogueTurn(task, _hint(rng, text, phrasings.ASK_HINTS), answer, document, evidence)
    who, name = _who(rng, note, alone)
    template = rng.choice(phrasings.ASK[field])
    if "{r}" not in template and "{w}" not in template:
        name = ""
    text = _hint(rng, _fill(rng, template, who, name), phrasings.ASK_HINTS)
    return DialogueTurn(_task(note, field, alone), text, answer, document, evidence, name)


def check(
    rng: random.Random, note: Note, document: int, field: str, others: Sequence[Note]
) -> DialogueTurn:
    """Ask a yes/no question about a field or label; half of the answers are `no`."""
    alone = not others
    who, name = _who(rng, note, alone)
    truth, yes = note.facts[field], rng.random() < 0.5
    if field == "sentiment":
        kind = truth if yes else next(s for s in words.SENTIMENTS if s != truth)
        text = _fill(rng, rng.choice(phrasings.CHECK[kind]), who, name)
        asked = next(word for word in phrasings.POLAR if word in text.rstrip("?").split())
    else:
        value = truth
        if not yes:
            near = [o.facts[field] for o in others if o.facts.get(field, truth) != truth]
            far = [v for v in CHOICES[field] if v != truth]
            value = rng.choice(near) if near and rng.random() < 0.4 else rng.choice(far)
        text = _fill(rng, rng.choice(phrasings.CHECK[field]), who, name, v=value)
        asked = value
    text = _hint(rng, text, phrasings.CHECK_HINTS)
    task = "review_filter" if field in ("sentiment", "topic", "category") else "fact_filter"
    task = task if alone else f"chat_{task}"
    answer = "yes" if yes else "no"
    return DialogueTurn(task, text, answer, document, note.evidence[field], name, asked)


def single_turns(rng: random.Random, note: Note, count: int) -> list[DialogueTurn]:
    """Draw questions about the only note of a prompt."""
    checks = [field for field in CHECK_FIELDS if field in note.facts]
    labels = [field for field in LABEL_FIELDS if field in note.facts]
    turns: list[DialogueTurn] = []
    for _ in range(count):
        kind = rng.random()
        if checks and kind < 0.45:
            turns.append(check(rng, note, 0, rng.choice(checks), ()))
        elif labels and kind < 0.65:
            turns.append(ask(rng, note, 0, rng.choice(labels), True))
        else:
            turns.append(ask(rng, note, 0, rng.choice(list(note.evidence)), True))
    return turns


def chat_turns(
    rng: random.Random, documents: Sequence[Note], count: int, lookup: float, quote: float
) -> list[DialogueTurn]:
    """Draw questions about several notes.

    Args:
        rng: Source of randomness.
        documents: The notes.
        count: Number of questions.
        lookup: Share of questions for a stated field; the rest are for labels or yes/no questions.
        quote: Share of questions that ask to repeat a note (dense supervision for copying).

    Returns:
        The turns.
    """
    turns: list[DialogueTurn] = []
    while len(turns) < count:
        index = rng.randrange(len(documents))
        note = documents[index]
        stated = [f for f in note.evidence if f not in LABEL_FIELDS and f != "name"]
        checks = [f for f in CHECK_FIELDS if f in note.facts and not note.follow_up]
        labels = [f for f in LABEL_FIELDS if f in note.facts]
        if rng.random() < quote and not note.follow_up:
            text = f"Repeat the note about {note.name}."
            turns.append(DialogueTurn("quote", text, note.text, index, note.name, note.name))
        elif stated and (rng.random() < lookup or not checks):
            turns.append(ask(rng, note, index, rng.choice(stated), False))
        elif labels and rng.random() < 0.4:
            turns.append(ask(rng, note, index, rng.choice(labels), False))
        elif checks:
            others = [n for n in documents if n is not note and not n.follow_up]
            turns.append(check(rng, note, index, rng.choice(checks), others))
    return turns


def make_conversation(
    rng: random.Random,
    head: Head,
    documents: Sequence[Note],
    turns: Sequence[DialogueTurn],
    question_first: bool = False,
) -> TrainingDialogue:
    """Put a conversation together, with natural variation in the joints between its parts."""
    first = rng.choice(("Question: ", "Question: ", "Question: ", ""))
    later = rng.choice(("Question: ", "", ""))
    prefixes = (first, *[later] * (len(turns) - 1))
    separator = rng.choice(("\n", "\n", "\n", "\n\n", " "))
    return TrainingDialogue(
        head, tuple(documents), tuple(turns), prefixes, separator, question_first
    )

"""Synthetic customer notes: the facts about one customer and the text that states the facts.

A note begins with the customer's name, then states facts as a form or as sentences. Remarks of the
agent and a review may follow. A hash splits names into a training part and a part held out for
evaluation and for the demo.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.compute.demo_model import phrasings, words

HOURS = ("eight", "nine", "ten", "eleven")
VALUES: dict[str, tuple[str, ...]] = {
    "city": words.CITY,
    "job": words.JOB,
    "product": words.PRODUCT,
    "plan": words.PLAN,
    "born": words.CITY,
    "pet": words.PET,
    "color": words.COLOR,
    "drink": words.DRINK,
}


@dataclass(frozen=True)
class Note:
    """One document.

    Attributes:
        name: The customer's name; a follow-up does not state the name.
        facts: Value of each field or label (for example `city` or `sentiment`).
        text: The document itself.
        evidence: The words of the text that state each field (for a label, the deciding phrase of
            the review).
        review: The review within the text, or an empty string.
        follow_up: True when the note says "this customer" and the name stands in the note before.
    """

    name: str
    facts: dict[str, str]
    text: str
    evidence: dict[str, str]
    review: str = ""
    follow_up: bool = False


def is_held_out(name: str) -> bool:
    """Return whether a name is kept out of the training data (one in five)."""
    return zlib.crc32(name.encode()) % 5 == 0


def _one_name(rng: random.Random, novel: float) -> str:
    if rng.random() < novel:
        syllables = [rng.choice(words.SYLLABLES) for _ in range(rng.randint(2, 3))]
        return f"{''.join(syllables).capitalize()} {rng.choice(words.LAST)}"
    return f"{rng.choice(words.FIRST)} {rng.choice(words.LAST)}"


def make_names(
    rng: random.Random, count: int, held_out: bool = False, novel: float = 0.0
) -> list[str]:
    """Return customer names that share neither a first nor a last name.

    Args:
        rng: Source of randomness.
        count: Number of names, at most the number of last names.
        held_out: Whether to take held-out names; otherwise take training names.
        novel: Share of first names that are made of syllables.

    Returns:
        The names, each with a first and a last name.
    """
    names: list[str] = []
    seen: set[str] = set()
    while len(names) < count:
        name = _one_name(rng, novel)
        parts = set(name.split())
        if is_held_out(name) == held_out and not parts & seen:
            names.append(name)
            seen |= parts
    return names


def pick_value(rng: random.Random, field: str) -> str:
    """Return a random value of a field; an order number has four digits."""
    return str(rng.randint(1000, 9999)) if field == "order" else rng.choice(VALUES[field])


def with_articles(text: str) -> str:
    """Write `an` in place of `a` before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def write_review(
    rng: random.Random, item: str, sentiment: str, topic: str, length: int
) -> tuple[str, str]:
    """Write a review.

    Args:
        rng: Source of randomness.
        item: The product.
        sentiment: `positive` or `negative`.
        topic: A topic of `words.TOPICS`.
        length: Number of sentences that decide the topic; neutral sentences are added.

    Returns:
        The review, and the first sentence of the review that decides the topic.
    """
    good, bad = rng.choice(words.GOOD), rng.choice(words.BAD)
    chosen = rng.sample(words.PHRASES[topic, sentiment], length)
    parts = [with_articles(s.format(item=item, good=good, bad=bad)) for s in chosen]
    key = parts[0]
    if rng.random() < 0.6:
        parts.insert(rng.randint(0, len(parts)), rng.choice(words.GENERAL[sentiment]))
    for sentence in rng.sample(words.NEUTRAL, rng.randint(0, length)):
        place = rng.randint(0, len(parts))
        parts.insert(
            place, sentence.format(month=rng.choice(words.MONTH), day=rng.choice(words.DAY))
        )
    return " ".join(parts), key


def _form(rng: random.Random, name: str, facts: Sequence[tuple[str, str]]) -> str:
    start = rng.choice(("Customer", "Name"))
    items = [f"{rng.choice(phrasings.LABELS[field])}: {value}." for field, value in facts]
    return " ".join([f"{start}: {name}.", *items])


def _prose(rng: random.Random, name: str, facts: Sequence[tuple[str, str]]) -> str:
    start = rng.choice(("Note from {n}.", "Customer {n} called.", "Call with {n}.", "About {n}."))
    parts = [start.format(n=name)]
    for field, value in facts:
        subject = rng.choice(("The customer", "This customer", "The caller", name))
        parts.append(with_articles(rng.choice(phrasings.SAY[field]).format(s=subject, v=value)))
    return " ".join(parts)


def write_note(
    rng: random.Random, name: str, facts: dict[str, str], fillers: int, review_length: int
) -> Note:
    """Write the note of one customer.

    Args:
        rng: Source of randomness.
        name: The customer's name.
        facts: Values by field, of `phrasings.FIELDS`; with a review also `sentiment` and `topic` (a
            review needs a `product`).
        fillers: Number of the agent's remarks to add.
        review_length: Number of review sentences that decide the topic; 0 for no review.

    Returns:
        The note with its evidence.
    """
    stated = [(field, facts[field]) for field in phrasings.FIELDS if field in facts]
    rng.shuffle(stated)
    parts = [_form(rng, name, stated) if rng.random() < 0.5 else _prose(rng, name, stated)]
    evidence = {"name": name, **dict(stated)}
    labels: dict[str, str] = {}
    if "product" in facts:
        labels["category"] = words.CATEGORY_OF[facts["product"]]
        evidence["category"] = facts["product"]
    for sentence in rng.sample(words.FILLER, fillers):
        parts.append(
            sentence.format(
                day=rng.choice(words.DAY), month=rng.choice(words.MONTH), hour=rng.choice(HOURS)
            )
        )
    review = ""
    if review_length:
        review, key = write_review(
            rng, facts["product"], facts["sentiment"], facts["topic"], review_length
        )
        evidence["sentiment"] = evidence["topic"] = key
        parts.insert(rng.randint(1, len(parts)), f"Review: {review}")
    return Note(name, {"name": name, **facts, **labels}, " ".join(parts), evidence, review)


def write_follow_up(rng: random.Random, name: str, facts: dict[str, str]) -> Note:
    """Write a note that says "this customer" for the customer named in the note before."""
    start = rng.choice(("Follow-up.", "Second note.", "More about this customer."))
    parts = [start]
    for field, value in facts.items():
        subject = rng.choice(("This customer", "The same customer"))
        parts.append(with_articles(rng.choice(phrasings.SAY[field]).format(s=subject, v=value)))
    return Note(name, dict(facts), " ".join(parts), dict(facts), follow_up=True)


def sample_facts(rng: random.Random, fields: Sequence[str], review: bool) -> dict[str, str]:
    """Draw values for the fields, plus sentiment, topic and product if there will be a review."""
    facts = {field: pick_value(rng, field) for field in fields}
    if review:
        facts["sentiment"] = rng.choice(words.SENTIMENTS)
        facts["topic"] = rng.choice(words.TOPICS)
        facts.setdefault("product", pick_value(rng, "product"))
    return facts

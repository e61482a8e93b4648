"""Instructions and system prompts to put before the documents of a prompt.

`INSTRUCTION` is the long text before every record in the demo, so that all rows of a query can
share its keys and values. The shorter instructions keep the model from depending on the exact words
of the long instruction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

INSTRUCTION = (
    "You are a careful assistant of the customer care team. You will be given one note about a "
    "customer, followed by a question. Each note was written by an agent after a phone call and "
    "holds a few facts about the customer, such as the name, the city, the job, the product that "
    "was bought, the order number and the plan. Most notes also hold a short review in the words "
    "of the customer. Read the whole note before you answer, because the facts may stand in any "
    "order and the agent may have added remarks that have nothing to do with the question. "
    "Answer only from the note and never from general knowledge. If the question asks for a "
    "fact, answer with that fact and nothing else, written exactly as it is written in the note, "
    "without a full sentence, without quotation marks and without a period at the end. If the "
    "question asks for the sentiment of the review, answer with the word positive or the word "
    "negative. A review is positive when the customer is content with what happened, even when a "
    "small remark in it is neutral, and it is negative when the customer is not content. If the "
    "question asks what the review is about, answer with one of the four topics delivery, price, "
    "quality or support. Delivery covers the courier, the parcel and the time it took. Price "
    "covers the cost and the value for the money. Quality covers the product itself and how well "
    "it works. Support covers the people who answered the phone or the mail. If the question asks "
    "for the category of the product, answer with kitchen, office, garden, sport, music or home. "
    "If the question can be answered with yes or no, answer with yes or with no. Keep the answer "
    "short, do not explain it, do not repeat the question and do not add a greeting."
)
SHORT = (
    "Answer from the notes.",
    "Use the notes below to answer the question.",
    "Read the note and answer the question.",
    "Read the customer notes and answer with a short answer.",
    "Answer the question about the customer.",
    "Answer briefly and only from the text.",
    "Here is a customer note.",
    "These are the customer notes.",
    "Note:",
    "Notes:",
    "Customer notes:",
)
SYSTEM = (
    "You are a helpful assistant.",
    "Answer with as few words as possible.",
    "You answer questions about customer notes.",
    "Answer only from the notes that you are given.",
    "Be brief and exact.",
)


@dataclass(frozen=True)
class Head:
    """The text before the documents of a prompt.

    Attributes:
        system: The system prompt, or an empty string for none.
        instruction: The text at the beginning of the first user message; may be empty.
    """

    system: str
    instruction: str


def shuffled_instruction(rng: random.Random) -> str:
    """Return 2 to 14 random sentences of the long and the short instructions and system prompts."""
    sentences = [part.rstrip(".") + "." for part in INSTRUCTION.split(". ")] + list(SHORT + SYSTEM)
    return " ".join(rng.sample(sentences, rng.randint(2, 14)))


def make_head(rng: random.Random, long_share: float) -> Head:
    """Choose a system prompt and an instruction.

    Args:
        rng: Source of randomness.
        long_share: Share of heads with a long instruction.

    Returns:
        The head; two of three long instructions are `INSTRUCTION` word for word.
    """
    if rng.random() < long_share:
        text = INSTRUCTION if rng.random() < 0.67 else shuffled_instruction(rng)
        if rng.random() < 0.2:
            return Head(text, rng.choice(("", rng.choice(SHORT))))
        return Head(rng.choice(SYSTEM) if rng.random() < 0.25 else "", text)
    system = rng.choice(SYSTEM) if rng.random() < 0.35 else ""
    return Head(system, rng.choice(SHORT) if rng.random() < 0.6 else "")

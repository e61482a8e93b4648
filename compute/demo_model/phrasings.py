"""Phrasings of instructions, facts and questions in the demo model's synthetic language.

There are several variants per kind, because users will not ask in exactly the words of a single
template. In the templates `{w}` is the question's reference to the customer, `{r}` its reference to
the review, and `{v}` a value. `INSTRUCTION` is the long text before every record in the demo; all
rows of a query share the keys and values of the text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIELDS = ("city", "job", "product", "order", "plan")
LINKED_FIELDS = ("born", "pet", "color", "drink")
LABELS: dict[str, tuple[str, ...]] = {
    "city": ("City",),
    "job": ("Job",),
    "product": ("Product", "Item"),
    "order": ("Order", "Order number"),
    "plan": ("Plan",),
}
SAY: dict[str, tuple[str, ...]] = {
    "city": ("{s} lives in {v}.", "{s} has a home in {v}.", "{s} writes to us from {v}."),
    "job": ("{s} works as a {v}.", "{s} is a {v}.", "{s} earns a living as a {v}."),
    "product": ("{s} bought a {v}.", "{s} ordered a {v}.", "{s} owns a {v}."),
    "order": (
        "{s} has order number {v}.",
        "The order number is {v}.",
        "{s} wrote about order {v}.",
    ),
    "plan": ("{s} is on the {v} plan.", "{s} pays for the {v} plan.", "{s} chose the {v} plan."),
    "born": ("{s} was born in {v}.", "{s} grew up in {v}."),
    "pet": ("{s} keeps a {v}.", "{s} has a pet {v}."),
    "color": ("{s} likes the color {v}.", "The favorite color is {v}."),
    "drink": ("{s} drinks {v}.", "{s} always orders {v}."),
}
ASK: dict[str, tuple[str, ...]] = {
    "name": (
        "What is the name of the customer?",
        "Who is the customer?",
        "What is the customer called?",
        "Which customer is this note about?",
        "What is the customer's name?",
        "Who wrote the review?",
    ),
    "city": (
        "Where does {w} live?",
        "In which city does {w} live?",
        "Which city does {w} live in?",
        "What is the city of {w}?",
        "Which city is {w} from?",
        "What is {w}'s city?",
    ),
    "job": (
        "What is the job of {w}?",
        "What does {w} do for a living?",
        "What is {w}'s job?",
        "Which job does {w} have?",
        "What is the profession of {w}?",
        "What does {w} work as?",
    ),
    "product": (
        "What did {w} buy?",
        "Which product did {w} buy?",
        "What product did {w} order?",
        "Which product does {w} have?",
        "What is {w}'s product?",
        "Which item did {w} buy?",
    ),
    "order": (
        "What is the order number of {w}?",
        "Which order number does {w} have?",
        "What is {w}'s order number?",
        "What is the order number for {w}?",
        "Which order does {w} have?",
    ),
    "plan": (
        "Which plan is {w} on?",
        "What is the plan of {w}?",
        "What plan does {w} have?",
        "Which plan did {w} choose?",
        "What is {w}'s plan?",
        "Which plan does {w} pay for?",
    ),
    "born": (
        "Where was {w} born?",
        "In which city was {w} born?",
        "What is the birthplace of {w}?",
        "Where did {w} grow up?",
    ),
    "pet": (
        "Which pet does {w} have?",
        "What pet does {w} keep?",
        "What is the pet of {w}?",
        "Which animal does {w} keep?",
    ),
    "color": (
        "Which color does {w} like?",
        "What is the favorite color of {w}?",
        "What color does {w} like?",
        "What is {w}'s favorite color?",
    ),
    "drink": (
        "What does {w} drink?",
        "Which drink does {w} order?",
        "What is the drink of {w}?",
        "What does {w} like to drink?",
    ),
    "sentiment": (
        "What is the sentiment of {r}?",
        "Classify the sentiment of {r}.",
        "Is {r} positive or negative?",
        "Classify {r} as positive or negative.",
        "Label the sentiment of {r} as positive or negative.",
        "Sentiment of {r}?",
    ),
    "topic": (
        "What is {r} about?",
        "What is the topic of {r}?",
        "Classify the topic of {r}.",
        "Is {r} about delivery, price, quality or support?",
        "Which topic does {r} cover: delivery, price, quality or support?",
        "Topic of {r}?",
    ),
    "category": (
        "What is the product category of {w}?",
        "Which category does the product of {w} belong to?",
        "Which kind of product did {w} buy?",
        "What kind of product does {w} have?",
        "Category of the product of {w}?",
    ),
}
EXTRACT = (
    "Extract the {f}.",
    "Extract the {f} from the note.",
    "Return only the {f}.",
    "Give me the {f}.",
    "What is the {f}?",
    "{F}?",
    "Which {f} does the note mention?",
)
EXTRACT_NAMES: dict[str, tuple[str, ...]] = {
    "name": ("name", "customer name", "customer"),
    "city": ("city",),
    "job": ("job", "profession"),
    "product": ("product", "item"),
    "order": ("order number", "order"),
    "plan": ("plan",),
    "sentiment": ("sentiment",),
    "topic": ("topic",),
    "category": ("category", "product category"),
}
CHECK: dict[str, tuple[str, ...]] = {
    "city": (
        "Does {w} live in {v}?",
        "Is {w} from {v}?",
        "Is {v} the city of {w}?",
        "Is {w}'s city {v}?",
        "Is the home of {w} in {v}?",
    ),
    "job": (
        "Is {w} a {v}?",
        "Does {w} work as a {v}?",
        "Is {v} the job of {w}?",
        "Is {w}'s job {v}?",
    ),
    "product": (
        "Did {w} buy a {v}?",
        "Did {w} order a {v}?",
        "Does {w} own a {v}?",
        "Is {v} the product of {w}?",
        "Does {w} have a {v}?",
    ),
    "plan": (
        "Is {w} on the {v} plan?",
        "Does {w} have the {v} plan?",
        "Did {w} choose the {v} plan?",
        "Is {v} the plan of {w}?",
    ),
    "topic": (
        "Is {r} about {v}?",
        "Does {r} talk about {v}?",
        "Is {v} the topic of {r}?",
        "Does {r} mention {v}?",
    ),
    "category": (
        "Did {w} buy a {v} product?",
        "Is the product of {w} a {v} product?",
        "Does {w} have a {v} product?",
        "Is {v} the product category of {w}?",
    ),
    "positive": (
        "Is {r} positive?",
        "Is {r} a positive one?",
        "Is {r} a positive review?",
        "Is {w} happy?",
        "Is {w} satisfied?",
        "Does {w} like the product?",
    ),
    "negative": (
        "Is {r} negative?",
        "Is {r} a negative one?",
        "Is {r} a negative review?",
        "Is {w} unhappy?",
        "Is {r} a complaint?",
        "Does {w} complain?",
    ),
}
POLAR = (
    "positive",
    "negative",
    "happy",
    "unhappy",
    "satisfied",
    "like",
    "complaint",
    "complain",
)
CHECK_HINTS = ("Answer yes or no.", "Reply with yes or no.", "Yes or no?")
ASK_HINTS = ("Answer with one word.", "Answer briefly.", "Return only the answer.")


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

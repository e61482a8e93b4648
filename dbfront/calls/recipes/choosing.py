"""``ai_filter``, ``ai_classify``, ``ai_classify_multi``, ``ai_score``: answers out of a few labels.

No text is generated: each label's probability is read, among the labels only.
"""

from __future__ import annotations

from typing import Final

from tierkv.dbfront.calls.recipes.asking import ask_model
from tierkv.dbfront.calls.recipes.recipe import Ask, Order, Recipe
from tierkv.dbfront.contracts import TextAnswer, TextCall

_YES: Final = ("yes", "Yes")
_YES_OR_NO: Final = (*_YES, "no", "No")
"""Models differ in how they begin an answer; the spellings of a word share its probability."""

_DIGITS: Final = tuple("0123456789")
SCORE_DIGITS: Final = 5
"""Digits of a score behind the point: further ones depend on who shared its batch."""

_HOLE: Final = "{0}"
_CERTAIN: Final = 0.5


def filter_rows(order: Order) -> Recipe:
    """Return whether yes is likelier than no."""
    call = order.call
    (answer,) = yield Ask((_yes_or_no(order, call.text("predicate")),))
    return _chance_of_yes(answer) > _CERTAIN


def classify(order: Order) -> Recipe:
    """Return the likeliest category."""
    call = order.call
    categories = call.texts("categories")
    instruction = call.text("instruction") or _which_of(categories)
    asked = ask_model(order, call.text("input"), question=instruction, labels=categories)
    (answer,) = yield Ask((asked,))
    chances = answer.label_probabilities
    return categories[max(range(len(categories)), key=chances.__getitem__)]


def classify_multi(order: Order) -> Recipe:
    """Return the categories that fit, in the order of the list; each is a question of its own."""
    call = order.call
    categories = call.texts("categories")
    instruction = call.text("instruction") or f"Is it about {_HOLE}?"
    answers = yield Ask(
        tuple(
            ask_model(
                order,
                call.text("input"),
                question=_about(instruction, category),
                labels=_YES_OR_NO,
            )
            for category in categories
        )
    )
    return [
        category
        for category, answer in zip(categories, answers, strict=True)
        if _chance_of_yes(answer) > _CERTAIN
    ]


def score(order: Order) -> Recipe:
    """Return the expected digit as a share of nine."""
    call = order.call
    criteria = call.text("criteria")
    if call.get("input") is None:
        asked = ask_model(order, criteria, labels=_DIGITS)
    else:
        question = f"{criteria}\nAnswer with a digit from 0 (not at all) to 9 (completely)."
        asked = ask_model(order, call.text("input"), question=question, labels=_DIGITS)
    (answer,) = yield Ask((asked,))
    expected = sum(digit * chance for digit, chance in enumerate(answer.label_probabilities))
    return round(min(max(expected / 9, 0.0), 1.0), SCORE_DIGITS)


def _yes_or_no(order: Order, predicate: str) -> TextCall:
    if order.call.get("input") is None:
        return ask_model(order, predicate, labels=_YES_OR_NO)
    question = f"{predicate}\nAnswer yes or no."
    return ask_model(order, order.call.text("input"), question=question, labels=_YES_OR_NO)


def _chance_of_yes(answer: TextAnswer) -> float:
    chances: tuple[float, ...] = answer.label_probabilities
    return sum(chances[: len(_YES)])


def _which_of(categories: tuple[str, ...]) -> str:
    return f"Which category fits best: {', '.join(categories)}?"


def _about(instruction: str, category: str) -> str:
    if _HOLE in instruction:
        return instruction.replace(_HOLE, category)
    return f"{instruction} Does this fit: {category}?"

"""``ai_embed`` and ``ai_similarity``: texts as vectors of unit length; nothing is generated."""

from __future__ import annotations

import math

from tierkv.dbfront.calls.recipes.asking import embed_text
from tierkv.dbfront.calls.recipes.recipe import Ask, Order, Recipe
from tierkv.dbfront.contracts import TextAnswer
from tierkv.kvcore.errors import RowLevelError


def embed(order: Order) -> Recipe:
    """Return a text's vector."""
    text = _not_empty(order.call.text("input"))
    (answer,) = yield Ask((embed_text(order, text),))
    return list(answer.embedding)


def similarity(order: Order) -> Recipe:
    """Return the cosine of the angle between two texts' vectors, 1.0 for equal texts."""
    texts = [_not_empty(order.call.text(name)) for name in ("a", "b")]
    one, other = yield Ask(tuple(embed_text(order, text) for text in texts))
    # Vectors are of unit length up to rounding; equal ones shall give 1.0.
    length = math.sqrt(_product(one, one) * _product(other, other))
    return min(max(_product(one, other) / (length or 1.0), -1.0), 1.0)


def _product(one: TextAnswer, other: TextAnswer) -> float:
    return math.fsum(a * b for a, b in zip(one.embedding, other.embedding, strict=True))


def _not_empty(text: str) -> str:
    if not text:
        raise RowLevelError("an empty text has no embedding", hint="Use nullif(text, '').")
    return text

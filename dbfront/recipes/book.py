"""Which recipe answers which function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dbfront.recipes.generate import generate, generate_detail, generate_json
from dbfront.recipes.recipe import Order, Recipe

RECIPES: Final[dict[str, Callable[[Order], Recipe]]] = {
    "ai_generate": generate,
    "ai_generate_json": generate_json,
    "ai_generate_detail": generate_detail,
}
"""By canonical function name (sql/functions.py)."""


def start_recipe(order: Order) -> Recipe:
    """Begin answering a call."""
    return RECIPES[order.call.function](order)

"""Which recipe answers which function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierkv.dbfront.calls.recipes.choosing import classify, classify_multi, filter_rows, score
from tierkv.dbfront.calls.recipes.counting import count_tokens
from tierkv.dbfront.calls.recipes.embedding import embed, similarity
from tierkv.dbfront.calls.recipes.extracting import extract
from tierkv.dbfront.calls.recipes.gathering import aggregate, summarize
from tierkv.dbfront.calls.recipes.generate import generate, generate_detail, generate_json
from tierkv.dbfront.calls.recipes.recipe import Order, Recipe

RECIPES: Final[dict[str, Callable[[Order], Recipe]]] = {
    "ai_generate": generate,
    "ai_generate_json": generate_json,
    "ai_generate_detail": generate_detail,
    "ai_filter": filter_rows,
    "ai_classify": classify,
    "ai_classify_multi": classify_multi,
    "ai_extract": extract,
    "ai_score": score,
    "ai_similarity": similarity,
    "ai_embed": embed,
    "ai_agg": aggregate,
    "ai_summarize_agg": summarize,
    "ai_count_tokens": count_tokens,
}
"""By canonical function name (sql/calls/functions.py)."""


def start_recipe(order: Order) -> Recipe:
    """Begin answering a call."""
    return RECIPES[order.call.function](order)

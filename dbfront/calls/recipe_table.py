"""The recipe of each AI function, by its canonical name.

dbfront/calls/evaluation.py starts recipes here; dbfront/explain/estimate.py starts the same recipes
to estimate their cost. A new AI function needs a row here and a row in sql/calls/functions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierkv.dbfront.calls.aggregates import aggregate, summarize
from tierkv.dbfront.calls.recipe import CallOrder, Recipe
from tierkv.dbfront.calls.row_functions import (
    classify,
    classify_multi,
    count_tokens,
    embed,
    extract,
    filter_rows,
    generate,
    generate_detail,
    generate_json,
    score,
    similarity,
)

RECIPES: Final[dict[str, Callable[[CallOrder], Recipe]]] = {
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


def start_recipe(order: CallOrder) -> Recipe:
    """Start the recipe of a call."""
    return RECIPES[order.call.function](order)

"""``ai_count_tokens``: how long a text is for a model, by the model's own tokenizer."""

from __future__ import annotations

from tierkv.dbfront.calls.recipes.recipe import CountTokens, Order, Recipe


def count_tokens(order: Order) -> Recipe:
    """Return the tokens of a text, without those a chat template puts around it."""
    model = order.call.model or order.defaults.model
    counted = yield CountTokens((order.call.text("input"),), model)
    return counted.counts[0]

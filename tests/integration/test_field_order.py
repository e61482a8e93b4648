"""Contexts over a whole cluster: no order changes what the cache answers, and some share more."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.plan_cluster import ClusterShape, PlanCluster, answer_all, plan_cluster
from tests.fix_model import tiny_config
from tierkv.dbfront.calls.evaluation import CallOutcome
from tierkv.dbfront.contracts import CallDefaults
from tierkv.kvcore.call_options import CallOptions
from tierkv.sql.calls.ai_call import AiCall, make_call
from tierkv.sql.settings import FieldReorder

pytestmark = pytest.mark.integration
MODEL = tiny_config(vocab_size=4096, max_position_embeddings=1024)
SHAPE = ClusterShape(MODEL, 1, l1_pages=2_000, pool_bytes=1, extent_bytes=64 << 10, block_tokens=8)
DEFAULTS = CallDefaults(max_concurrency=4)


def reviews(products: int = 4, each: int = 5) -> list[AiCall]:
    """A review first as written, then its product's name and long description."""
    return [
        make_call(
            "ai_generate",
            {
                "prompt": "Is it a good product?",
                "context": json.dumps(
                    {
                        "review": f"Review {number} says window {number % 3}, lamp {product}.",
                        "product": f"product {product}",
                        "description": f"Number {product}: " + "table garden stone " * 12,
                    }
                ),
                "options": CallOptions(max_tokens=6),
            },
        )
        for number in range(each)
        for product in range(products)
    ]


async def answers(cluster: PlanCluster, defaults: CallDefaults) -> tuple[dict[AiCall, str], int]:
    """Return every row's answer, and how many prompt tokens were loaded instead of computed."""
    found: dict[AiCall, str] = {}
    hit_tokens = 0

    def note(call: AiCall, outcome: CallOutcome) -> None:
        nonlocal hit_tokens
        assert outcome.error is None, outcome
        found[call] = outcome.value
        hit_tokens += sum(answer.usage.hit_tokens.total for answer in outcome.answers)

    await answer_all(reviews(), cluster.generation, defaults, note)
    assert set(found) == set(reviews())
    return found, hit_tokens


@pytest.mark.parametrize("method", FieldReorder)
async def test_the_cache_changes_no_answer(method: FieldReorder) -> None:
    defaults = replace(DEFAULTS, field_reorder=method)
    uncached = replace(defaults, options=replace(defaults.options, cache=False))
    async with plan_cluster(SHAPE) as cluster:
        want, hit_tokens = await answers(cluster, uncached)
        assert hit_tokens == 0
        got, hit_tokens = await answers(cluster, defaults)
        assert got == want
        assert hit_tokens > 0


async def test_an_order_by_statistics_computes_products_once() -> None:
    hit_tokens: dict[FieldReorder, int] = {}
    for method in FieldReorder:
        async with plan_cluster(SHAPE) as cluster:
            _, hit_tokens[method] = await answers(cluster, replace(DEFAULTS, field_reorder=method))
    assert hit_tokens[FieldReorder.STATS] > 3 * hit_tokens[FieldReorder.OFF]

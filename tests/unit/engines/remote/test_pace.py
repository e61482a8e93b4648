"""How fast an engine is taken to be, after answers of all kinds."""

from __future__ import annotations

import pytest

from tierkv.costing.fit import EnginePace
from tierkv.costing.node_cost import NOTHING_CACHED, CachedPrefix, known_rates
from tierkv.costing.node_service import lone_speeds, serve_one
from tierkv.costing.service_time import tell_cost
from tierkv.integrations.remote.served_model import opaque_layout
from tierkv.kvcore.node import NodeLoad
from tierkv.scheduler.config import SchedulerConfig

PROMPT, BLOCK = 260, 32
LAYOUT = opaque_layout("x", BLOCK)


def predicted(pace: EnginePace, prefix: CachedPrefix) -> float:
    """What the scheduler expects of a node of that pace."""
    return _total_s(prefix, tell_cost(pace.prefill.cost))


def _total_s(prefix: CachedPrefix, load: NodeLoad) -> float:
    speeds = lone_speeds(known_rates(load, SchedulerConfig().rates))
    return serve_one(PROMPT, prefix, speeds, LAYOUT).total_s


@pytest.mark.parametrize("stall_s", [0.37, 4.0, 60.0])
def test_a_stall_does_not_make_a_cached_prompt_dearer_than_computing_it(stall_s: float) -> None:
    pace = EnginePace()
    pace.first_token(PROMPT, 0, 0.072)
    pace.first_token(PROMPT, PROMPT - 4, stall_s)
    cached = CachedPrefix(l1_blocks=PROMPT // BLOCK)
    assert predicted(pace, cached) < _total_s(NOTHING_CACHED, NodeLoad())
    assert predicted(pace, cached) <= predicted(pace, NOTHING_CACHED) < 2 * 0.072


def test_an_engine_that_became_slow_is_seen() -> None:
    pace = EnginePace()
    for _ in range(10):
        pace.first_token(PROMPT, 0, 0.07)
    # Meanwhile the scheduler's own correction knows (scheduler/nodes/node_record.py).
    for _ in range(30):
        pace.first_token(PROMPT, 0, 0.7)
    assert predicted(pace, NOTHING_CACHED) > 0.35


def test_steps_and_tokens_are_told_apart() -> None:
    pace = EnginePace()
    for tokens in (4, 400, 1_200, 30, 800, 2_000):
        pace.first_token(tokens, 0, 0.02 + 1e-4 * tokens)
    cost = pace.prefill.cost
    assert cost is not None
    assert cost.seconds(600, 0.0) == pytest.approx(0.08, rel=0.05)

"""Signals of autoscaling: exact small cases."""

from __future__ import annotations

import pytest

from tests.fix_scheduler import make_info
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.node import NodeLoad, NodeReport, NodeRole, TierStats
from tierkv.metaserver.client import DirectoryNode
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import SeenNode, Stage
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.routing_stats import Decision
from tierkv.scheduler.scale_signals import WINDOW_S, scale_signals

MODEL = make_info().models[0].name
BUSY = NodeLoad(
    requests_running=4, requests_waiting=6, waiting_prefill_tokens=2_000, prefill_token_s=0.001,
    kv_usage=0.9,
)  # fmt: skip
IDLE = NodeLoad(prefill_token_s=0.001, kv_usage=0.1)


def fleet(*loads: NodeLoad, state: str = "alive") -> Fleet:
    found = Fleet(SchedulerConfig())
    found.see([SeenNode(make_info(f"c{n}"), load, state) for n, load in enumerate(loads)], 0.0)
    return found


def decision(predicted_s: float, decided_s: float) -> Decision:
    return Decision(
        RequestId("q"), 1, Stage.PREFILL, NodeId("c0"), (), decided_s, predicted_s,
        model=MODEL, prompt_tokens=100,
    )  # fmt: skip


def test_queues_are_counted_and_timed() -> None:
    (model,) = scale_signals(fleet(BUSY, IDLE).records.values(), (), (), [MODEL, MODEL], 0.0).models
    assert (model.model, model.nodes, model.running, model.waiting) == (MODEL, 2, 4, 8)
    assert model.queue_s == pytest.approx(1.0)
    assert model.kv_usage == pytest.approx(0.5)
    assert (model.ttft_s, model.hit_ratio) == (None, None)


def test_predictions_of_the_last_minute_count() -> None:
    decisions = [decision(seconds / 10, 100.0) for seconds in range(1, 11)]
    decisions.append(decision(50.0, 100.0 - WINDOW_S))
    records = fleet(IDLE).records.values()
    (model,) = scale_signals(records, (), decisions, (), 100.0).models
    assert model.ttft_s == 0.9
    assert model.hit_ratio == 0.0


def test_a_model_whose_nodes_are_gone_is_still_told() -> None:
    (model,) = scale_signals((), (), (), ["large"], 0.0).models
    assert (model.model, model.nodes, model.waiting, model.queue_s) == ("large", 0, 1, 0.0)


def test_the_pool_is_its_live_memory() -> None:
    memory = TierStats(Tier.L2, capacity_bytes=100, used_bytes=60)
    disk = TierStats(Tier.L4, capacity_bytes=1_000, used_bytes=10)
    nodes = [
        DirectoryNode(
            make_info(name, role=NodeRole.DMP, models=()), NodeReport(tiers=(memory, disk)),
            0.0, state,
        )
        for name, state in (("p1", "alive"), ("p2", "alive"), ("p3", "dead"))
    ]  # fmt: skip
    pool = scale_signals((), nodes, (), (), 0.0).pool
    assert (pool.nodes, pool.capacity_bytes, pool.used_bytes) == (2, 200, 120)

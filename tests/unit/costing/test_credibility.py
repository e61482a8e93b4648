"""What is believed of a node beside its equals: measured rates, learned corrections, speeds."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.fix_scheduler import make_info
from tierkv.costing.correction import credible, speeds
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.node import NodeLoad
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import SeenNode
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import Figures

FAST = NodeLoad(prefill_token_s=1e-4, prefill_step_s=1e-3)


def fleet_of(loads: dict[str, NodeLoad]) -> Fleet:
    fleet = Fleet(SchedulerConfig())
    fleet.see([SeenNode(make_info(name), load) for name, load in loads.items()], 0.0)
    return fleet


def slower(times: float) -> NodeLoad:
    return NodeLoad(prefill_token_s=times * 1e-4, prefill_step_s=times * 1e-3)


@pytest.mark.parametrize(
    ("measured", "believed"), [(1.4, 1.0), (0.7, 1.0), (2.0, 2.0), (0.5, 0.5), (900.0, 8.0)]
)
def test_small_differences_of_first_steps_are_none_and_absurd_ones_are_bounded(
    measured: float, believed: float
) -> None:
    fleet = fleet_of({"c1": FAST, "c2": FAST, "c3": slower(measured)})
    usual, other = (fleet.records[NodeId(name)].rates for name in ("c1", "c3"))
    assert usual.prefill_tokens_per_s / other.prefill_tokens_per_s == pytest.approx(believed)
    assert other.cost.per_step_s / usual.cost.per_step_s == pytest.approx(believed)


def figures_after(answers: dict[str, list[float]]) -> Figures:
    """What is known after first tokens that took so many times what was predicted."""
    fleet = fleet_of(dict.fromkeys(answers, FAST))
    for name, times in answers.items():
        for at, ratio in enumerate(times):
            fleet.records[NodeId(name)].correction.learn(0.1, 0.1 * ratio, float(at))
    nodes = list(fleet.records.values())
    for node in nodes:
        node.write_row()
    return fleet.table.figures(fleet.group(nodes).rows)


def noisy(mean: float, count: int, seed: int) -> list[float]:
    random = Random(seed)
    return [mean * random.uniform(0.5, 1.5) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_node_that_got_unlucky_is_taken_for_its_equals(seed: int) -> None:
    figures = figures_after({"c1": noisy(1, 30, seed), "c2": noisy(1, 30, 99), "c3": [1.9, 1.7]})
    corrected = credible(figures.learned, np.full(3, 0.1))
    seconds = corrected.factor * 0.1 + corrected.overhead_s
    assert seconds.max() / seconds.min() < 1.3
    assert speeds(figures.speeds.cost, figures.learned).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(5))
def test_a_node_that_is_always_slow_is_known_to_be(seed: int) -> None:
    figures = figures_after(
        {"c1": noisy(1, 30, seed), "c2": noisy(1, 30, 99), "c3": noisy(4, 30, seed)}
    )
    corrected = credible(figures.learned, np.full(3, 0.1))
    seconds = corrected.factor * 0.1 + corrected.overhead_s
    assert seconds[2] / seconds[0] > 1.8
    found = speeds(figures.speeds.cost, figures.learned)
    assert found[2] < 0.6 and found[:2].tolist() == [1.0, 1.0]


def test_a_node_without_answers_is_taken_for_a_typical_one() -> None:
    figures = figures_after({"c1": [0.5] * 20, "c2": [0.5] * 20, "c3": []})
    corrected = credible(figures.learned, np.full(3, 0.1))
    assert corrected.factor[2] == pytest.approx(corrected.factor[0])
    assert speeds(figures.speeds.cost, figures.learned).tolist() == [1.0, 1.0, 1.0]

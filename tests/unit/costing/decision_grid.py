"""Decisions on a grid of drawn inputs, recorded once: what to load, where to send, what it takes.

tests/unit/costing/test_decisions.py compares them with tests/golden/cost_decisions.json.
Run ``python -m tests.unit.costing.decision_grid`` to print the file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.fix_model import node_config
from tests.fix_pool import MemoryPoolNode
from tests.fix_scheduler import LAYOUT, make_info
from tierkv.compute.config import LoadPolicy
from tierkv.compute.tiers.finder import Source
from tierkv.compute.tiers.load_decider import Ahead, LoadDecider
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.compute.tiers.prompt_lookup import PoolPart, worth_loading
from tierkv.costing.blend_controller import BlendWork, choose_ratio
from tierkv.costing.correction import Correction
from tierkv.costing.fit import EnginePace
from tierkv.costing.load_controller import (
    BlockSizes,
    Level,
    Prompt,
    Run,
    beside_s,
    choose,
    choose_levels,
)
from tierkv.costing.load_worth import LoadWorth
from tierkv.costing.node_cost import CachedPrefix
from tierkv.costing.service_time import Line, StepCost
from tierkv.kvcore.block import Location, Tier
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId, RequestId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeLoad, NodeRole
from tierkv.scheduler.choosing.choice import choose as choose_node
from tierkv.scheduler.choosing.choice import weigh
from tierkv.scheduler.choosing.router import weigh_lone
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import RequestArrived, SeenNode, WantedModel
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import Work
from tierkv.scheduler.request_record import RequestRecord
from tierkv.simulator.nodes.node import LoadGate
from tierkv.simulator.nodes.serving_model import load_constants
from tierkv.simulator.options import Gate

Decision = list[Any]
"""What was decided, and predictions to compare within a rounding."""


def grid(count: int) -> dict[str, list[Decision]]:
    """Return ``count`` decisions of each kind."""
    kinds: dict[str, Callable[[Random], Decision]] = {
        "depth": _depth,
        "blend": _blend,
        "node": _node,
        "levels": _levels,
        "scheduler": _scheduler,
        "lone node": _lone,
        "simulator": _gate,
        "connector": _connector,
        "pace": _pace,
        "correction": _correction,
    }
    return {
        kind: [decide(Random(f"{kind} {number}")) for number in range(count)]
        for kind, decide in kinds.items()
    }


def _cost(random: Random) -> StepCost:
    return StepCost(
        10 ** random.uniform(-6, -2),
        random.choice([0.0, 1e-8, 1e-6]),
        random.choice([0.0, 1e-3, 1e-1]),
        random.choice([0.0, 1e-3]),
    )


def _line(random: Random) -> Line:
    return Line(random.choice([0.0, 1e-4, 1e-2]), 10 ** random.uniform(4, 10))


def _runs(random: Random) -> list[Run]:
    return [
        Run(
            random.choice([Tier.L2, Tier.L3, Tier.L4]),
            random.randint(1, 40),
            _line(random),
            random.choice([None, _line(random)]),
            random.choice("abc"),
        )
        for _ in range(random.randint(1, 4))
    ]


def _level(random: Random, codec: KvCodec) -> Level:
    decode = random.choice([math.inf, 10 ** random.uniform(5, 10)])
    return Level(codec, 10 ** random.uniform(2, 6), decode, random.choice([0, 1 << 12, 1 << 20]))


def _prompt(random: Random, runs: list[Run]) -> Prompt:
    start = random.randint(0, 50) * 16
    return Prompt(
        start=start,
        stop=start + sum(run.blocks for run in runs) * 16 + random.randint(1, 200),
        block_tokens=16,
        layers=random.choice([1, 2, 28, 40]),
        step_tokens=random.choice([1, 24, 64, 1024]),
        cost=_cost(random),
        compute_from_s=random.choice([0.0, 0.01, 1.0]),
        load_from_s=random.choice([0.0, 0.05]),
        shares_steps=random.random() < 0.5,
    )


def _depth(random: Random) -> Decision:
    runs = _runs(random)
    prompt = _prompt(random, runs)
    levels = [_level(random, codec) for codec in random.sample(list(KvCodec), random.randint(1, 2))]
    decision = choose(prompt, runs, levels, budget_s=random.choice([0.0, 0.0, 1.0]))
    beside = beside_s(replace(prompt, after=random.randint(0, 4)), decision.depth)
    return [decision.choice, decision.predicted_s, decision.compute_s, decision.load_s, beside]


def _blend(random: Random) -> Decision:
    runs = random.choice([[], _runs(random)])
    prompt = _prompt(random, runs)
    work = BlendWork(
        max(1, int((prompt.stop - prompt.start) * random.random())),
        random.choice([0.05, 0.15, 0.5]),
        random.randint(0, 3),
        random.randint(0, 1),
    )
    level = _level(random, KvCodec.NONE)
    decision = choose_ratio(prompt, work, runs, level, slower=random.choice([1.0, 1.5]))
    return [decision.choice, decision.predicted_s, decision.compute_s, decision.pass_s]


def _node(random: Random) -> Decision:
    """A compute node that measured some reads and steps decides about a chain that it found."""
    clock = ManualClock()
    figures = LoadFigures(LAYOUT, host=HostId("here"), clock=clock, read_bytes=1 << 14)
    config = node_config(load_policy=LoadPolicy.AUTO, load_timeout_s=30.0)
    decider = LoadDecider(config, LAYOUT, figures)
    for _ in range(random.randint(0, 8)):
        clock.advance(random.random())
        tier, layers = random.choice([Tier.L2, Tier.L3]), random.choice([1, LAYOUT.layers])
        size = random.randint(1, 40) * LAYOUT.stored_layer_bytes * layers
        figures.read(tier, size, 10 ** random.uniform(-5, 0), layers=layers)
        figures.promoted(size, 10 ** random.uniform(-5, 0))
        figures.decoded(KvCodec.NONE, size, 10 ** random.uniform(-6, -3))
        tokens = random.randint(1, 200)
        figures.steps.add(tokens, tokens * tokens / 2, tokens * 10 ** random.uniform(-5, -2))
        figures.blended(0.1, 0.1 * random.uniform(0.5, 4.0), to_the_end=True)
    sources = [_source(random, run) for run in _runs(random) for _ in range(run.blocks)]
    start = random.randint(0, 9) * 16
    stop = start + len(sources) * 16 + random.randint(1, 99)
    ahead = Ahead(random.choice([0, 500]), random.randint(0, 4), random.randint(0, 3))
    decision = decider.decide(sources, KvCodec.NONE, start=start, stop=stop, ahead=ahead)
    blend = decider.decide_blend(
        sources, KvCodec.NONE, BlendWork(16 * len(sources), 0.15), start=start, stop=stop
    )
    context = random.randint(16, 900)
    spared = [
        decider.spared_s(tier, KvCodec.NONE, tokens=16, context_tokens=context)
        for tier in (Tier.L2, Tier.L3, Tier.L4)
    ]
    part = PoolPart(sources[0], random.randint(1, 15))
    reads = worth_loading(part, KvCodec.NONE, figures, start=start, alone=random.random() < 0.5)
    patience = decider.patience_s(decision.compute_s, decision.predicted_s)
    return [decision.choice, decision.predicted_s, blend.choice, *spared, reads, patience]


_NODES = {where: MemoryPoolNode(host=where) for where in ("here", "there")}


def _source(random: Random, run: Run) -> tuple[Source, ...]:
    node = _NODES["here" if run.tier is Tier.L2 else "there"]
    at = Location(node.node_id, Incarnation(1), 0, 1, 1, LAYOUT.stored_bytes)
    if run.promote is not None:
        return (Source(node, None, Tier.L4, BlockKey(bytes(16))),)
    return (Source(node, at, run.tier if run.tier is not Tier.L4 else Tier.L3),)


def _levels(random: Random) -> Decision:
    sizes = [sorted(random.sample(range(1, 99), 2)) for _ in range(random.randint(1, 20))]
    blocks = [BlockSizes(fine, coarse) for coarse, fine in sizes]
    rate, budget_s = 10 ** random.uniform(0, 3), 10 ** random.uniform(-2, 2)
    choice = choose_levels(blocks, bytes_per_s=rate, budget_s=budget_s)
    return [choice.fine, choice.predicted_s]


def _load(random: Random) -> NodeLoad:
    fitted = random.random() < 0.7
    return NodeLoad(
        requests_running=random.randint(0, 3),
        requests_waiting=random.randint(0, 3),
        waiting_prefill_tokens=random.choice([0, 0, 300, 9_000]),
        prefill_tokens_per_s=random.choice([0.0, 1e3, 1e5]),
        l2_bytes_per_s=random.choice([0.0, 1e6, 1e9]),
        l3_bytes_per_s=random.choice([0.0, 1e5, 1e8]),
        l4_bytes_per_s=random.choice([0.0, 1e5, 1e8]),
        l2_latency_s=random.choice([0.0, 1e-4]),
        l3_latency_s=random.choice([0.0, 1e-3]),
        l4_latency_s=random.choice([0.0, 1e-2]),
        l2_queued_bytes=random.choice([0, 10_000]),
        l3_queued_bytes=random.choice([0, 100_000]),
        l4_queued_bytes=random.choice([0, 100_000]),
        prefill_step_s=fitted * random.choice([0.0, 1e-3]),
        prefill_token_s=fitted * 10 ** random.uniform(-5, -2),
        prefill_pair_s=fitted * random.choice([0.0, 1e-7]),
        prefill_sequence_s=fitted * random.choice([0.0, 1e-4]),
        step_tokens=random.choice([0, 64, 256]),
        decode_step_s=random.choice([0.0, 0.02]),
        decodes_running=random.randint(0, 3),
    )


def _fleet(random: Random, nodes: int, *, prefill_only: bool) -> Fleet:
    fleet = Fleet(SchedulerConfig())
    fleet.pool_nodes = random.choice([0, 1, 3])
    role = NodeRole.PREFILL if prefill_only else NodeRole.COMPUTE
    infos = [make_info(f"c{at}", role=role if at % 2 else NodeRole.COMPUTE) for at in range(nodes)]
    fleet.see([SeenNode(info, _load(random)) for info in infos], 0.0)
    for record in fleet.records.values():
        for number in range(random.randint(0, 4)):
            record.correction.learn(0.1, 0.1 * random.uniform(0.5, 4.0), float(number))
        for number in range(random.randint(0, 2)):
            work = Work(
                random.randint(1, 500),
                random.random(),
                (0.0, random.choice([0.0, 1e5]), 0.0),
                corrected_s=random.random(),
            )
            record.take(RequestId(f"before{number}"), work, 0.0)
    return fleet


def _request(random: Random) -> RequestRecord:
    tokens = random.randint(1, 800)
    return RequestRecord(
        RequestArrived(RequestId("q"), WantedModel("tiny"), tokens), total_tokens=tokens
    )


def _scheduler(random: Random) -> Decision:
    splits = random.random() < 0.3
    fleet = _fleet(random, random.randint(1, 6), prefill_only=splits)
    request = _request(random)
    for node_id in fleet.records:
        if random.random() < 0.5:
            request.near[node_id] = CachedPrefix(random.randint(0, 30), random.randint(0, 40))
    if random.random() < 0.7:
        request.pool = CachedPrefix(0, 0, random.randint(0, 45), random.randint(0, 50))
    nodes = list(fleet.records.values())
    costs = weigh(
        request,
        nodes,
        fleet=fleet,
        now=random.random(),
        splits=splits,
        waiting=random.randint(0, 3),
    )
    chosen = choose_node(costs, range(len(costs)), last_node=None)
    work = costs.work(chosen, request.total_tokens, LAYOUT)
    split = costs[chosen]
    return [
        chosen,
        *[list(cost.service.tier_blocks) for cost in costs],
        *[cost.total_s for cost in costs],
        *(split.ttft_s, split.service.load_s, split.taken_s, split.harm_s, split.handoff_s),
        *(work.tokens, work.compute_s, work.predicted_s, work.corrected_s, *work.load_bytes),
    ]


def _lone(random: Random) -> Decision:
    fleet = _fleet(random, 1, prefill_only=False)
    lone = weigh_lone(
        _request(random),
        fleet.records[NodeId("c0")],
        config=fleet.config,
        now=random.random(),
        waiting=random.randint(0, 3),
        awaited_tokens=random.choice([0, 400]),
    )
    split, work = lone.split, lone.work
    return [
        *(split.total_s, split.wait_s, split.service.total_s, split.service.prefill_s),
        *(split.taken_s, split.harm_s, work.tokens, work.compute_s, work.predicted_s),
    ]


def _gate(random: Random) -> Decision:
    model = load_constants().model("dense-70b-h20")
    gate = LoadGate(
        random.choice(list(Gate)),
        model,
        model.layout(512),
        pool_bytes_per_s=random.choice([0.0, 1e9, 1e10, 1e11]),
        latency_s=random.choice([0.0, 0.01]),
    )
    blocks = random.randint(1, 200)
    return [
        gate.blocks_to_load(
            512 * blocks + random.randint(1, 5_000),
            local=random.randint(0, blocks),
            pool=random.randint(0, blocks),
            queue_s=random.choice([0.0, 0.5, 5.0]),
            busy_s=random.choice([0.0, 1.0, 10.0]),
        )
    ]


def _connector(random: Random) -> Decision:
    worth, answers = LoadWorth(), []
    slow = 10 ** random.uniform(-2, 0.7)
    for _ in range(60):
        tokens = random.randint(1, 2_000)
        step = random.choice([1, tokens])
        worth.computed(step, 0.002 + 1e-4 * step * random.uniform(0.5, 2))
        worth.asked(0.001 * random.random())
        asks = worth.pays_to_ask(tokens)
        loads = asks and worth.pays(tokens)
        if loads:
            worth.begun()
            worth.load.add(tokens, slow * 1e-4 * tokens * random.uniform(0.5, 2))
        answers.append("loads" if loads else "asks" if asks else "no")
    return [*answers[5::6], worth.load.seconds(1_000)]


def _pace(random: Random) -> Decision:
    pace = EnginePace()
    for _ in range(random.randint(1, 9)):
        tokens = random.randint(1, 5_000)
        cached = random.randint(0, tokens)
        pace.first_token(tokens, cached, 0.01 + 1e-4 * (tokens - cached) * random.uniform(0.9, 1.1))
    cost = pace.prefill.cost
    assert cost is not None
    return [cost.seconds(1_000, 500_000), pace.prefill_rate.value]


def _correction(random: Random) -> Decision:
    correction = Correction()
    for at in range(random.randint(1, 12)):
        predicted_s = 10 ** random.uniform(-3, 1)
        correction.learn(predicted_s, 0.01 + predicted_s * random.uniform(0.5, 3.0), 20.0 * at)
        correction.fade(20.0 * at + random.choice([0.0, 40.0]))
    return [correction.overhead_s, correction.factor, correction.doubt]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return [_rounded(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    lines = [
        f"{json.dumps(kind)}: [\n" + ",\n".join(json.dumps(_rounded(d)) for d in found) + "\n]"
        for kind, found in grid(int(sys.argv[1]) if len(sys.argv) > 1 else 24).items()
    ]
    print("{\n" + ",\n".join(lines) + "\n}")

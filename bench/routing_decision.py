"""Time of a routing decision without the directory lookup: the scheduler's core alone.

Run ``python -m bench.routing_decision`` for microseconds per decision at several cluster sizes.
Each node has different figures. A third of the nodes has a part of the prompt nearby; the pool has
most of the prompt.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence

from bench.report import Report, finish, parse_arguments
from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import HostId, Incarnation, NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeLoad, NodeRole
from tierkv.scheduler.events import (
    ChainLocated,
    Dispatch,
    FirstToken,
    NodesSeen,
    RequestArrived,
    RequestFinished,
    SeenNode,
    WantedModel,
)
from tierkv.scheduler.requests.state import SchedulerState

SIZES = (1, 10, 100, 1_000)
DECISIONS = 2_000
PROMPT_TOKENS = 8_000
LAYOUT = BlockLayout(layers=32, kv_heads=8, head_dim=128, dtype=KvDtype.BFLOAT16, block_tokens=64)
MODEL = ModelInfo("m", "", "r", LAYOUT, 1 << 20, (), "LlamaForCausalLM", 1)
WANTED = WantedModel("m", "r", LAYOUT)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    decisions = 200 if arguments.quick else DECISIONS
    report = Report("routing decision")
    for nodes in SIZES:
        took = sorted(decide(nodes, rng=random.Random(arguments.seed), decisions=decisions))
        report.add(f"routing_decision_us_{nodes}_nodes", statistics.median(took) * 1e6)
        report.add(f"routing_decision_p99_us_{nodes}_nodes", took[len(took) * 99 // 100] * 1e6)
    report.note(f"{decisions} decisions in a row, without asking the directory; one thread")
    finish(report, arguments.format)


def decide(nodes: int, *, rng: random.Random, decisions: int = DECISIONS) -> list[float]:
    """Route prompts one after the other; return the seconds of each decision."""
    state = SchedulerState()
    seen = tuple(SeenNode(_info(at), _load(rng)) for at in range(nodes))
    state.handle(NodesSeen(seen, pool_nodes=nodes), 0.0)
    took: list[float] = []
    gc.collect()
    gc.disable()
    for number in range(decisions):
        now = 0.1 * number
        request_id = RequestId(f"q{number}")
        located = ChainLocated(request_id, _near(nodes, rng), CachedPrefix(0, 0, 110, 115))
        arrived = RequestArrived(request_id, WANTED, PROMPT_TOKENS, locatable=True)
        if nodes > 1:
            state.handle(arrived, now)
        began = time.perf_counter()
        instructions = state.handle(located if nodes > 1 else arrived, now)
        took.append(time.perf_counter() - began)
        assert isinstance(instructions[0], Dispatch)
        state.handle(FirstToken(request_id), now + 0.05)
        state.handle(RequestFinished(request_id), now + 0.09)
    gc.enable()
    return took


def _info(number: int) -> NodeInfo:
    return NodeInfo(
        NodeId(f"node-{number}"),
        Incarnation(1),
        NodeRole.COMPUTE,
        HostId(f"host-{number}"),
        models=(MODEL,),
    )


def _load(rng: random.Random) -> NodeLoad:
    return NodeLoad(
        requests_running=rng.randrange(8),
        waiting_prefill_tokens=rng.randrange(4_000),
        l2_bytes_per_s=rng.uniform(1e10, 2e10),
        l3_bytes_per_s=rng.uniform(2e9, 4e9),
        l4_bytes_per_s=rng.uniform(1e9, 2e9),
        l3_latency_s=rng.uniform(1e-5, 1e-4),
        l3_queued_bytes=rng.randrange(1 << 28),
        prefill_token_s=rng.uniform(1e-4, 2e-4),
        prefill_pair_s=rng.uniform(1e-9, 2e-9),
        prefill_step_s=0.01,
        step_tokens=2_048,
        decode_step_s=0.02,
        decodes_running=rng.randrange(8),
    )


def _near(nodes: int, rng: random.Random) -> dict[NodeId, CachedPrefix]:
    return {
        NodeId(f"node-{at}"): CachedPrefix(rng.randrange(60), rng.randrange(60, 100))
        for at in rng.sample(range(nodes), max(1, nodes // 3))
    }


if __name__ == "__main__":
    main()

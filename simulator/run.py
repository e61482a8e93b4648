"""Answers a question about a trace; the only module that combines the simulator's parts.

Called by ``tierkv simulate`` and by benchmarks. dbfront/databases/simulations.py runs this module
as a separate process, so minutes of computing neither slow the front down nor outlive a cancelled
statement. Equal questions get equal answers; the duration of the simulation is not part of an
answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.kvcore.errors import TierKVError
from tierkv.simulator.cache_replay import replay
from tierkv.simulator.cluster import Cluster
from tierkv.simulator.nodes.serving_model import load_constants
from tierkv.simulator.options import CacheQuestion, SimulationRequest, parse
from tierkv.simulator.results import ResultLedger
from tierkv.simulator.sizing import load_prices, pool_worth
from tierkv.simulator.trace import Trace, load_trace
from tierkv.simulator.workload import make_workload

Metric = float | int | str | None
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SimulationAnswer:
    """Result of a simulation.

    Attributes:
        metrics: metrics by name, in reading order.
        ledger: ledger of the cluster; None without a cluster.
        trace: the replayed trace.
        notes: sentences for people, for example about refused lines.
    """

    metrics: dict[str, Metric]
    ledger: ResultLedger | None
    trace: Trace
    notes: tuple[str, ...] = ()


def simulate(
    path: Path,
    request: SimulationRequest,
    *,
    progress: Progress | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> SimulationAnswer:
    """Replay a trace.

    Args:
        path: JSON lines in Mooncake's format, plain or zstd.
        request: the question.
        progress: called with the finished and the total number of requests.
        told: called with a line about each cluster tried for the cost.

    Raises:
        UserError: the trace or a constants file can't be used, or no cluster meets the SLO.
    """
    trace = load_trace(path)
    metrics: dict[str, Metric] = {
        "block_references": trace.block_references,
        "unique_blocks": trace.unique_blocks,
        "refused_lines": trace.refused_lines,
    }
    ledger = None
    if request.cache is not None:
        metrics = _replay(trace, request.cache, progress) | metrics
    else:
        found, ledger = _cluster(trace, request, progress, told)
        metrics = found | metrics
    return SimulationAnswer(metrics, ledger, trace, _notes(trace))


def _replay(trace: Trace, question: CacheQuestion, progress: Progress | None) -> dict[str, Metric]:
    result = replay(
        trace.requests,
        question.policy,
        question.capacity_blocks,
        seed=question.seed,
        progress=progress,
        block_tokens=question.block_tokens,
    )
    return {
        "policy": question.policy,
        "capacity_blocks": question.capacity_blocks,
        "block_hit_rate": result.block_hit_rate,
        "token_hit_rate": result.token_hit_rate,
        "requests": len(trace.requests),
    }


def _cluster(
    trace: Trace,
    request: SimulationRequest,
    progress: Progress | None,
    told: Callable[[str], None],
) -> tuple[dict[str, Metric], ResultLedger | None]:
    options = request.cluster
    assert options is not None
    constants = load_constants(request.constants)
    workload = make_workload(trace.requests, block_tokens=options.block_tokens, speed=options.speed)
    metrics: dict[str, Metric] = {
        "router": options.router.value,
        "policy": options.policy,
        "model": options.model,
    }
    ledger = None
    if request.simulates_nodes:
        ledger = Cluster(workload, options, constants).run(progress)
        metrics |= {"nodes": options.nodes, **ledger.summary(options.slo_s)}
    if request.cost is not None:
        prices = load_prices(request.cost.prices)
        regions = prices.regions(request.cost.regions)
        worth = pool_worth(
            workload, options, constants, slo_share=request.cost.slo_share, told=told
        )
        metrics |= {
            "nodes_without_pool": worth.nodes_without,
            "nodes_with_pool": worth.nodes_with,
            "nodes_saved": worth.nodes_saved,
            "currency": prices.currency,
        }
        for region in regions:
            price = prices.per_gb_month[region] * options.pool_gb
            metrics[f"pool_per_month_{region}"] = price
            saved = worth.nodes_saved
            metrics[f"per_node_saved_{region}"] = price / saved if saved > 0 else None
    return metrics, ledger


def _notes(trace: Trace) -> tuple[str, ...]:
    if not trace.refused_lines:
        return ()
    first = "; ".join(f"line {bad.line}: {bad.reason}" for bad in trace.refused[:3])
    return (f"{trace.refused_lines} lines were refused: {first}",)


NICENESS = 10
"""The front and other processes of the machine go first."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics or the error of a question; exit when the asking process is gone.

    Question and answer are JSON objects. ``asker`` is the id of the waiting process.
    """

    def still_asked(*said: object) -> None:
        if os.getppid() != question["asker"]:
            sys.exit("whoever asked is gone")

    try:
        request = parse(question["options"])
        found = simulate(Path(question["trace"]), request, progress=still_asked, told=still_asked)
    except TierKVError as error:
        return {"error": {"message": error.message, "detail": error.detail, "hint": error.hint}}
    return {"metrics": found.metrics, "notes": found.notes}


def main() -> None:
    """Answer the question on standard input on standard output."""
    os.nice(NICENESS)
    json.dump(answer(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()

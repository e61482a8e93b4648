"""``tierkv simulate``: replay a trace through one cache or a whole cluster in virtual time.

Registered by tierkv/cli.py. simulator/options.py checks combinations of options, also for the SQL
function. This file only declares the options and prints the answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ConfigError
from tierkv.output import make_bar

if TYPE_CHECKING:
    from tierkv.simulator.options import SimulationRequest
    from tierkv.simulator.run import Metric, Progress, SimulationAnswer


class TextOrJson(StrEnum):
    """Format of the printed answer."""

    TEXT = "text"
    JSON = "json"


PLOT_SHARES = (1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Sizes in the plot of --plot for one cache, as shares of the requested size."""

Trace = Annotated[
    Path, typer.Argument(help="JSON lines in Mooncake's format, plain or .zst.", metavar="TRACE")
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="Eviction policy: default, leaf_lru; for one cache also lru, lfu, arc, fifo, ttl, "
        "s3fifo, lhd, belady."
    ),
]
CapacityBlocks = Annotated[
    int | None, typer.Option(help="Replay through one cache of N blocks.", metavar="N")
]
Nodes = Annotated[int | None, typer.Option(help="Simulate a cluster of N nodes.", metavar="N")]
Router = Annotated[
    str | None,
    typer.Option(
        help="Router: tierkv (default), random, round_robin, least_work, sticky, dynamo, conductor."
    ),
]
LocalGb = Annotated[float | None, typer.Option(help="KV memory of each node in GB (1000).")]
PoolGb = Annotated[float | None, typer.Option(help="Memory of the shared pool in GB (none).")]
PoolGbps = Annotated[
    float | None, typer.Option(help="Bandwidth of the pool in GB/s, all nodes together.")
]
GateOption = Annotated[
    str | None,
    typer.Option(
        help="What the choice between loading and recomputing knows of the pool's queue: live "
        "(default: node and router know the queue), node (only the node), blind (neither); off: "
        "all KV found is loaded."
    ),
]
ClosedLoop = Annotated[
    bool, typer.Option("--closed-loop", help="A session sends its next request after the answer.")
]
Speed = Annotated[float | None, typer.Option(help="Divisor of timestamps: 2 doubles the load (1).")]
Slo = Annotated[float | None, typer.Option(help="Target time to first token in s.", metavar="S")]
Reserve = Annotated[
    bool,
    typer.Option("--reserve/--no-reserve", help="Keep a request's blocks until its first token."),
]
Model = Annotated[str | None, typer.Option(help="Model and machine (dense-70b-h20).")]
ConstantsFile = Annotated[
    Path | None, typer.Option("--constants", help="TOML file like simulator/models.toml.")
]
BlockTokens = Annotated[int | None, typer.Option(help="Tokens per block id of the trace (512).")]
Cost = Annotated[
    bool,
    typer.Option("--cost", help="Find the nodes a pool saves, and its price per saved node."),
]
Region = Annotated[
    list[str] | None, typer.Option(help="Region of the price list; may be repeated (all).")
]
SloShare = Annotated[
    float | None, typer.Option(help="Share of requests that must meet --slo, for --cost (0.9).")
]
Prices = Annotated[Path | None, typer.Option(help="TOML file like simulator/prices.toml.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all random choices (0).")]
Plot = Annotated[
    Path | None, typer.Option(help="Also draw a plot to this file: .svg, .png or .pdf.")
]
Format = Annotated[TextOrJson, typer.Option("--format", help="Output format.")]


def simulate(
    trace: Trace,
    policy: Policy = None,
    capacity_blocks: CapacityBlocks = None,
    nodes: Nodes = None,
    router: Router = None,
    local_gb: LocalGb = None,
    pool_gb: PoolGb = None,
    pool_gbps: PoolGbps = None,
    gate: GateOption = None,
    closed_loop: ClosedLoop = False,
    speed: Speed = None,
    slo: Slo = None,
    reserve: Reserve = True,
    model: Model = None,
    constants: ConstantsFile = None,
    block_tokens: BlockTokens = None,
    cost: Cost = False,
    region: Region = None,
    slo_share: SloShare = None,
    prices: Prices = None,
    seed: Seed = None,
    plot: Plot = None,
    output: Format = TextOrJson.TEXT,
) -> None:
    """Replay a trace through one cache, or through a cluster, in virtual time.

    Hit rates of one cache:

        tierkv simulate trace.jsonl.zst --policy default --capacity-blocks 20000

    Times to first token of a cluster, hits and moved bytes:

        tierkv simulate trace.jsonl.zst --nodes 8 --local-gb 1000 --pool-gb 4000 --pool-gbps 20

    Nodes saved by a pool, and its price per saved node:

        tierkv simulate trace.jsonl.zst --cost --slo 5 --pool-gb 4000 --pool-gbps 20

    An agent sends its next request after the previous answer: give --closed-loop for traces of
    agents. docs/simulate.md describes the model and its limits.
    """
    given = {name: value for name, value in locals().items() if name not in _OWN}
    # A switch at its default counts as not given: a cache has no reservations to turn off.
    for switch, default in (("closed_loop", False), ("cost", False), ("reserve", True)):
        if given[switch] is default:
            del given[switch]
    run(trace, given, plot=plot, output=output)


_OWN = frozenset({"trace", "plot", "output"})


def run(trace: Path, given: Mapping[str, Any], *, plot: Path | None, output: TextOrJson) -> None:
    """Answer one question and print the answer.

    Raises:
        UserError: an option, the trace or a file can't be used.
    """
    from tierkv.simulator.options import parse  # Importing the command should cost nothing.
    from tierkv.simulator.run import simulate as answer_question

    if not trace.is_file():
        raise ConfigError(f"trace {trace} can't be read: there is no such file")
    request = parse({name: _given(value) for name, value in given.items()})
    if plot is not None:
        _check_plot(plot, request)
    clock = SystemClock()
    started = clock.now()
    with _bar("requests") as progress:
        answer = answer_question(trace, request, progress=progress, told=_tell)
    for note in answer.notes:
        typer.echo(f"note: {note}", err=True)
    if plot is not None:
        _draw(plot, answer, request)
    if output is TextOrJson.JSON:
        typer.echo(json.dumps(answer.metrics, indent=2))
        return
    typer.echo(render(answer.metrics), nl=False)
    took_s = max(1e-9, clock.now() - started)
    references = int(answer.metrics["block_references"] or 0)
    typer.echo(f"{references:,} block references in {took_s:.1f} s", err=True)


def render(metrics: Mapping[str, Metric]) -> str:
    """Return metrics as lines of name and value; a missing value is a dash."""
    width = max(map(len, metrics))
    return "".join(f"{name:<{width}}  {_shown(value)}\n" for name, value in metrics.items())


def _shown(value: Metric) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def _given(value: Any) -> Any:
    """Return None for an empty list: a repeatable option was not given."""
    return None if value == [] else value


def _tell(line: str) -> None:
    typer.echo(f"  {line}", err=True)


@contextmanager
def _bar(label: str) -> Iterator[Progress | None]:
    """Show a bar on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    with make_bar() as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _check_plot(file: Path, request: SimulationRequest) -> None:
    """Refuse at once a plot that would fail after minutes."""
    from tierkv.simulator.plot import check_format

    if request.cluster is not None and not request.simulates_nodes:
        raise ConfigError("--plot draws one cluster: add --nodes N, or leave --plot out")
    check_format(file)


def _draw(file: Path, answer: SimulationAnswer, request: SimulationRequest) -> None:
    from tierkv.simulator.plot import plot_cluster, plot_hit_rates

    if answer.ledger is not None:
        title = f"{answer.metrics['nodes']} nodes, router {answer.metrics['router']}"
        ledger = answer.ledger
        plot_cluster(file, ledger.arrivals_s, ledger.ttfts_s, title=title)
        return
    from tierkv.simulator.cache_replay import replay

    cache = request.cache
    assert cache is not None
    sizes = sorted({max(1, int(share * cache.capacity_blocks)) for share in PLOT_SHARES})
    requests = answer.trace.requests
    rates = [
        replay(
            requests, cache.policy, size, seed=cache.seed, block_tokens=cache.block_tokens
        ).token_hit_rate
        for size in sizes
    ]
    plot_hit_rates(file, sizes, rates, title=f"policy {cache.policy}")

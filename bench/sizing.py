"""When a pool pays, its size and speed, and the gate's savings: numbers of docs/sizing.md.

``python -m bench.sizing --trace chat.jsonl.zst:open --out FOLDER`` simulates a trace under many
sizes, one value changed at a time, and writes the tables (sizing-chat.md) and a plot
(sizing-chat.svg). docs/sizing.md shows the plot and a choice of the numbers. All time is virtual:
the numbers don't depend on the machine. ``--quick`` takes a seeded trace and few sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import Report, finish, make_parser
from bench.synthetic_trace import agents
from tierkv.simulator.cluster import Cluster
from tierkv.simulator.nodes.serving_model import Constants, load_constants
from tierkv.simulator.options import ClusterOptions, Gate
from tierkv.simulator.plot import new_figure, save_figure
from tierkv.simulator.results import ResultLedger
from tierkv.simulator.sizing import load_prices, pool_worth
from tierkv.simulator.trace import Request, load_trace
from tierkv.simulator.workload import make_workload

SLO_S, SLO_SHARE = 10.0, 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """The experiments with a trace.

    Attributes:
        name: name of the trace.
        requests: requests of the trace.
        cluster: the base configuration, with the pool.
        speeds, local_gbs, gbps, pool_gbs: values to vary, one at a time.
        gate_gbps: bandwidths at which gates are compared.
    """

    name: str
    requests: Sequence[Request]
    cluster: ClusterOptions
    speeds: tuple[float, ...]
    local_gbs: tuple[float, ...]
    gbps: tuple[float, ...]
    pool_gbs: tuple[float, ...]
    gate_gbps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers with column names; the first column is the varied value."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def column(self, name: str) -> list[Any]:
        """Return one column."""
        return [row[self.columns.index(name)] for row in self.rows]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "--:|" * len(self.columns)]
        lines += ["| " + " | ".join(map(_shown, row)) + " |" for row in self.rows]
        return f"**{self.title}**\n\n" + "\n".join(lines)


class Lab:
    """Runs clusters on one trace.

    Attributes:
        plan: the experiments.
        constants: constants of models and nodes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.constants = load_constants()

    def run(self, constants: Constants | None = None, **changes: Any) -> ResultLedger:
        """Run the plan's cluster with several values changed."""
        options = replace(self.plan.cluster, **changes)
        workload = make_workload(
            self.plan.requests, block_tokens=options.block_tokens, speed=options.speed
        )
        ledger = Cluster(workload, options, constants or self.constants).run()
        found = ledger.summary()
        said = f"{changes} mean {found['ttft_mean_s']:.2f} p90 {found['ttft_p90_s']:.2f}"
        print("  ", self.plan.name, said, file=sys.stderr, flush=True)
        return ledger

    def scale(self) -> Table:
        """Nodes needed under growing load, without and with the pool."""
        rows = []
        for speed in self.plan.speeds:
            options = replace(self.plan.cluster, speed=speed, slo_s=SLO_S)
            workload = make_workload(
                self.plan.requests, block_tokens=options.block_tokens, speed=speed
            )
            worth = pool_worth(
                workload,
                options,
                self.constants,
                slo_share=SLO_SHARE,
                told=lambda line: print("  ", line, file=sys.stderr, flush=True),
            )
            price = load_prices().per_gb_month["mainland"] * options.pool_gb
            each = round(price / worth.nodes_saved) if worth.nodes_saved > 0 else None
            rows.append((speed, worth.nodes_without, worth.nodes_with, worth.nodes_saved, each))
        columns = ("load", "nodes, no pool", "nodes, pool", "saved", "CNY/month each, mainland")
        title = f"Fewest nodes with {SLO_SHARE:.0%} of first tokens within {SLO_S:g} s"
        return Table(title, columns, rows)

    def local_size(self) -> Table:
        """Gain from a pool, by the memory on each node."""
        rows = []
        for local_gb in self.plan.local_gbs:
            plain = self.run(local_gb=local_gb, pool_gb=0.0, pool_gbps=0.0)
            pooled = self.run(local_gb=local_gb)
            rows.append((local_gb, *_figures(plain), *_figures(pooled)))
        names = ("mean s", "P90 s", "hit rate")
        columns = ("local GB", *names, *(f"{name}, pool" for name in names))
        return Table("Memory of each node", columns, rows)

    def bandwidth(self) -> Table:
        """Latency and hit rate by the bandwidth of the pool."""
        rows: list[tuple[Any, ...]] = [(0.0, *_figures(self.run(pool_gb=0.0, pool_gbps=0.0)), None)]
        for gbps in self.plan.gbps:
            ledger = self.run(pool_gbps=gbps)
            read = ledger.pool_hit_tokens / max(1, ledger.prompt_tokens)
            rows.append((gbps, *_figures(ledger), round(read, 3)))
        columns = ("GB/s", "mean s", "P90 s", "hit rate", "of it from the pool")
        return Table("Bandwidth of the pool (0: no pool)", columns, rows)

    def pool_size(self) -> Table:
        """Latency and hit rate by the size of the pool, with and without reservations."""
        rows: list[tuple[Any, ...]] = []
        for pool_gb in self.plan.pool_gbs:
            kept = self.run(pool_gb=pool_gb)
            broken = self.run(pool_gb=pool_gb, reserve=False)
            rows.append((pool_gb, *_figures(kept), *_figures(broken)))
        names = ("mean s", "P90 s", "hit rate")
        columns = ("pool GB", *names, *(f"{name}, nothing reserved" for name in names))
        return Table("Memory of the pool", columns, rows)

    def gates(self) -> Table:
        """Savings of a gate that sees the queue, if blocks are written on the local host."""
        local_writes = replace(
            self.constants, cluster=replace(self.constants.cluster, write_share=0.0)
        )
        none = self.run(pool_gb=0.0, pool_gbps=0.0)
        rows = []
        for gbps in self.plan.gate_gbps:
            for gate in Gate:
                ledger = self.run(local_writes, pool_gbps=gbps, gate=gate)
                rows.append((gbps, gate.value, *_figures(ledger)))
            rows.append((gbps, "no pool", *_figures(none)))
        return Table("The gate", ("GB/s", "gate", "mean s", "P90 s", "hit rate"), rows)


def _figures(ledger: ResultLedger) -> tuple[float, float, float]:
    found = ledger.summary()
    names = ("ttft_mean_s", "ttft_p90_s", "token_hit_rate")
    mean_s, p90_s, rate = (float(found[name] or 0.0) for name in names)
    return mean_s, p90_s, round(rate, 3)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def draw(plan: Plan, tables: dict[str, Table], file: Path) -> None:
    """Draw four panels: scale, local size, bandwidth, pool size."""
    figure = new_figure(2)
    figure.set_size_inches(10.4, 6.4)
    scale = figure.add_subplot(2, 2, 1)
    if "scale" in tables:
        loads = tables["scale"].column("load")
        for name in ("nodes, no pool", "nodes, pool"):
            scale.plot(loads, tables["scale"].column(name), "o-", label=name)
        scale.set(title=f"{plan.name}: nodes for the SLO", xlabel="load", ylabel="nodes")
        scale.set_ylim(0, None)
    else:
        figure.delaxes(scale)
    local = figure.add_subplot(2, 2, 2)
    for name, label in (("mean s", "no pool"), ("mean s, pool", "pool")):
        table = tables["local"]
        local.plot(table.column("local GB"), table.column(name), "o-", label=label)
    local.set(title="memory of each node", xlabel="GB", xscale="log", yscale="log")
    width = figure.add_subplot(2, 2, 3)
    table = tables["bandwidth"]
    width.plot(table.column("GB/s")[1:], table.column("mean s")[1:], "o-", label="pool")
    width.axhline(table.column("mean s")[0], color="gray", ls="--", label="no pool")
    width.set(title="bandwidth of the pool", xlabel="GB/s", xscale="log", yscale="log")
    size = figure.add_subplot(2, 2, 4)
    table = tables["pool"]
    size.plot(table.column("pool GB"), table.column("mean s"), "o-", label="reserved")
    size.plot(
        table.column("pool GB"),
        table.column("mean s, nothing reserved"),
        "s--",
        label="not reserved",
    )
    size.axhline(tables["bandwidth"].column("mean s")[0], color="gray", ls="--", label="no pool")
    size.set(title="memory of the pool", xlabel="GB", xscale="log", yscale="log")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in (local, width, size):
        axes.set_ylabel("mean TTFT, s")
    save_figure(figure, file)


def quick_plan(seed: int) -> Plan:
    """Return a small plan that runs in seconds."""
    cluster = ClusterOptions(
        nodes=3, local_gb=200.0, pool_gb=1_000.0, pool_gbps=10.0, closed_loop=True, seed=seed
    )
    return Plan(
        "synthetic", agents(40, seed=seed), cluster, (1.0,), (100.0,), (5.0,), (200.0,), (1.0,)
    )


def trace_plan(argument: str, seed: int) -> Plan:
    """Return the plan of a trace file: ``FILE:open`` or ``FILE:closed``."""
    path, _, kind = argument.rpartition(":")
    if kind not in ("open", "closed") or not path:
        raise SystemExit(f"--trace wants FILE:open or FILE:closed, got {argument!r}")
    requests, name = load_trace(path).requests, Path(path).name.partition(".")[0]
    cluster = ClusterOptions(
        nodes=12, local_gb=1_000.0, pool_gb=10_000.0, pool_gbps=20.0, seed=seed
    )
    sizes: tuple[float, ...] = (100.0, 300.0, 1_000.0, 3_000.0)
    widths: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    pools: tuple[float, ...]
    if kind == "open":
        pools = (300.0, 1_000.0, 3_000.0, 6_000.0, 10_000.0, 20_000.0)
        speeds, gate = (0.1, 0.25, 0.5, 1.0, 2.0), (1.0, 3.0)
    else:
        cluster = replace(cluster, nodes=6, pool_gb=3_000.0, closed_loop=True)
        pools, widths = (1_000.0, 4_000.0), (1.0, 5.0, 20.0)
        sizes, speeds, gate = (500.0, 1_000.0, 3_000.0), (1.0,), ()
    return Plan(name, requests, cluster, speeds, sizes, widths, pools, gate)


def write_tables(plan: Plan, tables: dict[str, Table], folder: Path) -> None:
    """Write the tables as Markdown, and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"sizing-{plan.name}.svg"
    parts = [f"![sizes and times]({picture.name})", *(t.markdown() for t in tables.values())]
    (folder / f"sizing-{plan.name}.md").write_text("\n\n".join(parts) + "\n")
    draw(plan, tables, picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--trace", metavar="FILE:open|closed")
    parser.add_argument("--no-search", action="store_true", help="leave out the fewest nodes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write tables and plot there")
    arguments = parser.parse_args(argv)
    quick = arguments.quick or arguments.trace is None
    plan = quick_plan(arguments.seed) if quick else trace_plan(arguments.trace, arguments.seed)
    lab = Lab(plan)
    tables = {"local": lab.local_size(), "bandwidth": lab.bandwidth(), "pool": lab.pool_size()}
    if plan.gate_gbps:
        tables["gate"] = lab.gates()
    if plan.speeds and not arguments.no_search:
        tables["scale"] = lab.scale()
    if arguments.out is not None:
        write_tables(plan, tables, arguments.out)
    report = Report("sizing")
    for name, table in tables.items():
        for row in table.rows:
            keys = [str(v) for v in row if isinstance(v, str)]
            for column, value in zip(table.columns, row, strict=True):
                if column != table.columns[0] and isinstance(value, int | float):
                    key = ".".join([name, f"{row[0]:g}", *keys, column.replace(" ", "_")])
                    report.metrics[key] = float(value)
    finish(report, arguments.format)


if __name__ == "__main__":
    main()

"""Time to first token of each router, with and without a pool, at three loads, simulated.

``python -m bench.router --quick`` takes a seeded trace; the full run takes recorded traces:
``--trace chat.jsonl.zst:open --trace agents.jsonl.zst:closed``. ``--write-docs`` puts tables and
plot into docs/performance.md. All time is virtual: the numbers don't depend on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.report import Report, finish, make_parser
from bench.synthetic_trace import agents
from tierkv.simulator.cluster import Cluster
from tierkv.simulator.nodes.serving_model import load_constants
from tierkv.simulator.options import ClusterOptions, RouterName
from tierkv.simulator.plot import new_figure, save_figure
from tierkv.simulator.trace import Request, load_trace
from tierkv.simulator.workload import make_workload

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "token_hit_rate", "slo_attainment")
SLO_S = 30.0
"""A first token within this time is good, as in Mooncake's paper (Qin and others 2025)."""

BEGIN, END = "<!-- routers: begin -->", "<!-- routers: end -->"
ORDER = (
    RouterName.TIERKV, RouterName.CONDUCTOR, RouterName.STICKY, RouterName.DYNAMO,
    RouterName.LEAST_WORK, RouterName.ROUND_ROBIN, RouterName.RANDOM,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """A trace, a cluster, and three loads.

    Attributes:
        name: name of the trace.
        requests: requests of the trace.
        cluster: the cluster without a pool.
        pool_gb: size of the pool.
        pool_gbps: bandwidth of the pool's link.
        speeds: three loads.
    """

    name: str
    requests: Sequence[Request]
    cluster: ClusterOptions
    pool_gb: float
    pool_gbps: float
    speeds: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one run."""

    scene: str
    router: RouterName
    pool: bool
    load: int
    mean_s: float
    p50_s: float
    p99_s: float
    hit_rate: float
    attained: float


def quick_scene(seed: int) -> Scene:
    """Return a small trace that runs in seconds."""
    cluster = ClusterOptions(nodes=4, local_gb=300.0, closed_loop=True, seed=seed)
    return Scene("synthetic", agents(60, seed=seed), cluster, 2_000.0, 10.0, (1.0, 2.0, 3.0))


def trace_scene(argument: str, seed: int) -> Scene:
    """Return a scene of a trace file: ``FILE:open`` or ``FILE:closed``."""
    path, _, kind = argument.rpartition(":")
    if kind not in ("open", "closed") or not path:
        raise SystemExit(f"--trace wants FILE:open or FILE:closed, got {argument!r}")
    requests = load_trace(path).requests
    name = Path(path).name.partition(".")[0]
    if kind == "open":
        cluster = ClusterOptions(nodes=10, local_gb=1_000.0, seed=seed)
        return Scene(name, requests, cluster, 10_000.0, 20.0, (0.7, 0.85, 1.0))
    cluster = ClusterOptions(nodes=6, local_gb=1_000.0, closed_loop=True, seed=seed)
    return Scene(name, requests, cluster, 2_000.0, 20.0, (0.7, 1.0, 1.4))


def measure(scene: Scene, routers: Sequence[RouterName] = ORDER) -> list[Cell]:
    """Run every router with and without the pool under each load."""
    constants = load_constants()
    cells: list[Cell] = []
    for load, speed in enumerate(scene.speeds):
        workload = make_workload(
            scene.requests, block_tokens=scene.cluster.block_tokens, speed=speed
        )
        for pool in (False, True):
            sizes = {"pool_gb": scene.pool_gb, "pool_gbps": scene.pool_gbps} if pool else {}
            for router in routers:
                options = replace(scene.cluster, router=router, speed=speed, **sizes)
                found = Cluster(workload, options, constants).run().summary(SLO_S)
                figures = [float(found[name] or 0.0) for name in FIGURES]
                cells.append(Cell(scene.name, router, pool, load, *figures))
                print(f"  {cells[-1]}", file=sys.stderr, flush=True)
    return cells


def table(scene: Scene, cells: Sequence[Cell]) -> str:
    """Return one Markdown table: mean / P99 per router and load, without and with the pool."""
    head = [f"{speed:g}x" for speed in scene.speeds]
    lines = [
        "| router | " + " | ".join(f"no pool, {h}" for h in head) + " | "
        + " | ".join(f"pool, {h}" for h in head) + " |",
        "|---|" + "--:|" * 6,
    ]  # fmt: skip
    for router in ORDER:
        row = [c for c in cells if (c.scene, c.router) == (scene.name, router)]
        row.sort(key=lambda cell: (cell.pool, cell.load))
        if row:
            shown = [f"{seconds(c.mean_s)} / {seconds(c.p99_s)}" for c in row]
            lines.append(f"| {router} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def seconds(value: float) -> str:
    """Return seconds with two significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def draw(scenes: Sequence[Scene], cells: Sequence[Cell], file: Path) -> None:
    """Draw mean TTFT by load, a panel per trace and pool."""
    figure = new_figure(2)
    figure.set_size_inches(10.4, 3.4 * len(scenes))
    for row, scene in enumerate(scenes):
        for pool in (False, True):
            axes = figure.add_subplot(len(scenes), 2, 2 * row + pool + 1)
            for router in ORDER:
                line = [
                    c for c in cells if (c.scene, c.router, c.pool) == (scene.name, router, pool)
                ]
                line.sort(key=lambda cell: cell.load)
                wide = 2.5 if router is RouterName.TIERKV else 1.2
                means = [cell.mean_s for cell in line]
                loads = [scene.speeds[cell.load] for cell in line]
                axes.plot(loads, means, marker="o", ms=3, lw=wide, label=router.value)
            title = f"{scene.name}, {scene.cluster.nodes} nodes, {'pool' if pool else 'no pool'}"
            axes.set(title=title, xlabel="load", ylabel="mean TTFT, s", yscale="log")
            axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    save_figure(figure, file)


def write_docs(scenes: Sequence[Scene], cells: Sequence[Cell]) -> None:
    """Put tables and plot between the markers of docs/performance.md."""
    parts = []
    for scene in scenes:
        cluster = scene.cluster
        loop = "closed loop" if cluster.closed_loop else "open loop"
        parts.append(
            f"**{scene.name}**: {cluster.nodes} nodes of {cluster.local_gb:,.0f} GB, {loop}; pool "
            f"of {scene.pool_gb:,.0f} GB at {scene.pool_gbps:g} GB/s. Mean / P99 TTFT, s.\n\n"
            + table(scene, cells)
        )
    file = DOCS / "performance.md"
    text = file.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n\n".join([*parts, "![mean TTFT by router and load](routers.svg)"])
    file.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}")
    draw(scenes, cells, DOCS / "routers.svg")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE:open|closed")
    parser.add_argument(
        "--noise", action="store_true", help="nodes don't take the predicted time, news comes late"
    )
    parser.add_argument("--router", action="append", type=RouterName, choices=ORDER, default=[])
    parser.add_argument("--write-docs", action="store_true", help="update docs/performance.md")
    arguments = parser.parse_args(argv)
    if arguments.quick or not arguments.trace:
        scenes = [quick_scene(arguments.seed)]
    else:
        scenes = [trace_scene(argument, arguments.seed) for argument in arguments.trace]
    report = Report("router")
    if arguments.noise:
        scenes = [replace(s, cluster=replace(s.cluster, noise=True)) for s in scenes]
    routers = arguments.router or ORDER
    cells = [cell for scene in scenes for cell in measure(scene, routers)]
    for cell in cells:
        name = (
            f"{cell.scene}.{cell.router}.{'pool' if cell.pool else 'no_pool'}.load{cell.load + 1}"
        )
        report.metrics[f"{name}.ttft_mean_s"] = cell.mean_s
        report.metrics[f"{name}.ttft_p50_s"] = cell.p50_s
        report.metrics[f"{name}.ttft_p99_s"] = cell.p99_s
        report.metrics[f"{name}.token_hit_rate"] = cell.hit_rate
        report.metrics[f"{name}.slo_attainment"] = cell.attained
    if arguments.write_docs:
        write_docs(scenes, cells)
    finish(report, arguments.format)


if __name__ == "__main__":
    main()

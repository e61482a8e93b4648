"""``tierkv status``: the nodes of the cluster, their load, and the cache's results.

The command takes the meta server's address from the file that ``tierkv up`` leaves in run_dir, or
from ``cluster.meta_address``. The views ``tierkv.nodes`` and ``tierkv.stat_kvcache_node`` have the
same rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from tierkv.commands.on_ray import reports
from tierkv.config import load_config
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError
from tierkv.kvcore.node import TierStats
from tierkv.metaserver.client import DirectoryNode
from tierkv.metaserver.several_meta import connect_meta
from tierkv.output import OutputFormat, render_rows
from tierkv.parts.access import cluster_access
from tierkv.processes.cluster_files import CONFIG_FILE, CURE, STATE_FILE, orphans_text
from tierkv.settings import Settings

COLUMNS = (
    Column("node", "VARCHAR"),
    Column("role", "VARCHAR"),
    Column("host", "VARCHAR"),
    Column("state", "VARCHAR"),
    Column("running", "INTEGER"),
    Column("waiting", "INTEGER"),
    Column("kv_used", "VARCHAR"),
    Column("hit_tokens", "INTEGER"),
    Column("cache_errors", "INTEGER"),
    Column("models", "VARCHAR"),
    Column("paths", "VARCHAR"),
    Column("tiers", "VARCHAR"),
    Column("notes", "VARCHAR"),
)

RAY_COLUMNS = (
    Column("ray_node", "VARCHAR"),
    Column("restarts", "INTEGER"),
    Column("why", "VARCHAR"),
)
"""Of a cluster on Ray: where Ray placed a node, how often it began again, why it does not run."""


async def print_status(settings: Settings, output: OutputFormat) -> int:
    """Print one row per node; return 1 if no cluster answers.

    Raises:
        ConfigError: no cluster is known here.
    """
    settings, state = find_cluster(settings)
    # Meta servers on Ray may have moved since the file was written.
    moved, told = reports(state["ray"]) if "ray" in state else ("", ())
    address = moved or settings.cluster.meta_address
    access = cluster_access(settings.cluster)
    meta = connect_meta(address, token=access.token, tls=access.tls)
    try:
        nodes = await meta.list_nodes()
    except DirectoryUnavailableError as error:
        # The error has a hint if the server answered but refused, for example with a wrong token.
        why = error.message if error.hint else f"no meta server answers at {address}"
        typer.secho(f"tierkv: {why}", fg="red", err=True)
        if error.hint:
            typer.echo(f"  {error.hint}", err=True)
        return 1
    finally:
        await meta.close()
    rows = {str(node.info.node_id): _row(node) for node in nodes}
    columns: tuple[Column, ...] = COLUMNS
    if "ray" in state:
        columns = (*COLUMNS, *RAY_COLUMNS)
        rows = {name: (*row, None, None, None) for name, row in rows.items()}
        for each in told:
            unlisted = (each.name, each.role, None, each.state, *[None] * (len(COLUMNS) - 4))
            known = rows.get(each.name, unlisted)[: len(COLUMNS)]
            rows[each.name] = (*known, each.ray_node[:12], each.restarts, each.why)
    sys.stdout.write(render_rows(columns, [rows[name] for name in sorted(rows)], output))
    front = state.get("nodes", {}).get("front")
    if front and output is OutputFormat.TABLE:
        _tell_left(settings)
        typer.echo(f"SQL {front['pg']}   REST http://{front['http']}/v1   pid {state['pid']}")
    return 0


def _tell_left(settings: Settings) -> None:
    if orphans := orphans_text(settings):
        typer.echo(f"left in memory: {orphans}; `{CURE}` frees it")


def find_cluster(settings: Settings) -> tuple[Settings, dict[str, Any]]:
    """Use the given meta address, or the files left by ``tierkv up`` in run_dir."""
    if settings.cluster.meta_address:
        return settings, {}
    run_dir = settings.cluster.run_dir.expanduser()
    file = run_dir / STATE_FILE
    if not file.exists():
        raise ConfigError(
            f"no cluster is running from {run_dir}",
            hint="Start one with `tierkv up`, or give --set cluster.meta_address=HOST:PORT.",
        )
    state: dict[str, Any] = json.loads(file.read_text())
    return load_config(Path(run_dir / CONFIG_FILE), environ={}).settings, state


def _row(node: DirectoryNode) -> tuple[Any, ...]:
    load, report = node.report.load, node.report
    return (
        node.info.node_id,
        node.info.role.value,
        node.info.host,
        node.state,
        load.requests_running,
        load.requests_waiting,
        f"{load.kv_usage:.0%}",
        sum(tier.hit_tokens for tier in report.tiers),
        sum(count for _, count in report.cache_errors),
        ", ".join(model.name for model in node.info.models),
        "; ".join(map(str, report.paths)),
        "; ".join(_tier(tier) for tier in report.tiers if tier.capacity_bytes),
        "; ".join(node.notes),
    )


def _tier(tier: TierStats) -> str:
    """Return a tier's name, medium (with quarantined slots or a broken disk) and filled share."""
    return f"{tier.tier} {tier.medium} {tier.used_bytes / tier.capacity_bytes:.0%}"

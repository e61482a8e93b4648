"""``tierkv pool``: put, get and stats of a memory pool from the command line.

A thin layer over tierkv.dmp.client.pool.Pool; the token is ``cluster.token``. For manual
inspection; programs use the class.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from tierkv.dbfront.statement_results import Column
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.values import PoolMember
from tierkv.kvcore.errors import ConfigError
from tierkv.output import OutputFormat, render_rows
from tierkv.parts.access import cluster_access
from tierkv.parts.parts import path_options
from tierkv.settings import Settings

COLUMNS = (
    Column("node", "VARCHAR"),
    Column("address", "VARCHAR"),
    Column("path", "VARCHAR"),
    Column("why", "VARCHAR"),
    Column("capacity_bytes", "BIGINT"),
    Column("used_bytes", "BIGINT"),
    Column("blocks", "BIGINT"),
    Column("evicted", "BIGINT"),
    Column("refused", "BIGINT"),
    Column("leased", "BIGINT"),
    Column("quarantined", "BIGINT"),
    Column("read_bytes", "BIGINT"),
    Column("write_bytes", "BIGINT"),
    Column("disk_used_bytes", "BIGINT"),
    Column("disk_blocks", "BIGINT"),
    Column("disk_errors", "BIGINT"),
)


def print_stats(settings: Settings, addresses: str, output: OutputFormat) -> None:
    """Print one row per node."""
    with _connect(settings, addresses) as pool:
        rows = [_row(member) for member in pool.stats().members]
    sys.stdout.write(render_rows(COLUMNS, rows, output))


def put(settings: Settings, addresses: str, key: str, file: Path) -> int:
    """Store a file; return 1 if no node accepted the file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from error
    with _connect(settings, addresses) as pool:
        try:
            stored = pool.put(key, data)
        except ValueError as error:
            raise ConfigError(f"{file} can't be stored: {error}") from error
    if not stored:
        typer.secho(f"tierkv: no node has room for {len(data)} bytes", fg="red", err=True)
        typer.secho("  a node stores values of at most 32 MiB, minus checksums", err=True)
    return 0 if stored else 1


def get(settings: Settings, addresses: str, key: str, file: Path | None) -> int:
    """Write a value to a file or standard output; return 1 if the key is missing."""
    with _connect(settings, addresses) as pool:
        data = pool.get(key)
    if data is None:
        typer.secho(f"tierkv: {key!r} is not in the pool", fg="red", err=True)
        return 1
    if file is None:
        sys.stdout.buffer.write(data)
    else:
        file.write_bytes(data)
    return 0


def _connect(settings: Settings, addresses: str) -> Pool:
    options = path_options(settings)
    return Pool.connect(
        addresses,
        token=cluster_access(settings.cluster).token or "",
        transport=options.transport,
        tls=options.tls,
        rdma_devices=options.rdma_devices,
    )


def _row(member: PoolMember) -> tuple[Any, ...]:
    s = member.stats
    counters = (
        (None,) * (len(COLUMNS) - 4)
        if s is None
        else (
            s.memory.capacity_bytes,
            s.memory.used_bytes,
            s.memory.blocks_used,
            s.memory.evicted_blocks,
            s.refused_puts,
            s.leased_blocks,
            s.quarantined_slots,
            s.memory.read_bytes,
            s.memory.write_bytes,
            s.disk.used_bytes,
            s.disk.blocks_used,
            s.disk.alloc_failures,
        )
    )
    return (member.node_id, member.address, member.path.transport, member.path.reason, *counters)

"""The relay against direct PostgreSQL: pgbench -S, a large SELECT, and an UPDATE with AI calls.

Called by ``python -m bench.sql --relay``. Direct and relayed runs take turns, and the median of
each is reported. The relay runs in this process; clients and the server run in separate processes.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping

import psycopg

from bench.report import Report
from tests.fix_postgres import (
    PASSWORD,
    USER,
    PostgresServer,
    RunningRelay,
    attendants,
    running_postgres,
    running_relay,
)
from tests.fix_sql import InstantGenerator
from tierkv.dbfront.postgres.install import install

TURNS = 3


def measure(report: Report, *, quick: bool) -> None:
    """Add the relay's metrics."""
    with running_postgres() as postgres:
        asyncio.run(install(postgres.dsn))
        settings = {"tierkv.max_calls": "0", "tierkv.max_concurrency": "256"}
        generator = InstantGenerator()
        with running_relay(postgres.dsn, attendants(generator), session_defaults=settings) as relay:
            _pgbench(report, postgres, relay, quick)
            _select(report, postgres, relay, 100_000 if quick else 1_000_000)
            _update(report, relay, 5_000 if quick else 100_000)


def _environment(postgres: PostgresServer, port: int) -> dict[str, str]:
    return {
        "PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": USER, "PGPASSWORD": PASSWORD,
        "PGDATABASE": "app", "PATH": f"{postgres.programs}:/usr/bin:/bin",
    }  # fmt: skip


def _in_turns(measured: Callable[[int], float], ports: tuple[int, int]) -> tuple[float, float]:
    """Return the median of a measurement by port, taken in turns."""
    found: dict[int, list[float]] = {port: [] for port in ports}
    for _ in range(TURNS):
        for port in ports:
            found[port].append(measured(port))
    direct, relayed = (statistics.median(found[port]) for port in ports)
    return direct, relayed


def _pgbench(report: Report, postgres: PostgresServer, relay: RunningRelay, quick: bool) -> None:
    ports = (postgres.port, relay.port)
    _run(["pgbench", "-i", "-q", "-s", "1" if quick else "10"], _environment(postgres, ports[0]))
    seconds = "2" if quick else "8"
    for clients in (1, 8):
        for mode in ("simple", "prepared"):
            command = ["pgbench", "-S", "-n", "-M", mode, "-T", seconds, "-c", str(clients)]

            def rate(port: int, command: list[str] = command) -> float:
                out = _run(command, _environment(postgres, port))
                found = re.search(r"tps = ([\d.]+)", out)
                assert found is not None, out
                return float(found[1])

            direct, relayed = _in_turns(rate, ports)
            name = f"relay_pgbench_{mode}_{clients}"
            report.add(f"{name}_tps", relayed)
            report.add(f"{name}_of_direct", relayed / direct)


def _select(report: Report, postgres: PostgresServer, relay: RunningRelay, rows: int) -> None:
    ports = (postgres.port, relay.port)
    _psql(
        f"CREATE TABLE wide AS SELECT i, md5(i::text) AS a, md5((i + 1)::text) AS b "
        f"FROM generate_series(1, {rows}) i",
        _environment(postgres, ports[0]),
    )
    for name, text in (("select", "SELECT * FROM wide"), ("copy", "COPY wide TO STDOUT")):

        def rate(port: int, text: str = text) -> float:
            started = time.perf_counter()
            _psql(text, _environment(postgres, port))
            return rows / (time.perf_counter() - started)

        direct, relayed = _in_turns(rate, ports)
        report.add(f"relay_{name}_rows_per_s", relayed)
        report.add(f"relay_{name}_of_direct", relayed / direct)


def _update(report: Report, relay: RunningRelay, rows: int) -> None:
    """Update all rows of a table with immediate answers to a fifth as many prompts."""
    prompts = rows // 5
    with psycopg.connect(relay.dsn, autocommit=True) as connection:
        connection.execute(
            f"CREATE TABLE notes AS SELECT i AS id, 'note ' || (i % {prompts}) AS body "
            f"FROM generate_series(1, {rows}) i"
        )
        started = time.perf_counter()
        connection.execute("UPDATE notes SET body = lower(body)")
        plain_s = time.perf_counter() - started
        started = time.perf_counter()
        done = connection.execute("UPDATE notes SET body = ai_generate(body)")
        update_s = time.perf_counter() - started
        assert done.rowcount == rows
    report.add("relay_update_rows", rows)
    report.add("relay_update_distinct_prompts", prompts)
    report.add("relay_update_s", update_s)
    report.add("relay_update_rows_per_s", rows / update_s)
    report.add("relay_update_plain_s", plain_s)


def _psql(text: str, environment: Mapping[str, str]) -> None:
    _run(["psql", "-qAtX", "-o", "/dev/null", "-c", text], environment)


def _run(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""``SELECT * FROM tierkv.simulate(...)``: rows, bounds on files, cancelling, clear errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tierkv.dbfront.databases.duckdb_connection import DuckDbConnection
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig, DuckDbEngine
from tierkv.kvcore.errors import (
    ConfigError,
    OverloadedError,
    SqlError,
    TierKVError,
    UdfArgumentError,
)

pytestmark = pytest.mark.integration
LINES = [
    {
        "timestamp": 500 * n,
        "input_length": 1100,
        "output_length": 4,
        "hash_ids": [n % 4, 10 + n % 8],
    }
    for n in range(40)
]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Return a folder with a small trace, a long one, and a link that leads out."""
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "small.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    (folder / "long.jsonl").write_text(("\n".join(map(json.dumps, LINES)) + "\n") * 500)
    (tmp_path / "secret.jsonl").write_text(json.dumps(LINES[0]))
    (folder / "out.jsonl").symlink_to(tmp_path / "secret.jsonl")
    return folder


@asynccontextmanager
async def engine(**config: Any) -> AsyncIterator[DuckDbEngine]:
    made = DuckDbEngine(DuckDbConfig(threads=1, **config))
    try:
        yield made
    finally:
        made.close()


@asynccontextmanager
async def connected(**config: Any) -> AsyncIterator[DuckDbConnection]:
    async with engine(**config) as made:
        connection = made.connect()
        try:
            yield connection
        finally:
            await connection.close()


async def rows(connection: DuckDbConnection, call: str) -> dict[str, Any]:
    result = await connection.command(f"SELECT metric, value FROM {call}")
    return dict(result.rows)


async def test_metrics_come_as_rows_and_join_with_tables(traces: Path) -> None:
    async with connected(trace_dir=str(traces)) as connection:
        told = await rows(
            connection,
            "tierkv.simulate('small.jsonl', nodes => 2, router => 'dynamo', slo => 0.5)",
        )
        assert told["requests"] == 40.0
        assert told["computed_tokens"] + told["local_hit_tokens"] == told["prompt_tokens"]
        assert 0.0 <= told["slo_attainment"] <= 1.0
        assert told["prompt_tokens"] == 40 * 1100
        cache = await rows(
            connection, "tierkv.simulate('small.jsonl', capacity_blocks => 100, policy => 'lru')"
        )
        assert cache["block_hit_rate"] == pytest.approx((80 - 12) / 80)
        result = await connection.command(
            "SELECT n, value FROM (SELECT unnest([1, 2]) AS n), LATERAL (SELECT * FROM "
            "tierkv.simulate('small.jsonl', nodes => n)) WHERE metric = 'requests' ORDER BY n"
        )
        assert result.rows == [(1, 40.0), (2, 40.0)]


async def test_planning_simulates_nothing(traces: Path) -> None:
    async with connected(trace_dir=str(traces)) as connection:
        result = await connection.command("DESCRIBE SELECT * FROM tierkv.simulate('none.jsonl')")
        assert [row[:2] for row in result.rows] == [("metric", "VARCHAR"), ("value", "DOUBLE")]


async def test_without_a_folder_no_file_is_read() -> None:
    async with connected() as connection:
        with pytest.raises(ConfigError, match=r"front\.trace_dir is not set") as refused:
            await rows(connection, "tierkv.simulate('small.jsonl', nodes => 1)")
        assert "Set front.trace_dir" in refused.value.hint


@pytest.mark.parametrize("name", ["../secret.jsonl", "/etc/passwd", "out.jsonl", ""])
async def test_files_elsewhere_are_refused(traces: Path, name: str) -> None:
    async with connected(trace_dir=str(traces)) as connection:
        with pytest.raises(UdfArgumentError, match=r"not in front\.trace_dir|needs the name"):
            await rows(connection, f"tierkv.simulate('{name}', nodes => 1)")


async def test_in_ones_own_process_any_file_may_be_read(traces: Path) -> None:
    async with connected(sandbox=False) as connection:
        told = await rows(connection, f"tierkv.simulate('{traces}/out.jsonl', nodes => 1)")
        assert told["requests"] == 1.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("tierkv.simulate('small.jsonl')", "capacity_blocks N for one cache, or nodes N"),
        ("tierkv.simulate('small.jsonl', nodes => 1, pool_gb => 5)", "pool_gb needs pool_gbps"),
        ("tierkv.simulate('small.jsonl', nodes => 1, router => 'x')", "unknown router 'x'"),
        ("tierkv.simulate('none.jsonl', nodes => 1)", "can't be read"),
    ],
)
async def test_bad_questions_are_told_in_sqls_words(traces: Path, call: str, says: str) -> None:
    async with connected(trace_dir=str(traces)) as connection:
        with pytest.raises(UdfArgumentError) as refused:
            await rows(connection, call)
        assert says in refused.value.message
        assert refused.value.sqlstate == "22023"
        assert (await connection.command("SELECT 1")).rows == [(1,)]


async def test_options_that_name_files_are_not_sqls(traces: Path) -> None:
    async with connected(trace_dir=str(traces)) as connection:
        with pytest.raises(UdfArgumentError, match="has no option 'constants'"):
            options = json.dumps({"nodes": 1, "constants": "/etc/passwd"})
            await connection.command(f"SELECT tierkv_simulate(1, 'small.jsonl', '{options}')")
        with pytest.raises(SqlError, match="simulate"):
            await rows(connection, "tierkv.simulate('small.jsonl', prices => '/etc/passwd')")


async def test_cancelling_ends_the_child_and_a_third_is_told_to_come_back(traces: Path) -> None:
    long = "SELECT * FROM tierkv.simulate('long.jsonl', nodes => 8)"
    async with engine(trace_dir=str(traces)) as made:
        connections = [made.connect() for _ in range(3)]
        running = [asyncio.create_task(c.command(long)) for c in connections[:2]]
        async with asyncio.timeout(30):
            while len(made.simulations.running_sessions()) < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match="already running, which is the maximum"):
            await connections[2].command(long)
        for task in running:
            task.cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError | TierKVError) for end in ended)
        assert made.simulations.running_sessions() == ()
        assert (await connections[0].command("SELECT 1")).rows == [(1,)]
        for connection in connections:
            await connection.close()


async def test_a_simulation_ends_when_its_front_is_gone(traces: Path) -> None:
    trace = str(traces / "long.jsonl")
    front = (
        "import json, os, subprocess, sys\n"
        "from subprocess import DEVNULL, PIPE\n"
        "call = [sys.executable, '-m', 'simulator']\n"
        "child = subprocess.Popen(call, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)\n"
        f"question = {{'trace': {trace!r}, 'options': {{'nodes': 8}}, 'asker': os.getpid()}}\n"
        "child.stdin.write(json.dumps(question).encode()); child.stdin.close()\n"
        "print(child.pid, flush=True)"
    )
    call = [sys.executable, "-c", front]
    made = await asyncio.to_thread(subprocess.run, call, capture_output=True, text=True, check=True)
    child = Path(f"/proc/{int(made.stdout)}")
    async with asyncio.timeout(60):
        while child.exists():
            await asyncio.sleep(0.05)

"""What ``tierkv sql`` and ``tierkv.connect()`` start, and when: nothing before a call needs it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.config import load_config
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.embedded import EmbeddedCluster
from tierkv.kvcore.errors import CancelledByUserError, ConfigError, ModelFolderError, NoNodeError
from tierkv.parts.served_models import model_folder
from tierkv.settings import ComputeSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SMALL: dict[str, Any] = {"dmp.capacity": "64MiB", "compute.threads": 1}
ASK = "SELECT ai_generate('Mia Brandt bought a kettle. Question: What did she buy?')"
IDLE_BYTES = 600 << 20


@asynccontextmanager
async def started(
    *, on_load: Callable[[str], None] | None = None, **settings: Any
) -> AsyncIterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(load_config(flags=SMALL | settings, environ={}), on_load=on_load)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


async def session_of(cluster: EmbeddedCluster) -> DuckDbSession:
    return await cluster.front.database.open_session(ClientInfo(user="ann"))


def modules_of(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tierkv", *arguments],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize("arguments", [("--help",), ("sql", "-c", "SELECT 1")])
def test_what_calls_no_model_imports_nothing_for_it(arguments: tuple[str, ...]) -> None:
    loaded = modules_of(*arguments)
    heavy = {"torch", "grpc", "safetensors", "llguidance", "fastapi", "prometheus_client", "jinja2"}
    assert "tierkv.cli" in loaded
    assert heavy & loaded == set()
    if arguments == ("--help",):
        assert {
            "numpy",
            "duckdb",
            "structlog",
            "tierkv.dbfront.statement.session",
        } & loaded == set()


def test_a_first_answer_imports_no_compiler() -> None:
    loaded = modules_of("sql", "--set", "dmp.capacity=64MiB", "-c", ASK)
    assert "torch" in loaded
    assert {"torch._dynamo", "sympy", "torch.distributed.tensor"} & loaded == set()


def test_an_idle_process_holds_little_memory() -> None:
    script = f"""
import json, tierkv

def kib(name, path):
    rows = [line.split() for line in open(path) if line.startswith(name + ":")]
    return sum(int(row[1]) for row in rows)

def segment_kib():
    total, inside = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            inside = "/tierkv-" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total

with tierkv.connect(compute__threads=1) as c:
    before = segment_kib()
    c.execute({ASK!r})
    print(json.dumps([before, segment_kib(), kib("VmRSS", "/proc/self/status")]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    before, after, resident = (kib << 10 for kib in json.loads(done.stdout))
    assert before == 0
    assert 0 < after <= 64 << 20  # of 1 GiB
    assert resident < IDLE_BYTES


async def test_nothing_runs_before_the_first_call() -> None:
    threads = {thread.name for thread in threading.enumerate()}
    async with started() as cluster:
        session = await session_of(cluster)
        assert (await session.execute("SELECT 1")).rows == [(1,)]
        assert (await session.execute("SELECT count(*) FROM tierkv.queue")).rows == [(0,)]
        assert not cluster.nodes.started
        names = {thread.name for thread in threading.enumerate()} - threads
        assert not [name for name in names if name.startswith(("dmp", "compute", "engine"))]


async def test_views_of_the_cache_work_before_the_first_call() -> None:
    async with started() as cluster:
        session = await session_of(cluster)
        rows = (await session.execute("SELECT hit_tokens FROM tierkv.stat_kvcache")).rows
        assert rows and all(row == (0,) for row in rows)
        nodes = (await session.execute("SELECT node_id FROM tierkv.nodes ORDER BY 1")).rows
        assert nodes == [("compute-0",), ("dmp-0",)]


async def test_calls_that_come_first_together_start_one_node() -> None:
    told: list[str] = []
    async with started(on_load=told.append) as cluster:
        sessions = [await session_of(cluster) for _ in range(3)]
        results = await asyncio.gather(*(session.execute(ASK) for session in sessions))
        assert {result.rows[0] for result in results} == {("kettle",)}
        assert told == ["tierkv-demo"]


def test_two_threads_may_make_the_first_call() -> None:
    with tierkv.connect(**{key.replace(".", "__"): v for key, v in SMALL.items()}) as connection:
        cursors = [connection.cursor() for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda cursor: cursor.execute(ASK).fetchall(), cursors))
    assert answers == [[("kettle",)]] * 2


async def test_a_cluster_that_is_closed_while_it_loads_ends_clean() -> None:
    threads = set(threading.enumerate())
    loads = asyncio.Event()
    async with started(on_load=lambda _: loads.set()) as cluster:
        starting = asyncio.create_task(cluster.nodes.start())
        await loads.wait()
        await cluster.stop()
        with pytest.raises(NoNodeError, match="closed"):
            await starting
        assert not hasattr(cluster.nodes, "compute") and not hasattr(cluster.nodes, "pool")
        with pytest.raises(NoNodeError, match="closed"):
            await cluster.nodes.start()
    left = {t.name for t in set(threading.enumerate()) - threads}
    assert not [name for name in left if not name.startswith("asyncio")]


async def test_a_first_call_that_is_cancelled_leaves_the_node_to_the_next() -> None:
    loads = asyncio.Event()
    told: list[str] = []

    def note(model: str) -> None:
        told.append(model)
        loads.set()

    async with started(on_load=note) as cluster:
        impatient, patient = await session_of(cluster), await session_of(cluster)
        asked = asyncio.create_task(impatient.execute(ASK))
        await loads.wait()
        await impatient.cancel()
        with pytest.raises(CancelledByUserError):
            await asked
        assert (await patient.execute(ASK)).rows == [("kettle",)]
        assert told == ["tierkv-demo"]


async def test_a_model_that_does_not_load_fails_each_call_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(load_config(environ={}).settings.compute), folder)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    async with started(**{"compute.model": str(folder)}) as cluster:
        session = await session_of(cluster)
        for _ in range(2):
            with pytest.raises(ModelFolderError, match=r"has shape .* config\.json says"):
                await session.execute(ASK)
        assert (await session.execute("SELECT 1")).rows == [(1,)]
        shutil.copytree(
            model_folder(load_config(environ={}).settings.compute), folder, dirs_exist_ok=True
        )
        assert (await session.execute(ASK)).rows == [("kettle",)]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"compute.model": "/nowhere/model"}, (ModelFolderError, "no model folder")),
        ({"compute.model": "org/name"}, (ModelFolderError, "no model folder org/name")),
        ({"compute.device": "cpu", "compute.l1_capacity": "900TiB"}, (ConfigError, "of L1, but")),
        ({"compute.l1_capacity": "1KiB"}, (ConfigError, r"compute\.l1_capacity of 1024 bytes")),
        ({"dmp.capacity": "900TiB"}, (ConfigError, r"segment .* needs .* lower dmp\.capacity")),
        ({"dmp.archive_url": "file:///tmp/a"}, (ConfigError, "an archive lies below a disk pool")),
    ],
)
async def test_what_can_t_work_is_refused_at_the_start(
    settings: dict[str, Any], error: tuple[type[Exception], str]
) -> None:
    with pytest.raises(error[0], match=error[1]):
        async with started(**settings):
            pytest.fail("it started")


def test_several_models_answer_by_name_and_the_first_by_default(tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(model_folder(ComputeSettings()), second)
    settings = {key.replace(".", "__"): value for key, value in SMALL.items()}
    with tierkv.connect(model=[second, "tierkv-demo"], **settings) as db:
        for call in (ASK, ASK.replace("')", "', model => 'tierkv-demo')")):
            assert db.execute(call).fetchall() == [("kettle",)]
        used = db.execute("SELECT model_name, calls FROM tierkv.stat_functions ORDER BY 1")
        assert used.fetchall() == [("second", 1), ("tierkv-demo", 1)]
        models = db.execute("SELECT model_name FROM tierkv.models ORDER BY 1").fetchall()
        assert models == [("second",), ("tierkv-demo",)]
        with pytest.raises(tierkv.Error, match="no model 'third' is served here") as refused:
            db.execute("SELECT ai_generate('a', model => 'third')")
        assert "second, tierkv-demo" in str(refused.value)


def test_only_a_chosen_limit_refuses_many_calls_in_one_process() -> None:
    settings = {key.replace(".", "__"): value for key, value in SMALL.items()}
    for chosen, limit in (({}, "0"), ({"front__max_calls": 3}, "3")):
        with tierkv.connect(**settings, **chosen) as db:
            assert db.execute("SHOW tierkv.max_calls").fetchall() == [(limit,)]

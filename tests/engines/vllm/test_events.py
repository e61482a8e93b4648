"""vLLM servers that publish KV events, as nodes of a cluster: who is known to have what, and when.

Two real servers, each with its node, a meta server and a front. What the directory claims is
compared with what vLLM says it had cached; a server is killed and started again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import ROOT, free_port, wait_for
from tests.fix_engine_nodes import Process, ServedNode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WEIGHTS = ROOT / "compute" / "demo_model" / "weights"
BLOCK = 32
BLOCKS = 64
"""Of each server's cache, of which vLLM keeps one to itself."""

_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # It can be told to reset its cache.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Vllm(Process):
    """One ``vllm serve`` that publishes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.port = name, free_port()
        self.events, self.replay = (f"ipc://{folder}/{name}-{what}" for what in ("e", "r"))
        publish = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
        }
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder / "model"),
            "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(self.port),
            "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024",
            "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS),
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publish),
        ]  # fmt: skip
        super().__init__(command, folder / f"{name}.log", env=os.environ | _ENVIRONMENT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def until_ready(self) -> None:
        """Wait until it answers."""
        wait_for(self._answers, what=f"vLLM answers: {self.log}", deadline_s=240.0)

    def _answers(self) -> bool:
        self.check_alive()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the server itself."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body or {}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read()
            return json.loads(text) if text.startswith(b"{") else None

    def forget(self) -> None:
        """Have it drop its cache, and take a step: it publishes with steps only."""
        self.post("/reset_prefix_cache")
        self.post("/v1/completions", {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 1})


class Cluster:
    """Meta server, front, and two vLLM servers with a node each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # vLLM would take every file of tensors there for weights.
        calibration = shutil.ignore_patterns("kv_calibration*")
        shutil.copytree(WEIGHTS, folder / "model", ignore=calibration)
        self.engines = [Vllm(folder, name) for name in ("one", "two")]
        self.processes: list[Process] = list(self.engines)

    def start(self) -> None:
        """Start what serves the engines, and wait until these are heard."""
        self.meta = self.serve("meta", "--set", f"meta.database={self.folder}/meta.sqlite")
        self.front = self.serve("front", "--set", "front.pg_port=0", "--set", "front.http_port=0")
        for engine in self.engines:
            engine.until_ready()
            self.node_of(engine)
        wait_for(lambda: len(self.heard()) == 2, what="both engines are heard")

    def serve(self, role: str, *arguments: str) -> ServedNode:
        """Start a role of TierKV."""
        told = [*arguments, "--set", f"cluster.run_dir={self.folder}/run"]
        if role != "meta":
            told += ["--set", f"cluster.meta_address={self.meta.ready['address']}"]
        log = self.folder / f"{role}-{len(self.processes)}.log"
        node = ServedNode(log, role, *told)
        self.processes.append(node)
        return node

    def node_of(self, engine: Vllm) -> ServedNode:
        """Start the node that stands for a server."""
        return self.serve(
            "compute", "--node-id", engine.name, "--engine", "vllm", "--url", engine.url,
            "--port", "0", "--set", f"engine.events_url={engine.events}",
            "--set", f"engine.events_replay_url={engine.replay}", "--set", "engine.dtype=float32",
        )  # fmt: skip

    def query(self, sql: str, *values: Any, user: str = "tierkv") -> list[tuple[Any, ...]]:
        """Run SQL through psycopg."""
        host, _, port = self.front.ready["pg"].rpartition(":")
        dsn = f"host={host} port={port} user={user} dbname=main"
        with psycopg.connect(dsn, autocommit=True) as connection:
            return connection.execute(sql, values).fetchall()

    def heard(self) -> dict[str, str]:
        """Return the nodes whose engine is heard, and what their paths say."""
        rows = self.query(
            "SELECT node_id, paths FROM tierkv.nodes WHERE role = 'compute' AND state = 'alive'"
        )
        return {node: paths for node, paths in rows if "events:rank0 zmq" in paths}

    def complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Have the front complete a prompt, greedily."""
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 4}
        request = urllib.request.Request(
            f"http://{self.front.ready['http']}/v1/completions",
            json.dumps(body | {"ignore_eos": True} | more).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def blocks(self, node: str) -> set[str]:
        """Return the names of what a node is known to have in its engine's cache."""
        rows = self.query(
            "SELECT block_hash FROM tierkv.kvcache_blocks WHERE tier = 'L1' AND node_id = %s", node
        )
        return {row[0] for row in rows}

    def until_blocks(self, node: str, count: int) -> None:
        """Wait for so many."""
        wait_for(
            lambda: len(self.blocks(node)) == count,
            what=f"{count} blocks of {node}: {self.heard()}",
        )

    def home_of(self, prompt: list[int]) -> Vllm:
        """Have a new prompt completed; return the engine that is known to have it."""
        known = {engine.name: self.blocks(engine.name) for engine in self.engines}
        assert cached(self.complete(prompt)) == 0
        wanted = len(prompt) // BLOCK

        def grown() -> list[Vllm]:
            return [e for e in self.engines if len(self.blocks(e.name) - known[e.name]) == wanted]

        (home,) = wait_for(grown, what=f"{wanted} blocks: {self.heard()}")
        return home

    def reset(self) -> None:
        """Have both engines forget everything."""
        for engine in self.engines:
            engine.forget()
            self.until_blocks(engine.name, 0)

    def stop(self) -> None:
        """End everything."""
        for process in reversed(self.processes):
            process.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for the module: starting vLLM takes long."""
    made = Cluster(tmp_path_factory.mktemp("events"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def make_prompt(name: str, tokens: int) -> list[int]:
    """Make up a prompt; equal names make equal beginnings."""
    numbers = random.Random(name)
    return [numbers.randrange(10, 2_000) for _ in range(tokens)]


def cached(answer: dict[str, Any]) -> int:
    """Return how many prompt tokens the engine had."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_directory_has_what_vllm_cached_and_loses_what_it_dropped(cluster: Cluster) -> None:
    cluster.reset()
    prompt = make_prompt("a", 5 * BLOCK + 3)
    home = cluster.home_of(prompt)
    assert cached(cluster.complete(prompt)) == 5 * BLOCK
    # Other prompts of the same tenant fill that engine's cache, sent around the scheduler.
    for number in range(8):
        home.post("/v1/completions", {
            "model": "demo", "prompt": make_prompt(f"filler {number}", 15 * BLOCK + 1),
            "max_tokens": 1, "temperature": 0,
        })  # fmt: skip
    cluster.until_blocks(home.name, 0)
    assert cached(cluster.complete(prompt)) == 0


def test_a_cleared_cache_is_cleared_and_learned_again(cluster: Cluster) -> None:
    cluster.reset()
    home = cluster.home_of(make_prompt("before", 6 * BLOCK + 1))
    home.forget()
    cluster.until_blocks(home.name, 0)
    again = cluster.home_of(make_prompt("after", 6 * BLOCK + 1))
    assert len(cluster.blocks(again.name)) == 6


def test_a_new_life_of_vllm_begins_with_nothing(cluster: Cluster) -> None:
    cluster.reset()
    home = cluster.home_of(make_prompt("life", 6 * BLOCK + 1))
    home.kill()
    cluster.until_blocks(home.name, 0)
    home.start()
    home.until_ready()
    wait_for(lambda: home.name in cluster.heard(), what="it is heard again", deadline_s=120.0)
    assert not cluster.blocks(home.name)


def test_a_node_that_starts_late_learns_what_its_engine_has(cluster: Cluster) -> None:
    cluster.reset()
    prompt = make_prompt("late", 4 * BLOCK + 1)
    home = cluster.home_of(prompt)
    known = cluster.blocks(home.name)
    node = next(p for p in cluster.processes if f"--node-id {home.name}" in " ".join(p._command))
    assert isinstance(node, ServedNode)
    node.kill()
    cluster.processes.remove(node)
    cluster.node_of(home)
    wait_for(lambda: cluster.blocks(home.name) == known, what="the same blocks")

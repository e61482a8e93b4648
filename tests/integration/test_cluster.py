"""A whole cluster as processes: used through every door, killed in parts, stopped.

The oracle everywhere is the same cluster with the cache off: greedy answers must be equal, token
for token, whatever tier served the KV and whatever died meanwhile.
"""

from __future__ import annotations

import json
import mmap
import random
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psycopg
import pytest

from tests.fix_cluster import ROOT, Cluster, wait_for
from tierkv.commands.connect_checks import check_meta
from tierkv.commands.doctor import OK
from tierkv.dbfront.generation.call_checks import salted_tenant
from tierkv.integrations.settings import PoolAccess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
DEMO = ROOT / "compute" / "demo_model" / "weights"
VOCABULARY = range(10, 2000)


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--dmp", "1", "--compute", "1")


@pytest.fixture(scope="module")
def split(start_cluster: Callable[..., Cluster]) -> Cluster:
    """Prefill on one host, decode on another: their only common memory is the pool over TCP.

    A busy machine may find that computing so little is faster; what is passed on is loaded here.
    """
    always = ("--set", "compute.load_policy=always")
    return start_cluster("--dmp", "2", "--prefill", "1", "--decode", "1", *always)


def make_prompts(seed: int, count: int = 4) -> list[list[int]]:
    """Prompts that share prefixes of several blocks."""
    rng = random.Random(seed)
    prefix = [rng.choice(VOCABULARY) for _ in range(200)]
    cuts = [rng.randrange(60, 200) for _ in range(count)]
    return [prefix[:cut] + [rng.choice(VOCABULARY) for _ in range(70)] for cut in cuts]


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["text"])


def cached(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def oracle(cluster: Cluster, prompts: list[list[int]], **options: Any) -> list[str]:
    return [text_of(cluster.complete(p, use_cache=False, **options)) for p in prompts]


def ask(cluster: Cluster, prompts: list[list[int]], salt: str) -> list[dict[str, Any]]:
    """Ask in a cache of the test's own, so that no other test's blocks are taken for its."""
    return [cluster.complete(prompt, cache_salt=salt) for prompt in prompts]


def wait_published(cluster: Cluster, prompts: list[list[int]], salt: str) -> None:
    """Wait until the pool holds every full block of the prompts that were asked with the salt.

    Tests kill nodes: what found no pool node is saved when there is one again.
    """
    blocks = {tuple(p[:end]) for p in prompts for end in range(16, len(p) + 1, 16)}
    count = (
        "SELECT count(DISTINCT block_hash) FROM tierkv.kvcache_blocks "
        f"WHERE tier <> 'L1' AND cache_scope = '{salted_tenant('default', salt)}'"
    )
    wait_for(lambda: cluster.query(count)[0][0] >= len(blocks), what="blocks in the pool")


def cache_errors(cluster: Cluster) -> int:
    rows = cluster.query("SELECT DISTINCT node_id, cache_errors FROM tierkv.stat_kvcache_node")
    return sum(int(row[1] or 0) for row in rows)


def test_every_door_answers(cluster: Cluster) -> None:
    psql = subprocess.run(
        ["psql", "-h", "127.0.0.1", "-p", str(cluster.pg_port), "-U", "tierkv", "main", "-At",
         "-c", "CREATE TABLE door (id int, t text)", "-c", "INSERT INTO door VALUES (1, 'a')",
         "-c", "SELECT id, ai_generate(t) IS NOT NULL FROM door", "-c", "\\dt"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "1|t" in psql.stdout
    assert "door" in psql.stdout
    welcome = httpx.get(f"http://127.0.0.1:{cluster.http_port}/").text
    assert f"PostgreSQL clients connect to port {cluster.pg_port}." in welcome
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="x")
    messages: Any = [{"role": "user", "content": "Review: the lamp is great. " * 20}]
    for _ in range(2):
        answer = client.chat.completions.create(
            model="tierkv-demo", messages=messages, temperature=0, max_tokens=8
        )
    client.close()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 0
    assert {node[0] for node in cluster.nodes().values()} == {"alive"}
    roles = "SELECT DISTINCT role FROM tierkv.nodes"
    everybody = {"front", "meta", "dmp", "compute"}
    wait_for(lambda: {row[0] for row in cluster.query(roles)} == everybody, what="every role")


def test_only_the_compute_node_loads_torch(cluster: Cluster) -> None:
    def loads_torch(node: str) -> bool:
        return "libtorch" in Path(f"/proc/{cluster.pid_of(node)}/maps").read_text()

    assert {node: loads_torch(node) for node in ("meta", "dmp-0", "compute-0", "front")} == {
        "meta": False,
        "dmp-0": False,
        "compute-0": True,
        "front": False,
    }


def test_files_are_private(cluster: Cluster) -> None:
    files = list(cluster.run_dir.rglob("*"))
    assert any(path.suffix == ".duckdb" for path in files)
    assert any(path.suffix == ".log" for path in files)
    assert [str(path) for path in files if path.stat().st_mode & 0o077] == []


def test_the_line_of_connect_reaches_the_running_cluster(cluster: Cluster) -> None:
    """With no option for it, and with nothing but the line: address and token are there."""
    command = [sys.executable, "-m", "tierkv", "connect", "vllm", "--model", str(DEMO)]
    done = subprocess.run(
        [*command, "--set", f"cluster.run_dir={cluster.run_dir}"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    words = shlex.split(done.stdout)
    told = json.loads(words[words.index("--kv-transfer-config") + 1])
    given = told["kv_connector_extra_config"]
    assert given["meta"] == cluster.state()["meta"]
    token = Path(given["token_file"])
    assert token.stat().st_mode & 0o077 == 0
    assert token.read_text().strip() not in done.stdout + done.stderr
    assert check_meta(PoolAccess.read(given)).state == OK
    refused = {**given, "token_file": "", "token": "another"}
    assert check_meta(PoolAccess.read(refused)).state != OK
    assert f"--config {cluster.run_dir / 'cluster.toml'}" in done.stderr


def paths_of(cluster: Cluster) -> dict[str, str]:
    return dict(cluster.query("SELECT node_id, paths FROM tierkv.nodes"))


def wait_connected(split: Cluster) -> None:
    """Wait until both compute nodes know both pool nodes: blocks go to the near one then."""

    def connected() -> bool:
        paths = paths_of(split)
        return all(paths.get(name, "").count(";") for name in ("prefill-0", "decode-0"))

    wait_for(connected, what="paths to both pool nodes")


def test_nodes_view_says_which_path_bytes_take_and_why(split: Cluster) -> None:
    wait_connected(split)
    paths = partial(paths_of, split)
    for node, near, far in (("prefill-0", "dmp-0", "dmp-1"), ("decode-0", "dmp-1", "dmp-0")):
        said = paths()[node]
        assert f"{near} shm: same host" in said
        assert f"{far} tcp: another host (" in said or f"{far} rdma: " in said
    wait_for(lambda: "; tcp: 127.0.0.1:" in paths()["dmp-0"], what="doors")
    assert paths()["dmp-0"].startswith("shm: /dev/shm/tierkv-")
    assert "rdma: " in paths()["dmp-0"]
    status = subprocess.run(
        [sys.executable, "-m", "tierkv", "status", "--format", "json",
         "--set", f"cluster.run_dir={split.run_dir}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    shown = {row["node"]: row["paths"] for row in json.loads(status.stdout)}
    assert "same host" in shown["prefill-0"]


def test_l2_is_the_only_source_after_compute_restarts(cluster: Cluster) -> None:
    prompts = make_prompts(1)
    expected = oracle(cluster, prompts)
    assert [text_of(body) for body in ask(cluster, prompts, "l2")] == expected
    wait_published(cluster, prompts, "l2")
    cluster.kill("compute-0")
    again = ask(cluster, prompts, "l2")
    assert [text_of(body) for body in again] == expected
    assert cached(again[0]) > 0
    hits = "SELECT sum(hit_tokens) FROM tierkv.stat_kvcache WHERE tier = 'L2'"
    wait_for(lambda: int(cluster.query(hits)[0][0]) > 0, what="L2 hits in the view")


def test_pool_survives_a_kill_and_serves_what_was_sealed(cluster: Cluster) -> None:
    prompts = make_prompts(2)
    expected = oracle(cluster, prompts)
    assert [text_of(body) for body in ask(cluster, prompts, "kill")] == expected
    wait_published(cluster, prompts, "kill")
    before = cluster.nodes()["dmp-0"][1]
    cluster.kill("dmp-0")
    wait_for(lambda: cluster.nodes()["dmp-0"][1] > before, what="dmp-0 registered again")
    wait_published(cluster, prompts, "kill")
    cluster.kill("compute-0")
    again = ask(cluster, prompts, "kill")
    assert [text_of(body) for body in again] == expected
    assert max(map(cached, again)) > 0


@pytest.mark.parametrize("victim", ["dmp-0", "compute-0", "meta"])
def test_a_process_killed_mid_request_changes_no_token(cluster: Cluster, victim: str) -> None:
    prompts = make_prompts(hash_free_seed(victim), count=3)
    expected = oracle(cluster, prompts, max_tokens=600)
    answers: dict[int, str] = {}

    def ask_long(index: int) -> None:
        answers[index] = text_of(cluster.complete(prompts[index], max_tokens=600))

    threads = [threading.Thread(target=ask_long, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    cluster.kill(victim)
    for thread in threads:
        thread.join(timeout=120)
    assert [answers.get(index) for index in range(len(prompts))] == expected


def hash_free_seed(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % 1000


def test_flipped_bits_in_the_pool_are_counted_and_recomputed(cluster: Cluster) -> None:
    prompts = make_prompts(5)
    expected = oracle(cluster, prompts)
    assert [text_of(body) for body in ask(cluster, prompts, "flip")] == expected
    wait_published(cluster, prompts, "flip")
    flip_payload_bits(Path(cluster.state()["nodes"]["dmp-0"]["segment"]))
    before = cluster.nodes()["compute-0"][1]
    cluster.kill("compute-0")
    # The counters of the process that was killed stand in the view until the new one registers.
    wait_for(lambda: cluster.nodes()["compute-0"][1] > before, what="compute-0 registered again")
    assert [text_of(body) for body in ask(cluster, prompts, "flip")] == expected
    wait_for(lambda: cache_errors(cluster) > 0, what="checksum errors counted")


def flip_payload_bits(path: Path) -> None:
    """Flip a bit in every page that looks like KV, not in headers (they hold few values)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for page in range(len(memory) // 4096):
            start = page * 4096
            body = memory[start : start + 4096]
            if len(set(body)) > 200:
                memory[start + 2048] ^= 0x10


def test_handoff_through_the_pool_equals_one_node(split: Cluster) -> None:
    wait_connected(split)
    prompts = make_prompts(3)
    expected = oracle(split, prompts)
    for _ in range(2):
        assert [text_of(split.complete(p)) for p in prompts] == expected
    view = "tierkv.stat_kvcache_node WHERE role = 'decode' AND tier = 'L3'"
    hits = f"SELECT sum(hit_tokens) FROM {view}"
    wait_for(lambda: int(split.query(hits)[0][0]) > 0, what="L3 hits of the decode node")


def test_up_stops_cleanly_and_leaves_nothing(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    pids = [cluster.pid_of(name) for name in ("meta", "dmp-0", "compute-0", "front")]
    assert all(pids)
    assert cluster.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (cluster.run_dir / "cluster.json").exists()
    with pytest.raises(psycopg.OperationalError):
        cluster.query("SELECT 1")

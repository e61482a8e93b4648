"""One vLLM computes a prompt, another gives the answer: nodes of a split, KV through the pool.

Both engines run our connector, one as producer, one as consumer; the front hands each answer over.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fix_cluster import Cluster, wait_for
from tests.fix_engine_model import BLOCK_TOKENS, VllmServer, copy_demo_model
from tests.fix_engine_nodes import ServedNode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def connector(role: str, meta: str, token_file: str) -> str:
    """Configure our connector as a user of a cluster does, patient on a slow machine."""
    return json.dumps(
        {
            "kv_connector": "TierKvConnector",
            "kv_connector_module_path": "tierkv.integrations.vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "meta": meta,
                "token_file": token_file,
                "lookup_timeout_ms": 30_000,
                "handoff_timeout_ms": 30_000,
                "load_policy": "always",
            },
        }
    )


@pytest.fixture(scope="module")
def cluster(
    start_cluster: Callable[..., Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    started = start_cluster("--compute", "0")
    folder = tmp_path_factory.mktemp("split")
    told = tomllib.loads((started.run_dir / "cluster.toml").read_text())["cluster"]
    token = folder / "token"
    token.write_text(told["token"])
    model = copy_demo_model(folder / "model")
    servers = {
        role: VllmServer(
            model, folder / f"{role}-vllm.log",
            "--kv-transfer-config", connector(kv_role, told["meta_address"], str(token)),
        )
        for role, kv_role in ROLES.items()
    }  # fmt: skip
    nodes: list[ServedNode] = []
    try:
        for role, server in servers.items():
            server.wait()
            nodes.append(
                ServedNode(
                    folder / f"{role}.log", role, "--node-id", role, "--port", "0",
                    "--config", str(started.run_dir / "cluster.toml"),
                    "--engine", "vllm", "--url", server.url, "--set", "engine.events_url=off",
                )
            )  # fmt: skip
        wait_for(lambda: ready(started), what="the nodes know their engines' true layout")
        yield started
    finally:
        for node in nodes:
            node.stop()
        for server in servers.values():
            server.kill()


def ready(cluster: Cluster) -> bool:
    """Whether both nodes are there, and have learned from the connectors what a block is."""
    rows = cluster.query("SELECT role FROM tierkv.nodes WHERE state = 'alive' AND models <> ''")
    sizes = cluster.query("SELECT DISTINCT block_bytes FROM tierkv.models")
    # Six layers, two heads of 32 channels, keys and values in float32; the model says bfloat16.
    return {*ROLES} <= {role for (role,) in rows} and sizes == [
        (BLOCK_TOKENS * 6 * 2 * 32 * 2 * 4,)
    ]


@pytest.fixture(scope="module")
def oracle(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--set", "compute.dtype=float32")


def complete(cluster: Cluster, prompt: list[int]) -> dict[str, Any]:
    return cluster.complete(prompt, max_tokens=12)


def test_answers_are_handed_over_and_the_same(cluster: Cluster, oracle: Cluster) -> None:
    prompts = [list(range(100 + 7 * i, 100 + 7 * i + 4 * BLOCK_TOKENS + 9)) for i in range(3)]
    for prompt in prompts:
        ours, theirs = complete(oracle, prompt), complete(cluster, prompt)
        assert theirs["choices"][0]["text"] == ours["choices"][0]["text"]
        assert theirs["usage"]["completion_tokens"] == 12
    decisions = cluster.query(
        "SELECT stage, count(*) FROM tierkv.routing_log GROUP BY 1 ORDER BY 1"
    )
    assert decisions == [("decode", 3), ("prefill", 3)]


def test_the_second_engine_loaded_what_the_first_computed(cluster: Cluster) -> None:
    def hit_tokens() -> int:
        ((tokens,),) = cluster.query(
            "SELECT coalesce(sum(hit_tokens), 0) FROM tierkv.stat_kvcache_node "
            "WHERE node_id IN (SELECT node_id FROM tierkv.nodes WHERE role = 'engine')"
        )
        return int(tokens)

    wait_for(lambda: hit_tokens() >= 3 * 4 * BLOCK_TOKENS, what="the consumer tells its hits")

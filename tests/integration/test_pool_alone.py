"""``tierkv serve dmp`` with nothing else of TierKV, and ``tierkv pool`` against it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.fix_cluster import ROOT, wait_for
from tests.fix_serve_dmp import StartNode
from tierkv.cli import app
from tierkv.dmp.client.pool import Pool

pytestmark = pytest.mark.integration


def tierkv(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_a_node_stands_alone_and_says_so(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("--port", "0", "--node-id", "alone")
    assert (node.told["node"], node.told["next"]) == ("alone", f"tierkv pool stats {node.address}")
    assert "stands alone: no cluster.meta_address" in node.log.read_text()
    file = tmp_path / "value"
    file.write_bytes(bytes(range(256)) * 1000)
    assert tierkv("pool", "put", node.address, "a", str(file)) == (0, "")
    assert tierkv("pool", "get", node.address, "a", str(tmp_path / "copy")) == (0, "")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    assert tierkv("pool", "get", node.address, "b") == (1, "tierkv: 'b' is not in the pool\n")
    code, said = tierkv(*node.told["next"].split()[1:], "--format", "json")
    (row,) = json.loads(said)
    assert (code, row["node"], row["path"], row["blocks"]) == (0, "alone", "shm", 1)
    assert node.end() == 0


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_values_survive_kill_9_of_the_node(start_node: StartNode, transport: str) -> None:
    node = start_node("--node-id", "alone")
    with Pool.connect(node.address, transport=transport) as pool:
        assert pool.put("a", b"value") and pool.pin("a")
        node.end(signal.SIGKILL)
        pool.exists("a")
        start_node("--node-id", "alone", "--port", node.port)
        wait_for(lambda: pool.exists("a"), what="the node is back")
        assert pool.get("a") == b"value"
        assert pool.put("b", b"other")
        pool.unpin("a")


def test_two_processes_share_what_one_put(start_node: StartNode) -> None:
    first, second = start_node("--node-id", "one"), start_node("--node-id", "two")
    addresses = f"{first.address},{second.address}"
    code = (
        "import sys; from tierkv.dmp.client.pool import Pool\n"
        "with Pool.connect(sys.argv[1]) as pool:\n"
        "    assert all(pool.put_many({f'k{i}': bytes([i]) * 999 for i in range(32)}))\n"
    )
    subprocess.run([sys.executable, "-c", code, addresses], cwd=ROOT, check=True, timeout=60)
    with Pool.connect(addresses, transport="tcp") as pool:
        got = pool.get_many([f"k{i}" for i in range(32)])
        assert got == [bytes([i]) * 999 for i in range(32)]
        blocks = [
            member.stats.memory.blocks_used for member in pool.stats().members if member.stats
        ]
        assert min(blocks) > 0 and sum(blocks) == 32


def test_options_for_other_roles_are_refused() -> None:
    assert "applies only to dmp nodes" in tierkv("serve", "meta", "--capacity", "1GiB")[1]
    assert "two ports" in tierkv("serve", "front", "--port", "1")[1]

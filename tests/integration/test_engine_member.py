"""An engine in a cluster: real meta server and pool nodes that come late, die and come back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fix_cluster import ROOT, Cluster, free_port, wait_for
from tests.fix_door import IDENTITY, LAYOUT, MakeDoor
from tests.fix_serve_dmp import Alone
from tests.fix_serve_meta import MetaAlone
from tierkv.integrations.identity import revision_of
from tierkv.integrations.pool_door import PoolDoor
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.node import NodeRole
from tierkv.metaserver.client import DirectoryNode, LocateReply, NamespaceGrant
from tierkv.metaserver.rpc.grpc_client import GrpcMeta

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
TOKEN = "the-cluster-token"


class Cell:
    """A meta server and pool nodes, each a process.

    Attributes:
        meta: the meta server's address, whether or not it runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = free_port()
        self.meta = f"127.0.0.1:{self._port}"
        self._meta: MetaAlone | None = None
        self._nodes: list[Alone] = []

    def start_meta(self, *arguments: str) -> None:
        token = ("--set", f"cluster.token={TOKEN}")
        self._meta = MetaAlone(self.folder, self._port, *token, *arguments)

    def kill_meta(self) -> None:
        assert self._meta is not None
        self._meta.end(signal.SIGKILL)

    def start_pool_node(self, name: str) -> Alone:
        node = Alone(
            self.folder, "--port", "0", "--node-id", name,
            "--set", f"cluster.token={TOKEN}", "--set", f"cluster.meta_address={self.meta}",
        )  # fmt: skip
        self._nodes.append(node)
        return node

    def stop(self) -> None:
        for node in self._nodes:
            node.end()
        if self._meta is not None:
            self._meta.end()

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def call() -> Any:
            client = GrpcMeta(self.meta, token=TOKEN)
            try:
                return await getattr(client, method)(*arguments, **options)
            finally:
                await client.close()

        return asyncio.run(call())

    def nodes(self) -> dict[str, DirectoryNode]:
        return {state.info.node_id: state for state in self.ask("list_nodes")}

    def grant(self, tenant: str) -> NamespaceGrant:
        grant: NamespaceGrant = self.ask(
            "resolve_namespace",
            tenant,
            model_revision=IDENTITY.revision,
            layout_fingerprint=IDENTITY.fingerprint(),
        )
        return grant


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    made = Cell(tmp_path)
    yield made
    made.stop()


def wait_up(door: PoolDoor) -> None:
    wait_for(lambda: door.up, what="the door is up")


def wait_note(door: PoolDoor, code: str) -> str:
    return wait_for(
        lambda: next((n for n in door.notes() if n.startswith(f"{code} (")), ""), what=code
    )


def test_nothing_is_guessed_before_the_meta_server_answers(cell: Cell, make_door: MakeDoor) -> None:
    door = make_door({"meta": cell.meta, "token": TOKEN, "node_id": "vllm-1"})
    wait_note(door, "meta_down")
    assert door.base_key is None and not door.up and "no key" in door.why_down
    cell.start_meta()
    cell.start_pool_node("dmp-0")
    wait_up(door)
    assert door.base_key == cell.grant("default").namespace_key
    wait_for(lambda: door.notes() == (), what="the complaint is over")


def test_what_an_engine_stores_the_scheduler_finds(cell: Cell, make_door: MakeDoor) -> None:
    cell.start_meta()
    cell.start_pool_node("dmp-0")
    door = make_door({"meta": cell.meta, "token": TOKEN, "tenant": "acme"})
    wait_up(door)
    assert door.base_key is not None
    keys = block_keys(door.base_key, range(48), block_tokens=16)
    block = bytes(LAYOUT.payload_bytes)
    stored = door.submit(
        lambda pool: pool.put_many(dict.fromkeys(keys, block), range_bytes=LAYOUT.layer_bytes),
        [],
        name="store",
    )
    assert stored.result(30) == [True] * 3
    same = block_keys(cell.grant("acme").namespace_key, range(48), block_tokens=16)

    def located() -> bool:
        reply: LocateReply = cell.ask("locate", same)
        return reply.prefix_blocks == 3

    wait_for(located, what="the directory has the engine's blocks")


def test_a_restart_of_the_meta_server_changes_nothing(cell: Cell, make_door: MakeDoor) -> None:
    cell.start_meta()
    cell.start_pool_node("dmp-0")
    door = make_door({"meta": cell.meta, "token": TOKEN, "node_id": "vllm-1"})
    wait_up(door)
    key = door.base_key
    assert door.submit(lambda pool: pool.put("a", b"1"), False, name="store").result(30)
    wait_for(lambda: "vllm-1" in cell.nodes(), what="the engine is registered")
    life = cell.nodes()["vllm-1"].info
    assert life.role is NodeRole.ENGINE
    cell.kill_meta()
    wait_note(door, "meta_down")
    assert door.up and door.base_key == key
    assert door.submit(lambda pool: pool.get("a"), None, name="get").result(30) == b"1"
    cell.start_meta()
    wait_for(lambda: "vllm-1" in cell.nodes(), what="the engine registered again")
    assert cell.nodes()["vllm-1"].info == life  # It is the same life, as the process is.
    wait_for(lambda: door.notes() == (), what="the complaint is over")
    assert door.base_key == key and door.up


def test_another_secret_is_another_key_and_said(cell: Cell, make_door: MakeDoor) -> None:
    cell.start_meta()
    cell.start_pool_node("dmp-0")
    door = make_door({"meta": cell.meta, "token": TOKEN})
    wait_up(door)
    old = door.base_key
    cell.kill_meta()
    cell.start_meta("--set", "cluster.secret=another-secret-of-the-cluster")
    wait_note(door, "new_secret")
    assert old != door.base_key == cell.grant("default").namespace_key


def test_pool_nodes_come_and_go(cell: Cell, make_door: MakeDoor) -> None:
    cell.start_meta()
    first = cell.start_pool_node("dmp-0")
    door = make_door({"meta": cell.meta, "token": TOKEN})
    wait_up(door)

    def members() -> set[str]:
        stats = door.submit(lambda pool: pool.stats(), None, name="stats").result(30)
        return set() if stats is None else {m.node_id for m in stats.members if m.up}

    second = cell.start_pool_node("dmp-1")
    wait_for(lambda: members() == {"dmp-0", "dmp-1"}, what="the second node is used")
    first.end()
    wait_for(lambda: members() == {"dmp-1"}, what="the first node is let go")
    assert door.submit(lambda pool: pool.put("a", b"1"), False, name="store").result(30)
    second.end()
    wait_note(door, "pool_down")
    cell.start_pool_node("dmp-2")
    wait_for(lambda: members() == {"dmp-2"}, what="a new node, the old ones are gone")


def test_tenants_and_layouts_have_keys_of_their_own(cell: Cell, make_door: MakeDoor) -> None:
    cell.start_meta()
    doors = [
        make_door({"meta": cell.meta, "token": TOKEN}, part="0"),
        make_door({"meta": cell.meta, "token": TOKEN, "tenant": "acme"}, part="1"),
        make_door(
            {"meta": cell.meta, "token": TOKEN}, part="2", layout=replace(LAYOUT, block_tokens=128)
        ),
    ]
    wait_for(lambda: all(door.base_key for door in doors), what="three keys")
    assert len({door.base_key for door in doors}) == 3
    assert not doors[0].up  # There is no pool node yet, and they say nothing else.
    wait_for(lambda: "block size 128 here" in str(doors[2].notes()), what="the mismatch")
    assert wait_note(doors[0], "node_mismatch")


def test_a_refused_token_keeps_the_cache_off(cell: Cell, make_door: MakeDoor) -> None:
    cell.start_meta()
    door = make_door({"meta": cell.meta, "token": "wrong"})
    assert "refused our cluster token" in wait_note(door, "meta_down")
    assert not door.up and door.base_key is None


def test_an_engine_that_ends_leaves_the_cluster(cell: Cell, make_door: MakeDoor) -> None:
    cell.start_meta()
    door = make_door({"meta": cell.meta, "token": TOKEN, "node_id": "vllm-1"}, part="rank0")
    wait_for(lambda: "vllm-1-rank0" in cell.nodes(), what="the engine is registered")
    door.close()
    assert "vllm-1-rank0" not in cell.nodes()


# In a whole cluster


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--dmp", "1", "--compute", "1", "--set", f"cluster.token={TOKEN}")


def test_sql_shows_engines_and_what_they_complain_of(cluster: Cluster, make_door: MakeDoor) -> None:
    """The demo model's compute node has the same weights in its own order: nothing is shared."""
    folder = ROOT / "compute/demo_model/weights"
    door = make_door(
        {"meta": cluster.state()["meta"], "token": TOKEN, "node_id": "vllm-sql"},
        model=str(folder),
        revision=revision_of(str(folder)),
    )
    wait_up(door)
    door.complain("salt", "an odd salt: '\x00\ud800'; DROP TABLE notes; --", hint="Mind it.")
    door.count("hit_tokens", 32)
    door.count("query_tokens", 64)
    door.count("read_bytes", 1_000)

    def row() -> str:
        found = cluster.query(
            "SELECT notes FROM tierkv.nodes WHERE node_id = 'vllm-sql' AND role = 'engine'"
        )
        notes = str(found[0][0]) if found else ""
        return notes if "salt" in notes and "node_mismatch" in notes else ""

    notes = wait_for(row, what="the engine's notes")
    assert notes.startswith("vllm 0.32.0, rank 0 of 1; ")
    assert "salt (1): an odd salt: '??'; DROP TABLE notes; --. Mind it" in notes
    assert "byte order vllm-hnd-1 here, TierKV's own there" in notes
    counted = cluster.query(
        "SELECT hit_tokens, query_tokens, read_bytes, cache_errors >= 2 "
        "FROM tierkv.stat_kvcache_node WHERE node_id = 'vllm-sql'"
    )
    assert counted == [(32, 64, 1_000, True)]
    ((paths,),) = cluster.query("SELECT paths FROM tierkv.nodes WHERE node_id = 'vllm-sql'")
    assert "dmp-0 shm" in paths
    # Nobody is sent to it, and its model is not one that is served.
    body = cluster.complete([1, 2, 3], max_tokens=2)
    assert body["choices"][0]["text"]
    cluster.kill("meta")
    wait_for(row, what="the engine's notes after a restart of the meta server")
    assert door.up

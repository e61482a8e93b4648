"""The tier in a cluster: keys and nodes from a meta server that is killed and started again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.tier_rig import Engine, Server, be_patient, keys_of, pool_node, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
SECRET = "cluster.secret=" + "s" * 32


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, "meta", "--set", SECRET)
    yield server
    server.end()


@pytest.fixture
def node(tmp_path: Path, meta: Server) -> Iterator[Server]:
    server = pool_node(tmp_path, "--set", f"cluster.meta_address={meta.address}")
    yield server
    server.end()


def test_a_meta_server_that_restarts_changes_nothing(
    meta: Server, node: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    keys = keys_of("a", 5)
    first = Engine(8, tier={"meta": meta.address})
    first.store(keys)
    meta.end(signal.SIGKILL)
    first.push_out(8)
    assert first.check(keys) == 5  # Nobody needs it for what is known.
    late = Engine(8, tier={"meta": meta.address}, wait=False)
    late.store(keys_of("b", 2))
    assert late.check(keys) == 0 and not late.door.up  # No key is guessed.
    meta.start()
    wait_for(lambda: late.door.up, what="the door of the late engine is up")
    assert late.check(keys) == 5
    assert late.door.base_key == first.door.base_key
    node.end(signal.SIGKILL)
    node.start()
    wait_for(lambda: first.door.up, what="the door is up again")
    first.push_out(8)
    assert first.check(keys) == 5
    for engine in (first, late):
        engine.close()

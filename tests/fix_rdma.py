"""RDMA between DMP nodes and their clients, in tests that run where there are devices.

tests/hardware/rdma-vm boots a machine with four: rxe0 and rxe1 at the ends of one cable, rxe2 and
rxe3 at those of another. Nodes serve on the odd ones, clients use the even ones, so that all bytes
cross a cable.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.fix_dmp import Rig
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.verbs.device import discover
from tierkv.dmp.transport.verbs.fabric import Fabric, local_fabric
from tierkv.dmp.transport.verbs.lane import VerbsSettings
from tierkv.dmp.transport.verbs.node import VerbsPoolNode
from tierkv.kvcore.clock import Clock

SERVED = ("rxe1", "rxe3")
USED = ("rxe0", "rxe2")
CABLES = ("rdma0", "rdma2")
SMALL = VerbsSettings(lanes=2, bounce_bytes=1 << 20, chunk_bytes=256 << 10)
"""Registering memory takes 5 ms per MiB there."""

OpenVerbs = Callable[..., VerbsPoolNode]


RDMA = [pytest.mark.rdma, pytest.mark.usefixtures("needs_rdma")]


@pytest.fixture
def needs_rdma() -> None:
    """Skip where there are no two cables, with the reason in words."""
    found = discover(SERVED + USED)
    if len(found.ports) < len(SERVED + USED):
        pytest.skip(f"{found.reason or 'too few RDMA devices'}; make test-rdma boots a machine")


@pytest.fixture
def open_verbs() -> Iterator[OpenVerbs]:
    """Connect to nodes over RDMA; the connections are closed after the test."""
    opened: list[VerbsPoolNode] = []

    def connect(
        rig: Rig,
        *,
        devices: tuple[str, ...] = USED,
        settings: VerbsSettings = SMALL,
        clock: Clock | None = None,
    ) -> VerbsPoolNode:
        peer = Peer(rig.node.node_id, rig.server.address)
        fabric = local_fabric(devices)
        assert isinstance(fabric, Fabric), fabric
        node = VerbsPoolNode(peer, fabric, host=rig.node.host, settings=settings, clock=clock)
        opened.append(node)
        assert node.board.ask() == ""
        return node

    yield connect
    for node in opened:
        node.close()


@pytest.fixture
def cables() -> Iterator[Callable[[str, bool], None]]:
    """Pull and plug cables; all are plugged after the test."""

    def set_link(name: str, up: bool) -> None:
        subprocess.run(["ip", "link", "set", name, "up" if up else "down"], check=True)

    yield set_link
    for name in CABLES:
        set_link(name, True)

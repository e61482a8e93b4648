"""RDMA between DMP nodes and their clients, in tests that run where there are devices.

tests/hardware/rdma-vm boots a machine with four: rxe0 and rxe1 at the ends of one cable, rxe2 and
rxe3 at those of another. Nodes serve on the odd ones, clients use the even ones, so that all bytes
cross a cable.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

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
        if up:
            _introduce(name, f"rdma{int(name[-1]) + 1}")

    yield set_link
    for name in CABLES:
        set_link(name, True)


def _introduce(one: str, other: str) -> None:
    """Tell the ends of a cable each other's addresses, which a pulled cable makes them forget.

    Asking for them takes the kernel up to seconds after the cable is plugged, and a queue pair that
    is connected meanwhile fails.
    """
    for here, there in ((one, other), (other, one)):
        shown = subprocess.run(
            ["ip", "-4", "-brief", "address", "show", "dev", there],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        address = shown.stdout.split()[2].partition("/")[0]
        hardware = Path(f"/sys/class/net/{there}/address").read_text().strip()
        subprocess.run(
            ["ip", "neighbour", "replace", address, "lladdr", hardware, "dev", here,
             "nud", "permanent"],
            check=True,
        )  # fmt: skip

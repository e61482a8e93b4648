"""Health of the RDMA rails to a node, and the distribution of work over rails.

A rail is a local port paired with a port of the node. No sockets, clock or pyverbs;
dmp/transport/verbs/lane.py and dmp/transport/verbs/rail_board.py pass the time. RailHealth is a
circuit breaker: a rail that fails often gets no traffic for a while, then a trial. Distances
between devices, memory and GPUs come from sysfs and one system call. An unknown place is None, and
then all devices count as equally near.
"""

from __future__ import annotations

import ctypes
import ipaddress
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

R = TypeVar("R")
T = TypeVar("T")

TRIP_ERRORS: Final = 3
TRIP_WINDOW_S: Final = 10.0
COOLDOWN_S: Final = 30.0
MAX_COOLDOWN_S: Final = 300.0


@dataclass(slots=True)
class RailHealth:
    """Errors of one rail and the state of its circuit breaker.

    Attributes:
        errors: times of recent errors, oldest first.
        tripped_until: no traffic before this time.
        cooldown_s: duration of the last trip; doubles with each consecutive trip; 0 when healthy.
        reason: the last error, human-readable.
    """

    errors: list[float] = field(default_factory=list)
    tripped_until: float = 0.0
    cooldown_s: float = 0.0
    reason: str = ""

    def is_usable(self, now: float) -> bool:
        """Return True if the rail may carry traffic."""
        return now >= self.tripped_until

    def is_on_trial(self, now: float) -> bool:
        """Return True if the rail was tripped and has not succeeded since."""
        return self.cooldown_s > 0.0 and self.is_usable(now)

    def succeeded(self, now: float) -> None:
        """Note a successful transfer; the first success after a trip ends the trial."""
        if self.is_on_trial(now):
            self.errors.clear()
            self.cooldown_s = 0.0
            self.reason = ""

    def failed(self, now: float, reason: str) -> bool:
        """Note an error; return True if the error trips the rail."""
        self.reason = reason
        self.errors = [at for at in self.errors if now - at < TRIP_WINDOW_S] + [now]
        if not self.is_on_trial(now) and len(self.errors) < TRIP_ERRORS:
            return False
        self.errors.clear()
        self.cooldown_s = min(2 * self.cooldown_s, MAX_COOLDOWN_S) or COOLDOWN_S
        self.tripped_until = now + self.cooldown_s
        return True


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that travel in one work request.

    Attributes:
        local: address in this process.
        at: offset in the node's segment file.
        size: number of bytes, at least 1.
    """

    local: int
    at: int
    size: int


def cut(piece: Piece, limit: int) -> list[Piece]:
    """Cut a piece into work requests of at most ``limit`` bytes."""
    return [
        Piece(piece.local + start, piece.at + start, min(limit, piece.size - start))
        for start in range(0, piece.size, limit)
    ]


def join(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that are adjacent on both sides, to save requests."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        ends = (last.local + last.size, last.at + last.size) if last else None
        if last is not None and ends == (piece.local, piece.at):
            joined[-1] = Piece(last.local, last.at, last.size + piece.size)
        else:
            joined.append(piece)
    return joined


def share_out(
    items: Sequence[T], sizes: Sequence[int], rails: Sequence[R]
) -> list[tuple[R, list[T]]]:
    """Give every item to the rail with the fewest bytes so far; omit rails without items.

    A rail keeps the order of its items, so neighbours in memory stay neighbours on the wire.
    """
    shares: list[list[T]] = [[] for _ in rails]
    loads = [0] * len(rails)
    for item, size in zip(items, sizes, strict=True):
        least = loads.index(min(loads))
        loads[least] += size
        shares[least].append(item)
    return [(rail, share) for rail, share in zip(rails, shares, strict=True) if share]


def nearest(rails: Sequence[R], distances: Sequence[int]) -> list[R]:
    """Return the rails at the least distance: all rails if no distance is known."""
    least = min(distances, default=0)
    return [rail for rail, distance in zip(rails, distances, strict=True) if distance == least]


def pair_ports(local: Sequence[str], remote: Sequence[str]) -> list[tuple[int, int]]:
    """Pair our ports with the node's, each at most once, by the longest common address prefix.

    Networks for RDMA have a plane per port, each plane with its own subnet: ports of one plane find
    each other. If one side has more ports, the extra ports stay unused: the other side's ports are
    the bottleneck.

    Args:
        local: GIDs of our ports.
        remote: GIDs of the node's ports.

    Returns:
        pairs of indices, sorted.
    """
    ranked = sorted(
        (-_common_bits(a, b), i, j) for i, a in enumerate(local) for j, b in enumerate(remote)
    )
    pairs: list[tuple[int, int]] = []
    for _, i, j in ranked:
        if all(i != taken and j != gone for taken, gone in pairs):
            pairs.append((i, j))
    return sorted(pairs)


def _common_bits(a: str, b: str) -> int:
    differ = int(ipaddress.IPv6Address(a)) ^ int(ipaddress.IPv6Address(b))
    return 128 - differ.bit_length()


SYSFS: Final = Path("/sys")
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
_MPOL_F_NODE_ADDR: Final = 1 | 2
_FAR: Final = 1 << 16
"""Distance between different root complexes; more than any number of bridges."""


@dataclass(frozen=True, slots=True)
class NumaPlace:
    """The place of a device or of memory in the machine.

    Attributes:
        numa_node: memory node; None if unknown or if all nodes are equal.
        pci_path: the bridges above a device and the device itself, root first; empty for memory.
    """

    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()


def device_place(name: str, sysfs: Path = SYSFS) -> NumaPlace:
    """Return the place of an RDMA device; software devices have no place."""
    return _place_of(sysfs / "class/infiniband" / name / "device", sysfs)


def pci_place(address: str, sysfs: Path = SYSFS) -> NumaPlace:
    """Return the place of a PCI device, for example of a GPU at ``0000:3b:00.0``."""
    return _place_of(sysfs / "bus/pci/devices" / address.lower(), sysfs)


def memory_place(address: int, sysfs: Path = SYSFS) -> NumaPlace:
    """Return the place of the page at an address; the page must have been touched."""
    if len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return NumaPlace()
    number = _GET_MEMPOLICY.get(platform.machine())
    node = ctypes.c_int(-1)
    if number is None:
        return NumaPlace()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(number),
        ctypes.byref(node),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_MPOL_F_NODE_ADDR),
    )
    return NumaPlace(node.value) if done == 0 and node.value >= 0 else NumaPlace()


def distance(a: NumaPlace, b: NumaPlace) -> int:
    """Return the distance of two places; 0 is the smallest known distance.

    The distance of two PCI devices under one root complex is the number of bridges between them;
    under different root complexes it is _FAR or more. Otherwise only a different memory node
    counts.
    """
    if a.pci_path and b.pci_path and a.pci_path[0] == b.pci_path[0]:
        shared = 0
        for left, right in zip(a.pci_path, b.pci_path, strict=False):
            if left != right:
                break
            shared += 1
        return len(a.pci_path) + len(b.pci_path) - 2 * shared
    if a.pci_path and b.pci_path:
        return _FAR + (a.numa_node != b.numa_node)
    if a.numa_node is None or b.numa_node is None:
        return 0
    return int(a.numa_node != b.numa_node)


def _place_of(link: Path, sysfs: Path) -> NumaPlace:
    try:
        folder = link.resolve(strict=True)
    except OSError:
        return NumaPlace()
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    try:
        path = folder.relative_to((sysfs / "devices").resolve()).parts
    except ValueError:
        path = ()
    return NumaPlace(node if node >= 0 else None, path)

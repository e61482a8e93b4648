"""Distances between RDMA devices, memory and GPUs, according to sysfs.

Called by dmp/transport/verbs/fabric.py to choose rails. Reads small files and makes one system
call. An unknown place is None, and then all devices count as equally near.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

"""How far RDMA devices are from memory and GPUs, as sysfs tells.

Called by dmp/transport/verbs/fabric.py to choose rails. Reads small files and one system call;
what can't be found out is None, and then every device is as near as any other.
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
"""Distance of things on different root complexes; more than any number of bridges."""


@dataclass(frozen=True, slots=True)
class NumaPlace:
    """Where a device or some memory sits.

    Attributes:
        numa_node: its memory node; None where unknown or all are equal.
        pci_path: the bridges above a device and itself, root first; empty for memory.
    """

    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()


def device_place(name: str, sysfs: Path = SYSFS) -> NumaPlace:
    """Return where an RDMA device sits; software devices sit nowhere."""
    return _place_of(sysfs / "class/infiniband" / name / "device", sysfs)


def pci_place(address: str, sysfs: Path = SYSFS) -> NumaPlace:
    """Return where a PCI device sits, for example a GPU at ``0000:3b:00.0``."""
    return _place_of(sysfs / "bus/pci/devices" / address.lower(), sysfs)


def memory_place(address: int, sysfs: Path = SYSFS) -> NumaPlace:
    """Return where the page at an address sits; it must have been touched."""
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
    """Return how far two places are: 0 is as near as can be told.

    Two PCI devices are as far as the bridges between them; otherwise another memory node is far.
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

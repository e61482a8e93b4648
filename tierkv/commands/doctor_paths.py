"""Which paths KV bytes can take from this machine, and what would open the others.

Part of ``tierkv doctor``. What a running node really uses, and why, stands in ``tierkv.nodes`` and
``tierkv status``.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
from pathlib import Path
from typing import Final

from tierkv.commands.finding import MISSING, OK, OPTIONAL, Finding
from tierkv.dmp.segment.memory_room import is_memory, memory_available
from tierkv.dmp.transport.verbs.device import Discovery, discover
from tierkv.processes.cluster_files import segment_prefix
from tierkv.processes.left_memory import CURE, orphans_text
from tierkv.settings import Settings, name_list

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def check_shm(settings: Settings) -> Finding:
    """Room for the pool's segment file, which neighbours map."""
    folder, wanted = settings.dmp.segment_dir, int(settings.dmp.capacity)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        cure = "set dmp.segment_dir to a folder on tmpfs"
        return Finding("path shm", MISSING, f"{folder}: {error.strerror}", cure)
    text = f"{folder} has {free >> 20} MiB free, dmp.capacity is {wanted >> 20} MiB"
    held = _held_bytes(Path(folder), segment_prefix(settings.cluster.run_dir))
    if held:
        text += f", this cluster's segments hold {held >> 20} MiB"
    if free + held >= wanted:
        return Finding("path shm", OK, text)
    cure = (
        f"mount -o remount,size={(wanted >> 20) + 1024}m {folder}, or lower dmp.capacity "
        f"(in a container: --shm-size)"
    )
    return Finding("path shm", MISSING, text, cure)


def _held_bytes(folder: Path, prefix: str) -> int:
    """Memory of segments that are there already: a start attaches them and needs no more."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob(f"{prefix}*.seg"))


def check_left(settings: Settings) -> Finding:
    """Memory that clusters have left whose folder is gone."""
    orphans = orphans_text(settings)
    if orphans:
        return Finding("memory left behind", OPTIONAL, orphans, CURE)
    return Finding("memory left behind", OK, "none")


def check_memory(settings: Settings) -> Finding:
    """Memory for the pool, which the room in its folder does not promise."""
    available = memory_available()
    if available is None:
        return Finding("memory", OPTIONAL, "the system does not say how much is available")
    wanted = int(settings.dmp.capacity)
    held = _held_bytes(Path(settings.dmp.segment_dir), segment_prefix(settings.cluster.run_dir))
    text = f"{available >> 20} MiB available, dmp.capacity is {wanted >> 20} MiB"
    if available + held >= wanted or not is_memory(Path(settings.dmp.segment_dir)):
        return Finding("memory", OK, text)
    return Finding("memory", MISSING, text, f"lower dmp.capacity, or {CURE}")


def check_disk(settings: Settings) -> Finding:
    """Room for the disk pool, and the library its archive needs."""
    wanted = int(settings.dmp.disk_capacity)
    if not settings.dmp.disk_path:
        cure = "set dmp.disk_path to a folder on a local disk"
        return Finding("disk pool", OPTIONAL, "none; evicted blocks are computed again", cure)
    folder = Path(settings.dmp.disk_path).expanduser()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        return Finding("disk pool", MISSING, f"{folder} can't be written", "set dmp.disk_path")
    if settings.dmp.archive_url and importlib.util.find_spec("obstore") is None:
        text = f"{settings.dmp.archive_url} needs the package obstore"
        return Finding("disk pool", MISSING, text, "pip install 'tierkv[s3]'")
    free = shutil.disk_usage(parent).free
    held = sum(path.stat().st_blocks * 512 for path in folder.glob("*/segment-*.l4"))
    text = f"{folder} has {free >> 20} MiB free, dmp.disk_capacity is {wanted >> 20} MiB"
    if held:
        text += f", disk pools there hold {held >> 20} MiB"
    if free + held >= wanted:
        return Finding("disk pool", OK, text)
    return Finding("disk pool", MISSING, text, "free disk space, or lower dmp.disk_capacity")


def check_rdma(settings: Settings) -> Finding:
    """RDMA devices, pyverbs and locked memory; without them the pool uses TCP between machines."""
    if settings.dmp.rdma == "off":
        return Finding("path rdma", OPTIONAL, "dmp.rdma is off", "set dmp.rdma to auto")
    return judge_rdma(
        discover(name_list(settings.dmp.rdma_devices)),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        capacity_bytes=int(settings.dmp.capacity),
    )


def judge_rdma(found: Discovery, *, memlock_bytes: int, capacity_bytes: int) -> Finding:
    """Say what RDMA lacks here; pure.

    Args:
        found: ports, or why there are none.
        memlock_bytes: ``ulimit -l`` in bytes; negative for no limit.
        capacity_bytes: the segment, which RDMA locks in memory.
    """
    if not found.ports:
        reason = found.reason.removeprefix("no RDMA: ")
        return Finding("path rdma", OPTIONAL, f"{reason}; other machines: TCP", _rdma_cure(reason))
    names = ", ".join(f"{port.device} ({port.gid})" for port in found.ports)
    if 0 <= memlock_bytes < capacity_bytes:
        text = f"{names}, but ulimit -l is {memlock_bytes >> 20} MiB of {capacity_bytes >> 20} MiB"
        return Finding("path rdma", OPTIONAL, text, "ulimit -l unlimited (LimitMEMLOCK=infinity)")
    return Finding("path rdma", OK, names)


def _rdma_cure(reason: str) -> str:
    if "pyverbs" in reason:
        return "apt-get install python3-pyverbs, or deploy/install-pyverbs.sh"
    if "no active port" in reason:
        return "bring the device's network interface up and give it an IPv4 address"
    if "no RDMA device" in reason:
        return "a RoCE or InfiniBand card; to try: rdma link add rxe0 type rxe netdev eth0"
    return "docs/rdma.md"


def check_tcp(settings: Settings) -> Finding:
    """The data plane's address can be bound, and says who can reach it."""
    bind, port = settings.dmp.bind, settings.dmp.port
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            cure = "a running dmp node? (`tierkv status`) Else set dmp.bind and dmp.port"
            return Finding("path tcp", OPTIONAL, f"{bind}:{port}: {error.strerror}", cure)
    if bind in LOOPBACK:
        return Finding("path tcp", OK, f"{bind}, this machine only (dmp.bind)")
    if not settings.cluster.token:
        return Finding("path tcp", MISSING, f"{bind} without a token", "set cluster.token")
    return Finding("path tcp", OK, f"{bind}:{port or 'any'}")

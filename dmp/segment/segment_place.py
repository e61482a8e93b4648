"""A segment's place without numpy: whose file it is, and how much memory there is for another.

Commands that only look at files (tierkv/processes/cluster_files.py) read the owner from the
beginning of the file: the magic and the owning cluster. How much more memory this process may take
follows from the limits of the machine and the control group. The check runs before a segment is
opened or made (dmp/segment/segment_file.py), before a cluster starts, and when a process starts
that will make a segment later (tierkv/embedded.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import ConfigError

FILE_MAGIC: Final = b"TIERKVSG"
PAGE: Final = 4096
OWNER_AT: Final = 64
"""Offset of the length (u16) and UTF-8 path of the folder of the owning cluster; the length is 0 in
files of older versions."""

MAX_OWNER_BYTES: Final = 1024
_LENGTH: Final = struct.Struct("<H")


def pack_owner(folder: str) -> bytes:
    """Return the bytes to store at OWNER_AT; a path above MAX_OWNER_BYTES is left out."""
    raw = os.fsencode(folder)
    raw = raw if len(raw) <= MAX_OWNER_BYTES else b""
    return _LENGTH.pack(len(raw)) + raw


def read_owner(fd: int) -> str:
    """Return the folder of the owning cluster; empty if the file names no owner."""
    raw = os.pread(fd, PAGE, 0)
    if not raw.startswith(FILE_MAGIC) or len(raw) < PAGE:
        return ""
    (length,) = _LENGTH.unpack_from(raw, OWNER_AT)
    return os.fsdecode(raw[OWNER_AT + _LENGTH.size :][: min(length, MAX_OWNER_BYTES)])


_CGROUPS: Final = Path("/sys/fs/cgroup")
_TMPFS: Final = ("tmpfs", "ramfs", "hugetlbfs")


def memory_available(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that can be taken before the OOM killer acts; None if unknown."""
    rooms = [*_of_machine(proc), *_of_groups(proc, cgroups)]
    return min(rooms, default=None)


def is_memory(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return True if a folder's files are in memory, not on disk."""
    kinds: dict[str, str] = {}
    try:
        for line in mounts.read_text().splitlines():
            _, place, kind, *_ = line.split(" ")
            kinds[place] = kind
    except (OSError, ValueError):
        return False
    resolved = folder.resolve()
    mount = next((p for p in (resolved, *resolved.parents) if str(p) in kinds), None)
    return mount is not None and kinds[str(mount)] in _TMPFS


def check_room(path: Path, needed: int) -> None:
    """Check that memory for a whole segment is available.

    Args:
        path: path of the future segment; the folder must exist.
        needed: size of the segment in bytes.

    Raises:
        ConfigError: with the number of free bytes and the remedy.
    """
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    cure = "lower dmp.capacity, free what stopped clusters left (tierkv pool clean)"
    if needed > free:
        raise ConfigError(
            f"segment {path} needs {needed} bytes but {free} are free in {path.parent}; {cure}, "
            f"enlarge it (mount -o remount,size=... {path.parent}), or put dmp.segment_dir "
            "elsewhere"
        )
    available = memory_available() if is_memory(path.parent) else None
    if available is not None and needed > available:
        raise ConfigError(
            f"segment {path} needs {needed} bytes but this machine has {available} of memory "
            f"available; {cure}, or stop what else takes memory"
        )


def _of_machine(proc: Path) -> Iterator[int]:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        yield from (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError):
        return


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the room in each control group of this process (version 2), from leaf to root."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return
    group = cgroups / name.lstrip("/")
    for folder in (group, *group.parents):
        if cgroups in (folder, *folder.parents):
            yield from _of_group(folder)


def _of_group(folder: Path) -> Iterator[int]:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The kernel drops inactive page cache before it kills a process.
        yield int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return

"""The beginning of a segment file: the magic and the owning cluster.

A part of dmp/segment/geometry.py that needs no numpy, for commands that only look at files
(tierkv/processes/cluster_files.py).
"""

from __future__ import annotations

import os
import struct
from typing import Final

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

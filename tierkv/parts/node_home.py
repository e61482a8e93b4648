"""The home of a node, which distinguishes a restart from another process with the same name.

Called by tierkv/commands/serve.py; the meta server compares homes (metaserver/state.py). Only
one process at a time has a home. A lock on a file ensures this, and the kernel frees the lock
however the process ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
from contextlib import AsyncExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Final

_MACHINE_ID: Final = Path("/etc/machine-id")
_BYTES: Final = 16


def claim_home(folder: Path, name: str, stack: AsyncExitStack) -> str:
    """Return the home of a node in a folder; a new home if another process has the lock.

    The home is a random number, which the folder keeps in ``NAME.home``.
    """
    fresh = secrets.token_hex(_BYTES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(folder / f"{name}.home", flags, 0o600)
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        known = os.pread(fd, 2 * _BYTES, 0).decode(errors="replace")
        if re.fullmatch(rf"[0-9a-f]{{{2 * _BYTES}}}", known):
            return known
        os.pwrite(fd, fresh.encode(), 0)
    except OSError:
        pass  # The next start has another home, and waits for the end of this process.
    return fresh


def segment_home(path: Path) -> str:
    """Return the home of a pool node: its segment, which has one owner, on this machine."""
    try:
        machine = _MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    text = "\0".join((machine, socket.gethostname(), str(path.resolve())))
    return blake2b(text.encode(), digest_size=_BYTES).hexdigest()

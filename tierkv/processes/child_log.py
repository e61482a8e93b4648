"""Keeps the log of a running process short: what is old goes to LOG.1, which held older lines.

Called by tierkv/processes/supervisor.py. The process has the file open to append and never learns
of it, so the content is copied and the file is cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO, Final

LOG_BYTES: Final = 64 << 20
"""A log that is longer is moved; with LOG.1 a process has twice as much at most."""


def keep_short(path: Path, most_bytes: int = LOG_BYTES) -> bool:
    """Move what a log holds to LOG.1 when it is too long; whether that was done.

    What is written between the last look and the cut is lost: a few lines at most.

    Raises:
        OSError: the file can't be copied, for example because the disk is full; it stays as it is.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
        if os.fstat(log.fileno()).st_size <= most_bytes:
            return False
        _copy(log, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
        return True
    return False


def _copy(log: BinaryIO, older: Path) -> None:
    fresh = older.with_name(f"{older.name}.new")
    try:
        fd = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as copy:
            shutil.copyfileobj(log, copy)
            shutil.copyfileobj(log, copy)  # What came meanwhile.
        fresh.replace(older)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise

"""What a command does to its own process: limits, file modes, faster imports, a quick end.

Called by the verbs of the command line and by the embedded cluster. Service managers start
processes with a soft limit of 1,024 open files, for programs that use select(). TierKV does not use
select(), so every role raises the limit to the hard limit at start. This module imports nothing of
TierKV and never touches another process.
"""

from __future__ import annotations

import atexit
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

_MOST_DESCRIPTORS: Final = 1 << 20
"""Limit if the hard limit is higher or infinite: some programs walk through all descriptors."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit as far as this process may; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def keep_files_private() -> None:
    """Restrict files created from now on to this account: tables, logs, segments."""
    os.umask(0o077)


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Import without garbage collection: imports create many objects and no garbage.

    Measured on ``import torch``: saves a seventh of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def leave(code: int | str | None) -> NoReturn:
    """End the process as sys.exit does: threads are awaited, exit hooks run, output is flushed.

    A closed reader is no error here, because the writer has already received the error.

    Args:
        code: the exit status; None is 0, a text is printed and means 1.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    status = code or 0
    # The first two steps of the interpreter's own end; neither has a public name.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = status or 1
    os._exit(status)

"""The end of a command: like sys.exit, without taking the interpreter apart.

Called by tierkv/cli.py as the last thing of a process. Unloading what torch and gRPC brought takes
up to a second, for memory that goes back to the system anyway.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: int | str | None) -> NoReturn:
    """End the process as sys.exit does: threads are awaited, exit hooks run, output is flushed.

    A reader that is gone is no error here: who writes has learned of it.

    Args:
        code: the exit status; None is 0, a text is printed and means 1.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    status = code or 0
    # The first two steps of the interpreter's own end; only they have no public name.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = status or 1
    os._exit(status)

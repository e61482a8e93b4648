"""The end of a command: like sys.exit, without tearing down the interpreter.

Called by tierkv/cli.py as the last action of a process. Unloading torch and gRPC takes up to a
second, only to free memory that the system frees anyway.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


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

"""How many files and sockets a process may have open, and for which accounts it makes files.

Service managers start processes with a soft limit of 1,024, for programs that use select(); ours
don't, so every role raises it to the hard limit at start.
"""

from __future__ import annotations

import os
import resource
from typing import Final

MOST: Final = 1 << 20
"""Where the hard limit is higher, or none: some programs walk through all of them."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit as far as this process may; answers what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def keep_files_private() -> None:
    """Let only this account read what is made from now on: tables, logs, segments."""
    os.umask(0o077)

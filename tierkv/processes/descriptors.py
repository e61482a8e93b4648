"""Limits of a process's open files and sockets, and access to the files of a process.

Service managers start processes with a soft limit of 1,024, for programs that use select(). TierKV
does not use select(), so every role raises the limit to the hard limit at start.
"""

from __future__ import annotations

import os
import resource
from typing import Final

MOST: Final = 1 << 20
"""Limit if the hard limit is higher or infinite: some programs walk through all descriptors."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit as far as this process may; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def keep_files_private() -> None:
    """Restrict files created from now on to this account: tables, logs, segments."""
    os.umask(0o077)

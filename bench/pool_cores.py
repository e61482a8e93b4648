"""Cores for a benchmark's client and servers: disjoint sets, as on two machines.

Without disjoint sets the scheduler puts a quiet client and server on a single core, where a wake-up
is cheap, and a busy pair on two cores. The conditions of the contenders would then differ from
second to second.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_CORES = sorted(os.sched_getaffinity(0))


def client_side() -> None:
    """Pin this thread, and threads started by this thread, to the first half of the cores."""
    if len(_CORES) > 1:
        os.sched_setaffinity(0, _CORES[: len(_CORES) // 2])


@contextlib.contextmanager
def server_side() -> Iterator[None]:
    """Pin processes started in the block to the second half of the cores."""
    before = os.sched_getaffinity(0)
    if len(_CORES) > 1:
        os.sched_setaffinity(0, _CORES[len(_CORES) // 2 :])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

"""Which cores a benchmark's client and servers run on: never the same, as on two machines.

Without this the scheduler puts a quiet client and server on one core, where a wake-up is cheap, and
a busy pair on two; contenders would be measured under different conditions from second to second.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_CORES = sorted(os.sched_getaffinity(0))


def client_side() -> None:
    """Keep this thread, and those it starts, on the first half of the cores."""
    if len(_CORES) > 1:
        os.sched_setaffinity(0, _CORES[: len(_CORES) // 2])


@contextlib.contextmanager
def server_side() -> Iterator[None]:
    """Processes started meanwhile live on the other half of the cores."""
    before = os.sched_getaffinity(0)
    if len(_CORES) > 1:
        os.sched_setaffinity(0, _CORES[len(_CORES) // 2 :])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

"""A DMP node in this process, for benchmarks that need a pool and no network.

Used by bench.pipeline, bench.split and bench.controller, each behind a line of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import HostId, NodeId


@contextmanager
def memory_pool(host: HostId, *, capacity_bytes: int) -> Iterator[DmpNode]:
    """Run a node on ``host`` over a segment in shared memory; remove both at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        config = DmpConfig(
            NodeId("dmp"),
            host,
            segment_path=f"{Path(folder)}/segment",
            capacity_bytes=capacity_bytes,
        )
        dmp = DmpNode(config, NullReporter(), SystemClock())
        dmp.start()
        try:
            yield dmp
        finally:
            dmp.stop()

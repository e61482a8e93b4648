"""Time until a restarted DMP node serves: slot headers scanned, slot table restored.

Run ``python -m bench.reattach``. The segment is filled through the node's own calls (without
payload), then attached repeatedly as in a restart.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.report import Report, finish, median_seconds, parse_arguments
from tierkv.dmp.config import MIN_SLOT_BYTES, DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.node.state import NodeState, shape_of
from tierkv.dmp.segment.segment_file import open_segment, scan_segment
from tierkv.dmp.wire.messages import Sealing
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Owner, RangeShape
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

CHAIN_BLOCKS = 50
BATCH = 1_000


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    slots = 10_000 if arguments.quick else 100_000
    report = Report("re-attach")
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as folder:
        config = _config(Path(folder) / "node.seg", slots)
        _fill(config, slots, random.Random(arguments.seed))
        _measure(report, config, slots)
    report.note(f"{slots} sealed slots in chains of {CHAIN_BLOCKS} blocks, one model")
    finish(report, arguments.format)


def _config(path: Path, slots: int) -> DmpConfig:
    extent_bytes = 4 << 20
    extents = -(-slots * MIN_SLOT_BYTES // extent_bytes)
    return DmpConfig(
        node_id=NodeId("dmp-bench"),
        host=HostId("bench"),
        segment_path=str(path),
        capacity_bytes=extents * extent_bytes,
        extent_bytes=extent_bytes,
        scrub_rate_bytes_per_s=0,
    )


def _fill(config: DmpConfig, slots: int, rng: random.Random) -> None:
    node = DmpNode(config, NullReporter(), SystemClock())
    node.start()
    keys = [BlockKey(rng.randbytes(16)) for _ in range(slots)]
    for start in range(0, slots, BATCH):
        places = node.puts.reserve([_put(keys, i) for i in range(start, min(start + BATCH, slots))])
        node.puts.seal([Sealing(place, (1, 2)) for place in places if place is not None])
    assert node.reports.stats().memory.blocks_used == slots
    node.stop()


def _put(keys: Sequence[BlockKey], index: int) -> BlockSpec:
    parent = keys[index - 1] if index % CHAIN_BLOCKS else ROOT_PARENT
    return BlockSpec(
        keys[index], parent, 64, ranges=RangeShape(8_000, 2), owner=Owner("demo", "default")
    )


def _measure(report: Report, config: DmpConfig, slots: int) -> None:
    kept = []  # Freeing a table is not part of a restart.

    def attach() -> None:
        segment = open_segment(config.segment_file, shape_of(config))
        state = NodeState(config, NullReporter(), SystemClock())
        assert state.attach(segment, has_lower_tier=False) == slots
        kept.append(state)
        segment.close()

    def scan() -> None:
        segment = open_segment(config.segment_file, shape_of(config))
        assert len(scan_segment(segment).sealed) == slots
        segment.close()

    attach_s = median_seconds(attach, repeats=5, clock=time.perf_counter)
    report.add("slots_total", slots)
    report.add("scan_ms", median_seconds(scan, repeats=5, clock=time.perf_counter) * 1e3)
    report.add("attach_ms", attach_s * 1e3)
    report.add("attach_us_per_slot", attach_s / slots * 1e6)


if __name__ == "__main__":
    main()

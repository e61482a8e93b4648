"""What every BlockReporter does, numbered as in kvcore/block_event.py.

Two of them are of tests: reporters that keep what they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fix_dmp import Journal
from tests.fix_engine_events import Claimed
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Tier
from tierkv.kvcore.block_event import BlockRemoved, BlockReporter, BlockStored, NullReporter
from tierkv.kvcore.ids import BlockKey, Incarnation, NodeId
from tierkv.metaserver.reporter import MetaReporter


def full_reporter() -> BlockReporter:
    """An outbox whose meta server is away, with less room than events."""
    return MetaReporter(NodeId("n"), Incarnation(1), max_queued_events=5)


def roomy_reporter() -> BlockReporter:
    return MetaReporter(NodeId("n"), Incarnation(1))


@pytest.fixture(params=[NullReporter, roomy_reporter, full_reporter, Journal, Claimed])
def reporter(request: pytest.FixtureRequest) -> BlockReporter:
    make: Callable[[], BlockReporter] = request.param
    return make()


def stored(number: int) -> BlockStored:
    key = BlockKey(number.to_bytes(16, "big"))
    return BlockStored(BlockSpec(key, ROOT_PARENT, 16), Tier.L1)


def test_1_it_takes_news_at_once_and_without_an_error(reporter: BlockReporter) -> None:
    reporter.report(())
    for number in range(1, 50):
        reporter.report([stored(number), stored(100 + number)])
        reporter.report([BlockRemoved(stored(number).key, Tier.L1)])


def test_2_any_thread_may_report(reporter: BlockReporter) -> None:
    def report(first: int) -> None:
        for number in range(first, first + 100):
            reporter.report([stored(number)])

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(report, 1_000 * thread) for thread in range(1, 9)]:
            done.result()
    if isinstance(reporter, Journal | Claimed):
        told = reporter.events if isinstance(reporter, Journal) else reporter.keys
        assert len(told) == 800

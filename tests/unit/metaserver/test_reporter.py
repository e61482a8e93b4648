"""The outbox: numbering, resending, tickets, and inventories whenever news may be lost."""

from __future__ import annotations

import threading

import pytest

from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, EventBatch
from tierkv.kvcore.errors import TransportError
from tierkv.kvcore.ids import BlockKey, Incarnation, NodeId
from tierkv.metaserver.client import ReportReply
from tierkv.metaserver.reporter import BATCH_EVENTS, MetaReporter

TAKEN = ReportReply(accepted=True, send_inventory=False)
GAP = ReportReply(accepted=True, send_inventory=True)
UNKNOWN = ReportReply(accepted=False, send_inventory=False)


def block(number: int) -> BlockStored:
    return BlockStored(BlockSpec(BlockKey(number.to_bytes(16, "big")), ROOT_PARENT, 4), Tier.L1)


def gone(number: int) -> BlockRemoved:
    return BlockRemoved(BlockKey(number.to_bytes(16, "big")), Tier.L1)


def reporter(held: list[BlockStored] | None = None, **options: int) -> MetaReporter:
    blocks = [] if held is None else held
    return MetaReporter(NodeId("n"), Incarnation(5), lambda: list(blocks), **options)


def synced(outbox: MetaReporter) -> MetaReporter:
    """Take and acknowledge everything that is owed."""
    while (batch := outbox.next_batch()) is not None:
        outbox.acknowledge(batch, TAKEN)
    return outbox


def sent(batch: EventBatch | None) -> tuple[int, bool, int, bool, list[BlockEvent]]:
    assert batch is not None
    return batch.seq, batch.inventory, batch.part, batch.more, list(batch.events)


def test_the_first_thing_sent_is_an_inventory_even_an_empty_one() -> None:
    outbox = reporter()
    ticket = outbox.ticket()
    assert not outbox.is_delivered(ticket)
    batch = outbox.next_batch()
    assert sent(batch) == (1, True, 0, False, [])
    assert batch is not None and (batch.node_id, batch.incarnation) == ("n", 5)
    outbox.acknowledge(batch, TAKEN)
    assert outbox.is_delivered(ticket)
    assert outbox.next_batch() is None


def test_events_reported_before_the_snapshot_are_in_it_and_not_sent_again() -> None:
    held = [block(1)]
    outbox = reporter(held)
    outbox.report([block(1)])
    batch = outbox.next_batch()
    assert sent(batch)[4] == [block(1)]
    assert batch is not None
    outbox.acknowledge(batch, TAKEN)
    assert outbox.next_batch() is None


def test_events_go_in_order_in_numbered_batches() -> None:
    outbox = synced(reporter())
    outbox.report([block(1), gone(1)])
    outbox.report([block(2)])
    outbox.report([])
    ticket = outbox.ticket()
    batch = outbox.next_batch()
    assert sent(batch) == (2, False, 0, False, [block(1), gone(1), block(2)])
    assert batch is not None
    outbox.report([block(3)])
    outbox.acknowledge(batch, TAKEN)
    assert outbox.is_delivered(ticket)
    assert not outbox.is_delivered(outbox.ticket())
    assert sent(outbox.next_batch()) == (3, False, 0, False, [block(3)])


def test_a_batch_is_sent_again_unchanged_until_it_is_answered() -> None:
    outbox = synced(reporter())
    outbox.report([block(1)])
    batch = outbox.next_batch()
    outbox.report([block(2)])
    assert outbox.next_batch() is batch


def test_large_inventories_go_in_parts_and_later_events_follow() -> None:
    held = [block(n) for n in range(BATCH_EVENTS + 1)]
    outbox = reporter(held)
    ticket = outbox.ticket()
    first = outbox.next_batch()
    assert first is not None
    outbox.report([block(-1 & 0xFFFF)])
    assert sent(first)[:4] == (1, True, 0, True)
    outbox.acknowledge(first, TAKEN)
    assert not outbox.is_delivered(ticket)
    last = outbox.next_batch()
    assert sent(last) == (2, True, 1, False, held[BATCH_EVENTS:])
    assert last is not None
    outbox.acknowledge(last, TAKEN)
    assert outbox.is_delivered(ticket)
    assert sent(outbox.next_batch()) == (3, False, 0, False, [block(-1 & 0xFFFF)])


@pytest.mark.parametrize("reply", [GAP, UNKNOWN])
def test_a_gap_or_an_unknown_node_starts_an_inventory_over(reply: ReportReply) -> None:
    held = [block(n) for n in range(2 * BATCH_EVENTS)]
    outbox = reporter(held)
    first = outbox.next_batch()
    assert first is not None
    outbox.acknowledge(first, reply)
    outbox.report([block(77)])
    again = outbox.next_batch()
    assert sent(again)[:4] == (2, True, 0, True)


def test_a_request_while_an_inventory_is_under_way_is_not_doubled() -> None:
    outbox = reporter([block(n) for n in range(BATCH_EVENTS + 1)])
    for part in (0, 1):
        batch = outbox.next_batch()
        outbox.request_inventory()
        assert sent(batch)[1:3] == (True, part)
        assert batch is not None
        outbox.acknowledge(batch, TAKEN)
    assert outbox.next_batch() is None
    outbox.request_inventory()
    assert sent(outbox.next_batch())[:3] == (3, True, 0)


def test_a_full_queue_gives_way_to_an_inventory() -> None:
    held = [block(9)]
    outbox = synced(reporter(held, max_queued_events=4))
    outbox.report([block(n) for n in range(3)])
    in_flight = outbox.next_batch()
    assert in_flight is not None
    outbox.report([block(n) for n in range(5)])
    ticket = outbox.ticket()
    outbox.acknowledge(in_flight, TAKEN)
    assert not outbox.is_delivered(ticket)
    batch = outbox.next_batch()
    assert sent(batch) == (3, True, 0, False, [block(9)])
    assert batch is not None
    outbox.acknowledge(batch, TAKEN)
    assert outbox.is_delivered(ticket)


def test_a_failed_snapshot_is_taken_again() -> None:
    answers: list[list[BlockStored] | Exception] = [TransportError("node closing"), [block(1)]]

    def inventory() -> list[BlockStored]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    outbox = MetaReporter(NodeId("n"), Incarnation(1), inventory)
    with pytest.raises(TransportError):
        outbox.next_batch()
    assert outbox.inventory_due
    assert sent(outbox.next_batch())[4] == [block(1)]


def test_a_source_named_later_is_asked() -> None:
    outbox = synced(MetaReporter(NodeId("n"), Incarnation(1)))
    outbox.set_inventory(lambda: [block(3)])
    assert sent(outbox.next_batch())[4] == [block(3)]


def test_reports_from_many_threads_all_arrive_once_and_wake_the_sender() -> None:
    outbox = synced(reporter())
    wakes: list[int] = []
    outbox.set_wake(lambda: wakes.append(1))

    def work(base: int) -> None:
        for n in range(200):
            outbox.report([block(base + n)])

    threads = [threading.Thread(target=work, args=(1_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    got: list[BlockEvent] = []
    ticketed = False
    while not ticketed:
        alive = any(thread.is_alive() for thread in threads)
        batch = outbox.next_batch()
        if batch is not None:
            got.extend(batch.events)
            outbox.acknowledge(batch, TAKEN)
        ticketed = not alive and outbox.is_delivered(outbox.ticket())
    for thread in threads:
        thread.join()
    assert len(got) == len(set(got)) == 800
    assert len(wakes) == 800
    for base in range(0, 4_000, 1_000):
        mine = [e.key for e in got if base <= int.from_bytes(e.key, "big") < base + 1_000]
        assert mine == sorted(mine)

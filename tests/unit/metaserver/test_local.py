"""Streams of hold orders: what is on comes first; a reader that is too slow loses its stream."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockStored, HoldOrder, LeaseId
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.directory.leases import Asked
from tierkv.metaserver.local import MAX_QUEUED_KEYS, HoldStreams, LocalMeta
from tierkv.metaserver.reporter import MetaReporter

NODE, LIFE = NodeId("dmp-0"), Incarnation(1)
KEYS = [BlockKey(bytes([n]) * 16) for n in range(1, 4)]


def asked(lease: int, keys: int = 1) -> Asked:
    return Asked(NODE, LeaseId(lease), bytes(16 * keys), 1.0)


async def test_what_is_on_comes_first_then_what_is_sent_from_any_thread() -> None:
    streams = HoldStreams()
    stream = streams.open(NODE, LIFE, [asked(1), asked(2)])
    sender = threading.Thread(target=streams.send, args=([asked(3), asked(4)],))
    sender.start()
    got = [await stream.take() for _ in range(4)]
    sender.join()
    assert got == [asked(n) for n in (1, 2, 3, 4)]
    streams.send([Asked(NodeId("other"), LeaseId(5), b"", 1.0)])
    stream.end()
    assert await stream.take() is None


async def test_a_reader_that_is_too_slow_loses_its_stream_and_nobody_elses() -> None:
    streams = HoldStreams()
    slow = streams.open(NODE, LIFE, [])
    for lease in range(5):
        streams.send([asked(lease, MAX_QUEUED_KEYS // 4)])
    quick = streams.open(NODE, LIFE, [])
    streams.send([asked(9)])
    taken = []
    while (order := await slow.take()) is not None:
        taken.append(order.lease)
    assert taken == [0, 1, 2]
    assert await quick.take() == asked(9)


async def test_streams_of_lives_that_are_over_end() -> None:
    streams = HoldStreams()
    old, new = streams.open(NODE, LIFE, []), streams.open(NODE, Incarnation(2), [])
    streams.end_unless(lambda node: Incarnation(2))
    assert await old.take() is None
    streams.send([asked(1)])
    assert await new.take() == asked(1)
    streams.close(new)
    streams.close(old)
    streams.send([asked(2)])


async def until(heard: list[HoldOrder], count: int) -> None:
    async with asyncio.timeout(30):
        while len(heard) < count:
            await asyncio.sleep(0.005)


async def test_an_agent_passes_orders_on_and_opens_a_lost_stream_again() -> None:
    clock = ManualClock()
    meta = LocalMeta(clock=clock)
    info = NodeInfo(NODE, LIFE, NodeRole.DMP, HostId("a"))
    held = [
        BlockStored(BlockSpec(key, ROOT_PARENT, 4), Tier.L2, Location(NODE, LIFE, 0, n, 1, 64))
        for n, key in enumerate(KEYS)
    ]
    heard: list[HoldOrder] = []
    agent = NodeAgent(
        meta, info, MetaReporter(NODE, LIFE, lambda: held), NodeReport, on_hold=heard.append
    )
    await agent.start()
    await agent.flush()
    lease = (await meta.locate(KEYS, reserve_s=60.0)).lease
    await until(heard, 1)
    assert heard == [HoldOrder(lease, tuple(KEYS), 60.0)]
    meta.end_holds()
    await until(heard, 2)
    clock.advance(1.0)
    await meta.end_lease(lease, used=True)
    await until(heard, 3)
    assert heard[1:] == [HoldOrder(lease, tuple(KEYS), 60.0), HoldOrder(lease, (), 0.0)]
    await agent.stop()
    await meta.close()


@pytest.mark.parametrize("leave", [True, False])
async def test_a_reader_that_goes_leaves_nothing_behind(leave: bool) -> None:
    meta = LocalMeta()
    await meta.register(NodeInfo(NODE, LIFE, NodeRole.DMP, HostId("a")))
    stream = meta.holds(NODE, LIFE)
    async with aclosing(stream):
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        if leave:
            await meta.deregister(NODE, LIFE)
            with pytest.raises(StopAsyncIteration):
                await waiting
        else:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    assert len(meta.streams) == 0
    await meta.close()

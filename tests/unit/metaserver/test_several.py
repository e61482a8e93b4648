"""Several meta servers answer as one does, with one of them away, silent or started again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from tests.fix_meta import BreakableMeta
from tests.fix_scheduler import LAYOUT, make_info
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Tier
from tierkv.kvcore.block_event import NO_LEASE, BlockRemoved, BlockStored, EventBatch
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import DirectoryUnavailableError, StaleEpochError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.client import LocateReply
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.reporter import MetaReporter
from tierkv.metaserver.several_meta import SeveralMeta

CONFIG = MetaConfig(cluster_secret=b"s" * 32)
ADDRESSES = ["a:1", "b:1", "c:1"]
NODES = [
    make_info("pool-1", role=NodeRole.DMP, host=HostId("h1"), models=()),
    make_info("pool-2", role=NodeRole.DMP, host=HostId("h2"), models=()),
    make_info("compute-1", host=HostId("h1")),
    make_info("compute-2", host=HostId("h2")),
]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def servers(clock: ManualClock) -> list[BreakableMeta]:
    return [BreakableMeta(CONFIG, clock=clock) for _ in ADDRESSES]


@pytest.fixture
async def several(servers: list[BreakableMeta], clock: ManualClock) -> AsyncIterator[SeveralMeta]:
    client = SeveralMeta(servers, ADDRESSES, clock=clock)
    yield client
    for server in servers:
        server.gate.set()
    await client.close()


def chain(rng: random.Random, length: int) -> list[BlockKey]:
    return [BlockKey(rng.randbytes(16)) for _ in range(length)]


def stored(node: NodeInfo, keys: list[BlockKey], at: int, tier: Tier) -> BlockStored:
    slot = Location(node.node_id, node.incarnation, 0, at, 1, LAYOUT.payload_bytes)
    parent = keys[at - 1] if at else ROOT_PARENT
    return BlockStored(BlockSpec(keys[at], parent, 4), tier, slot if tier is Tier.L2 else None)


def said(reply: LocateReply) -> tuple[object, ...]:
    replicas = [sorted((r.node, str(r.tier)) for r in each) for each in reply.replicas]
    near = sorted((each.node_id, each.l1_blocks, each.l2_blocks) for each in reply.coverage)
    return reply.prefix_blocks, reply.memory_blocks, replicas, near, reply.lease != NO_LEASE


async def filled(rng: random.Random, metas: list[object], chains: list[list[BlockKey]]) -> None:
    """Tell the same to each directory: leading blocks here and there, and some holes."""
    for node in NODES:
        for meta in metas:
            await meta.register(node)  # type: ignore[attr-defined]
        pool = node.role is NodeRole.DMP
        events: list[BlockStored | BlockRemoved] = []
        for keys in chains:
            for at in range(rng.randrange(len(keys) + 1)):
                if rng.random() < 0.9:
                    tier = rng.choice([Tier.L2, Tier.L2, Tier.L4]) if pool else Tier.L1
                    events.append(stored(node, keys, at, tier))
        events += [
            BlockRemoved(event.spec.key if hasattr(event, "spec") else event.key, event.tier)
            for event in rng.sample(events, len(events) // 10)
        ]
        for meta in metas:
            for seq, inventory in ((1, True), (2, False)):
                batch = EventBatch(
                    node.node_id, node.incarnation, seq,
                    tuple(events) if inventory else (), inventory,
                )  # fmt: skip
                assert (await meta.report_events(batch)).accepted  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(20))
async def test_several_servers_answer_as_one(
    several: SeveralMeta, servers: list[BreakableMeta], clock: ManualClock, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    one = BreakableMeta(CONFIG, clock=clock)
    chains = [chain(rng, rng.choice((1, 3, 40, 200))) for _ in range(6)]
    await filled(rng, [one, several], chains)

    async def compare() -> None:
        for keys in chains:
            for asked in (keys, keys[: len(keys) // 2], keys[::-1]):
                reader = rng.choice([None, HostId("h1")])
                reserve_s = rng.choice([0.0, 5.0])
                expected = await one.locate(asked, reader=reader, reserve_s=reserve_s)
                got = await several.locate(asked, reader=reader, reserve_s=reserve_s)
                assert said(got) == said(expected)
        both = [await meta.locate_many(chains, reserve_s=1.0) for meta in (one, several)]
        assert list(map(said, both[0])) == list(map(said, both[1]))

    await compare()
    blocks = (await one.list_blocks(100_000), await several.list_blocks(100_000))
    assert blocks[0].total == blocks[1].total == len(blocks[1].blocks)
    single, joined = [dict(await meta.directory_counts()) for meta in (one, several)]
    assert (single["blocks"], single["copies"]) == (joined["blocks"], joined["copies"])
    servers[seed % 3].down = True
    await compare()


async def test_blocks_whose_owners_are_both_lost_end_the_prefix(
    several: SeveralMeta, servers: list[BreakableMeta]
) -> None:
    rng = random.Random(1)
    keys = chain(rng, 100)
    node = NODES[0]
    await several.register(node)
    events = tuple(stored(node, keys, at, Tier.L2) for at in range(100))
    await several.report_events(EventBatch(node.node_id, node.incarnation, 1, events, True))
    assert (await several.locate(keys)).prefix_blocks == 100
    servers[0].down = servers[1].down = True
    reply = await several.locate(keys)
    assert 0 <= reply.prefix_blocks < 20
    assert all(reply.replicas)
    servers[2].down = True
    with pytest.raises(DirectoryUnavailableError, match="a:1, b:1, c:1"):
        await several.locate(keys)


async def test_a_silent_server_costs_its_time_out_once(
    several: SeveralMeta, servers: list[BreakableMeta]
) -> None:
    keys = chain(random.Random(2), 60)
    node = NODES[0]
    await several.register(node)
    events = tuple(stored(node, keys, at, Tier.L2) for at in range(60))
    await several.report_events(EventBatch(node.node_id, node.incarnation, 1, events, True))
    servers[1].gate.clear()
    assert (await several.locate(keys)).prefix_blocks == 60
    asked = len(servers[1].asked["locate"])
    for _ in range(3):
        assert (await several.locate(keys)).prefix_blocks == 60
    questions = [chain for chain, *_ in servers[1].asked["locate"][asked:]]
    assert not any(questions), "out of use: only looked at"
    servers[1].gate.set()
    async with asyncio.timeout(30):
        while not any(chain for chain, *_ in servers[1].asked["locate"][asked:]):
            await several.locate(keys)
            await asyncio.sleep(0.01)


async def test_a_server_that_starts_again_is_told_everything(
    several: SeveralMeta, servers: list[BreakableMeta], clock: ManualClock
) -> None:
    keys = chain(random.Random(3), 50)
    node = NODES[0]
    held = [stored(node, keys, at, Tier.L2) for at in range(50)]
    reporter = MetaReporter(node.node_id, node.incarnation, lambda: held)
    agent = NodeAgent(several, node, reporter, NodeReport)
    await agent.start()
    await agent.flush()
    fresh = BreakableMeta(CONFIG, clock=clock)
    servers[2].state, servers[2].streams = fresh.state, fresh.streams
    servers[0].down = True
    async with asyncio.timeout(30):
        while (await several.locate(keys)).prefix_blocks < 50:
            await asyncio.sleep(0.01)
    await agent.stop()


async def test_events_missed_while_away_are_made_up_for(
    several: SeveralMeta, servers: list[BreakableMeta]
) -> None:
    keys = chain(random.Random(4), 50)
    node = NODES[0]
    held: list[BlockStored] = []
    reporter = MetaReporter(node.node_id, node.incarnation, lambda: list(held))
    agent = NodeAgent(several, node, reporter, NodeReport)
    await agent.start()
    await agent.flush()
    servers[1].down = True
    held += [stored(node, keys, at, Tier.L2) for at in range(50)]
    reporter.report(list(held))
    await agent.flush()
    assert (await several.locate(keys)).prefix_blocks == 50
    servers[1].down = False
    async with asyncio.timeout(30):
        while True:
            found = dict(await servers[1].directory_counts())["blocks"]
            if found > 20:
                break
            await asyncio.sleep(0.01)
    servers[0].down = servers[2].down = True
    assert (await several.locate(keys[:1])).prefix_blocks in (0, 1)
    await agent.stop()


async def test_holds_come_from_all_servers_and_end_with_the_lease(several: SeveralMeta) -> None:
    keys = chain(random.Random(5), 30)
    node = NODES[0]
    await several.register(node)
    events = tuple(stored(node, keys, at, Tier.L2) for at in range(30))
    await several.report_events(EventBatch(node.node_id, node.incarnation, 1, events, True))
    lease = (await several.locate(keys, reserve_s=60.0)).lease
    held: dict[int, set[BlockKey]] = {}
    async with (
        asyncio.timeout(30),
        aclosing(several.holds(node.node_id, node.incarnation)) as orders,
    ):
        while sum(map(len, held.values())) < 30:
            order = await anext(orders)
            held.setdefault(order.lease, set()).update(order.keys)
        assert set().union(*held.values()) == set(keys) and len(held) == 3
        assert await several.extend_lease(lease, ttl_s=90.0)
        assert {(await anext(orders)).ttl_s for _ in held} == {90.0}
        assert await several.end_lease(lease, used=True)
        assert {(await anext(orders)).ttl_s for _ in held} == {0.0}
    assert not await several.extend_lease(lease, ttl_s=1.0)
    assert not await several.end_lease(lease, used=True)


async def test_a_rival_is_refused_by_all(several: SeveralMeta) -> None:
    older = make_info("pool-1", role=NodeRole.DMP, host=HostId("h1"), models=())
    newer = NodeInfo(older.node_id, Incarnation(older.incarnation + 1), older.role, older.host)
    await several.register(newer)
    with pytest.raises(StaleEpochError):
        await several.register(older)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happened_the_servers_agree_in_the_end(
    several: SeveralMeta, servers: list[BreakableMeta], clock: ManualClock, seed: int
) -> None:
    """Blocks come and go while servers are away and start again; never is a lost block found."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    keys, node = chain(rng, 80), NODES[0]
    held: dict[int, BlockStored] = {}
    reporter = MetaReporter(node.node_id, node.incarnation, lambda: list(held.values()))

    async def tell(rounds: int) -> None:
        """What an agent does, without its pauses."""
        for _ in range(rounds):
            try:
                reply = await several.heartbeat(node.node_id, node.incarnation, NodeReport())
                if not reply.known and (await several.register(node)).send_inventory:
                    reporter.request_inventory()
                if reply.send_inventory:
                    reporter.request_inventory()
                while (batch := reporter.next_batch()) is not None:
                    reporter.acknowledge(batch, await several.report_events(batch))
            except DirectoryUnavailableError:
                return

    for _ in range(40):
        events: list[BlockStored | BlockRemoved] = []
        for at in rng.sample(range(80), 6):
            if at in held:
                events.append(BlockRemoved(keys[at], Tier.L2))
                del held[at]
            else:
                held[at] = stored(node, keys, at, Tier.L2)
                events.append(held[at])
        reporter.report(events)
        server = rng.choice(servers)
        match rng.randrange(4):
            case 0:
                server.down = not server.down
            case 1:
                fresh = BreakableMeta(CONFIG, clock=clock)
                server.state, server.streams = fresh.state, fresh.streams
        await tell(rng.randrange(3))
    for server in servers:
        server.down = False
    last: list[BlockStored | BlockRemoved] = [
        stored(node, keys, at, Tier.L2) for at in range(40) if at not in held
    ]
    held |= {at: stored(node, keys, at, Tier.L2) for at in range(40)}
    if held.pop(40, None) is not None:
        last.append(BlockRemoved(keys[40], Tier.L2))
    reporter.report(last)
    async with asyncio.timeout(60):
        while not all(health.usable for health in several._group.health):
            await asyncio.sleep(0.01)
    await tell(4)
    for lost in (None, *servers):
        if lost is not None:
            lost.down = True
        assert (await several.locate(keys)).prefix_blocks == 40
        if lost is not None:
            lost.down = False
            several._group.health[servers.index(lost)].looked(well=True)
    assert dict(await several.directory_counts())["copies"] == len(held)
    for server in servers:
        server.state.check_invariants(clock.now())

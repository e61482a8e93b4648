"""The MetaClient contract, on every implementation: in process, and over a real server, with
locates over gRPC and over the stream.

The tests' own meta server (tests/fix_meta.py) passes too: on an open path it adds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.fix_meta import BreakableMeta
from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Owner, Tier
from tierkv.kvcore.block_event import (
    NO_LEASE,
    BlockRemoved,
    BlockStored,
    EventBatch,
    HoldOrder,
    LeaseId,
)
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import (
    DirectoryUnavailableError,
    LocalProtocolError,
    StaleEpochError,
    UserError,
)
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype
from tierkv.kvcore.node import (
    LoadChoiceStats,
    ModelInfo,
    NodeInfo,
    NodeLoad,
    NodeReport,
    NodeRole,
    TierStats,
)
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.metaserver.client import (
    LOOK_ONLY,
    ClusterRecord,
    KvLimits,
    MetaClient,
    Namespace,
    NamespaceGrant,
    NodeCoverage,
)
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.metaserver.rpc.grpc_client import GrpcMeta
from tierkv.metaserver.rpc.server import MetaServer
from tierkv.metaserver.several_meta import SeveralMeta

LAYOUT = BlockLayout(layers=2, kv_heads=1, head_dim=8, dtype=KvDtype.FLOAT32, block_tokens=4)
MODEL = ModelInfo(
    name="demo",
    folder="/models/demo",
    revision="abc",
    layout=LAYOUT,
    context_tokens=64,
    eos_token_ids=(1, 2),
    architecture="LlamaForCausalLM",
    parameters=1_000,
)
DMP = NodeInfo(
    node_id=NodeId("dmp-0"),
    incarnation=Incarnation(7),
    role=NodeRole.DMP,
    host=HostId("host-a"),
    data_address="127.0.0.1:1",
    segment_path="/dev/shm/x",
    capacity_bytes=1 << 20,
)
COMPUTE = NodeInfo(
    node_id=NodeId("compute-0"),
    incarnation=Incarnation(3),
    role=NodeRole.COMPUTE,
    host=HostId("host-a"),
    control_address="127.0.0.1:2",
    models=(MODEL,),
)
KEYS = [BlockKey(bytes([n]) * 16) for n in range(1, 9)]


def stored(index: int, node: NodeInfo, tier: Tier) -> BlockStored:
    """Block ``index`` of one chain, in ``tier`` of ``node``."""
    slot = Location(node.node_id, node.incarnation, 0, index, 1, LAYOUT.payload_bytes)
    return BlockStored(
        BlockSpec(
            KEYS[index], KEYS[index - 1] if index else ROOT_PARENT, 4, owner=Owner("demo", "acme")
        ),
        tier,
        None if tier is Tier.L1 else slot,
    )


def inventory(node: NodeInfo, *events: BlockStored, seq: int = 1) -> EventBatch:
    return EventBatch(node.node_id, node.incarnation, seq, events, inventory=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


SINGLE = ["local", "local of the tests", "grpc", "grpc with token", "stream", "stream with token"]


@pytest.fixture(params=[*SINGLE, "three servers"])
async def meta(request: pytest.FixtureRequest, clock: ManualClock) -> AsyncIterator[MetaClient]:
    if request.param == "three servers":
        config = MetaConfig(cluster_secret=b"s" * 32)
        parts = [LocalMeta(config, clock=clock) for _ in range(3)]
        client: MetaClient = SeveralMeta(parts, ["a:1", "b:1", "c:1"], clock=clock)
        yield client
        for part in parts:
            part.state.check_invariants(clock.now())
        await client.close()
        return
    if request.param.startswith("local"):
        make = LocalMeta if request.param == "local" else BreakableMeta
        client = make(clock=clock)
        yield client
        await client.close()
        return
    token = "secret-of-the-cluster" if "token" in request.param else None
    server = MetaServer(MetaConfig(address="127.0.0.1:0", token=token), clock=clock)
    stream = request.param.startswith("stream")
    client = GrpcMeta(await server.start(), token=token, timeout_s=30.0, use_stream=stream)
    assert await client.open_stream() is stream
    yield client
    await client.close()
    assert server.local is not None
    server.local.state.check_invariants(clock.now())
    await server.stop(grace_s=0)


async def test_a_new_node_is_asked_for_its_inventory_once(meta: MetaClient) -> None:
    registration = await meta.register(DMP)
    assert registration.send_inventory
    assert registration.heartbeat_interval_s == 1.0
    reply = await meta.report_events(inventory(DMP))
    assert (reply.accepted, reply.send_inventory) == (True, False)
    heartbeat = await meta.heartbeat(DMP.node_id, DMP.incarnation, NodeReport())
    assert (heartbeat.known, heartbeat.send_inventory) == (True, False)
    assert not (await meta.register(DMP)).send_inventory


async def test_nodes_are_listed_with_all_they_said(meta: MetaClient, clock: ManualClock) -> None:
    report = NodeReport(
        load=NodeLoad(requests_running=2, kv_usage=0.5, prefill_tokens_per_s=123.25),
        tiers=(TierStats(tier=Tier.L1, medium="cpu", model="demo", blocks_total=9, hit_tokens=4),),
        cache_errors=(("checksum_mismatch", 1), ("transport_error", 2)),
        transfer_bytes_in=10,
        load_choices=(LoadChoiceStats("load", 3, 2, 0.5, 0.75, 0.25),),
    )
    await meta.register(COMPUTE)
    await meta.register(DMP)
    await meta.heartbeat(COMPUTE.node_id, COMPUTE.incarnation, report)
    clock.advance(0.5)
    compute, dmp = await meta.list_nodes()
    assert compute.info == COMPUTE
    assert compute.report == report
    assert (compute.heartbeat_age_s, compute.state) == (0.5, "alive")
    assert dmp.info == DMP
    assert dmp.report == NodeReport()


async def test_silence_makes_a_node_suspect_then_dead(meta: MetaClient, clock: ManualClock) -> None:
    await meta.register(DMP)
    await meta.report_events(inventory(DMP, stored(0, DMP, Tier.L2)))
    clock.advance(3.0)
    assert [node.state for node in await meta.list_nodes()] == ["suspect"]
    assert (await meta.locate(KEYS)).prefix_blocks == 1
    clock.advance(2.0)
    assert [node.state for node in await meta.list_nodes()] == ["dead"]
    assert (await meta.locate(KEYS)).prefix_blocks == 0
    assert not (await meta.heartbeat(DMP.node_id, DMP.incarnation, NodeReport())).known
    assert not (await meta.report_events(inventory(DMP, seq=2))).accepted
    assert (await meta.register(DMP)).send_inventory
    assert [node.state for node in await meta.list_nodes()] == ["alive"]


async def test_a_block_at_rest_has_no_location_and_only_pool_nodes_have_such(meta) -> None:
    for node in (DMP, COMPUTE):
        await meta.register(node)
    resting = replace(stored(0, DMP, Tier.L4), location=None)
    await meta.report_events(inventory(DMP, resting, stored(1, DMP, Tier.L2)))
    await meta.report_events(
        inventory(COMPUTE, replace(resting, block=replace(resting.block, key=KEYS[2])))
    )
    reply = await meta.locate(KEYS)
    assert [[(r.tier, r.location is None) for r in copies] for copies in reply.replicas] == [
        [(Tier.L4, True)],
        [(Tier.L2, False)],
    ]


async def test_locate_finds_the_longest_prefix_and_who_is_near(meta: MetaClient) -> None:
    far = NodeInfo(NodeId("dmp-1"), Incarnation(1), NodeRole.DMP, HostId("host-b"))
    for node in (DMP, COMPUTE, far):
        await meta.register(node)
    near = [stored(n, DMP, Tier.L2) for n in (0, 1, 3)]
    await meta.report_events(inventory(DMP, *near, stored(4, DMP, Tier.L4)))
    await meta.report_events(inventory(far, stored(1, far, Tier.L2), stored(2, far, Tier.L2)))
    await meta.report_events(inventory(COMPUTE, stored(0, COMPUTE, Tier.L1)))
    reply = await meta.locate(KEYS)
    assert reply.prefix_blocks == 5
    holders = [[(r.node, r.host, r.tier) for r in replicas] for replicas in reply.replicas]
    assert holders == [
        [("dmp-0", "host-a", Tier.L2)],
        [("dmp-0", "host-a", Tier.L2), ("dmp-1", "host-b", Tier.L2)],
        [("dmp-1", "host-b", Tier.L2)],
        [("dmp-0", "host-a", Tier.L2)],
        [("dmp-0", "host-a", Tier.L4)],
    ]
    assert [r.key for replicas in reply.replicas for r in replicas[:1]] == KEYS[:5]
    assert reply.replicas[3][0].location == near[2].location
    assert reply.coverage == (NodeCoverage(COMPUTE.node_id, l1_blocks=1, l2_blocks=2),)


async def test_coverage_goes_on_where_the_pool_ends(meta: MetaClient) -> None:
    await meta.register(COMPUTE)
    await meta.report_events(inventory(COMPUTE, *[stored(n, COMPUTE, Tier.L1) for n in range(3)]))
    reply = await meta.locate(KEYS)
    assert reply.replicas == ()
    assert reply.coverage == (NodeCoverage(COMPUTE.node_id, l1_blocks=3, l2_blocks=3),)


async def test_nothing_is_found_of_an_unknown_or_empty_chain(meta: MetaClient) -> None:
    assert (await meta.locate(KEYS)).coverage == ()
    assert (await meta.locate([])).replicas == ()


async def test_an_over_long_chain_is_the_callers_bug(meta: MetaClient) -> None:
    longest = KEYS[:1] * limits.MAX_CHAIN_BLOCKS
    assert (await meta.locate(longest)).prefix_blocks == 0
    with pytest.raises(LocalProtocolError, match="at most 8192"):
        await meta.locate([*longest, KEYS[0]])


async def test_many_chains_are_answered_in_their_order(meta: MetaClient) -> None:
    for node in (DMP, COMPUTE):
        await meta.register(node)
    await meta.report_events(inventory(DMP, stored(0, DMP, Tier.L2), stored(1, DMP, Tier.L2)))
    await meta.report_events(inventory(COMPUTE, stored(0, COMPUTE, Tier.L1)))
    other = [KEYS[2]]
    replies = await meta.locate_many([KEYS, other, [], KEYS[:1]])
    assert replies == [await meta.locate(c, max_replicas=0) for c in (KEYS, other, [], KEYS[:1])]
    assert await meta.locate_many([]) == []
    held = await meta.locate_many([KEYS, other, KEYS], reserve_s=5.0)
    assert [reply.lease != NO_LEASE for reply in held] == [True, False, True]
    assert len({reply.lease for reply in held}) == 3
    for chains in ([KEYS[:1]] * (limits.MAX_CHAINS_PER_QUESTION + 1), [KEYS[:1] * 4_097] * 2):
        with pytest.raises(LocalProtocolError, match="at most 256 and 8192"):
            await meta.locate_many(chains)


async def test_reports_are_idempotent_by_sequence(meta: MetaClient) -> None:
    await meta.register(DMP)
    await meta.report_events(inventory(DMP, stored(0, DMP, Tier.L2)))
    removal = EventBatch(DMP.node_id, DMP.incarnation, 2, (BlockRemoved(KEYS[0], Tier.L2),))
    await meta.report_events(removal)
    again = EventBatch(DMP.node_id, DMP.incarnation, 3, (stored(0, DMP, Tier.L2),))
    await meta.report_events(again)
    reply = await meta.report_events(removal)
    assert (reply.accepted, reply.send_inventory) == (True, False)
    assert (await meta.locate(KEYS)).prefix_blocks == 1


async def test_a_gap_asks_for_an_inventory(meta: MetaClient) -> None:
    await meta.register(DMP)
    await meta.report_events(inventory(DMP, stored(0, DMP, Tier.L2)))
    late = EventBatch(DMP.node_id, DMP.incarnation, 4, (stored(1, DMP, Tier.L2),))
    assert (await meta.report_events(late)).send_inventory
    assert (await meta.heartbeat(DMP.node_id, DMP.incarnation, NodeReport())).send_inventory
    assert (await meta.locate(KEYS)).prefix_blocks == 2
    whole = inventory(DMP, stored(0, DMP, Tier.L2), seq=5)
    assert not (await meta.report_events(whole)).send_inventory
    assert (await meta.locate(KEYS)).prefix_blocks == 1


async def test_an_inventory_in_parts_replaces_at_its_end(meta: MetaClient) -> None:
    await meta.register(DMP)
    await meta.report_events(inventory(DMP, *[stored(n, DMP, Tier.L2) for n in (0, 1, 2)]))
    parts = [
        EventBatch(
            DMP.node_id,
            DMP.incarnation,
            2 + part,
            (stored(part, DMP, Tier.L2),),
            inventory=True,
            more=part == 0,
            part=part,
        )
        for part in (0, 1)
    ]
    assert not (await meta.report_events(parts[0])).send_inventory
    assert (await meta.locate(KEYS)).prefix_blocks == 3
    assert not (await meta.report_events(parts[1])).send_inventory
    assert (await meta.locate(KEYS)).prefix_blocks == 2


async def test_an_older_incarnation_is_fenced_off(meta: MetaClient) -> None:
    old = NodeInfo(DMP.node_id, Incarnation(6), NodeRole.DMP, DMP.host)
    await meta.register(old)
    await meta.report_events(inventory(old, stored(0, old, Tier.L2)))
    await meta.register(DMP)
    assert (await meta.locate(KEYS)).prefix_blocks == 0
    assert not (await meta.report_events(inventory(old, seq=2))).accepted
    assert not (await meta.heartbeat(old.node_id, old.incarnation, NodeReport())).known
    await meta.deregister(old.node_id, old.incarnation)
    with pytest.raises(StaleEpochError, match="incarnation 7; 6 is older"):
        await meta.register(old)
    assert [node.info for node in await meta.list_nodes()] == [DMP]


async def test_a_node_that_leaves_takes_its_blocks_along(meta: MetaClient) -> None:
    await meta.register(DMP)
    await meta.report_events(inventory(DMP, stored(0, DMP, Tier.L2)))
    await meta.deregister(DMP.node_id, DMP.incarnation)
    assert await meta.list_nodes() == ()
    assert (await meta.locate(KEYS)).prefix_blocks == 0
    assert (await meta.list_blocks(10)).total == 0


async def test_blocks_are_listed_copy_by_copy(meta: MetaClient, clock: ManualClock) -> None:
    await meta.register(DMP)
    await meta.register(COMPUTE)
    await meta.report_events(inventory(DMP, stored(0, DMP, Tier.L2), stored(1, DMP, Tier.L4)))
    await meta.report_events(inventory(COMPUTE, stored(0, COMPUTE, Tier.L1)))
    clock.advance(1.0)
    await meta.locate(KEYS[:1])
    clock.advance(1.0)
    listing = await meta.list_blocks(10)
    assert listing.total == 3
    seen = {(b.block.key, b.node_id, b.tier): b for b in listing.blocks}
    assert set(seen) == {
        (KEYS[1], "dmp-0", "L4"),
        (KEYS[0], "compute-0", "L1"),
        (KEYS[0], "dmp-0", "L2"),
    }
    first = seen[KEYS[0], NodeId("compute-0"), "L1"]
    assert first.block == BlockSpec(KEYS[0], ROOT_PARENT, 4, owner=Owner("demo", "acme"))
    assert first.size_bytes == LAYOUT.payload_bytes
    assert (first.age_s, first.idle_s, first.hits) == (2.0, 1.0, 1)
    assert seen[KEYS[1], NodeId("dmp-0"), "L4"].hits == 0
    short = await meta.list_blocks(2)
    assert (len(short.blocks), short.total) == (2, 3)
    with pytest.raises(UserError, match="negative"):
        await meta.list_blocks(-1)


async def test_blocks_after_others_are_found_whatever_server_knows_them(meta: MetaClient) -> None:
    await meta.register(DMP)
    await meta.register(COMPUTE)
    chain = [stored(index, DMP, Tier.L2) for index in range(5)]
    fork = BlockStored(BlockSpec(KEYS[6], KEYS[1], 4), Tier.L1)
    await meta.report_events(inventory(DMP, *chain))
    await meta.report_events(inventory(COMPUTE, fork))
    assert await meta.blocks_after([KEYS[2]]) == {KEYS[3]: KEYS[2], KEYS[4]: KEYS[3]}
    found = await meta.blocks_after([KEYS[0], KEYS[4]])
    assert found == {
        KEYS[1]: KEYS[0], KEYS[2]: KEYS[1], KEYS[3]: KEYS[2], KEYS[4]: KEYS[3], KEYS[6]: KEYS[1],
    }  # fmt: skip
    assert [key for key in found if key in KEYS[1:5]] == KEYS[1:5], "parents come first"
    assert await meta.blocks_after([KEYS[4], KEYS[7]]) == {}
    assert await meta.blocks_after([]) == {}
    removed = EventBatch(DMP.node_id, DMP.incarnation, 2, (BlockRemoved(KEYS[2], Tier.L2),))
    await meta.report_events(removed)
    assert KEYS[3] not in await meta.blocks_after([KEYS[0]]), "a gap hides what is behind it"
    assert await meta.blocks_after([KEYS[2]]) == {KEYS[3]: KEYS[2], KEYS[4]: KEYS[3]}


async def test_tenants_never_share_a_key_unless_a_namespace_says_so(meta: MetaClient) -> None:
    async def resolve(tenant: str, revision: str = "r1") -> bytes:
        grant = await meta.resolve_namespace(
            tenant, model_revision=revision, layout_fingerprint=LAYOUT.fingerprint()
        )
        assert grant.cache_enabled
        return grant.namespace_key

    alone = {tenant: await resolve(tenant) for tenant in ("a", "b", "team")}
    assert len(set(alone.values())) == 3
    assert await resolve("a") == alone["a"]
    assert await resolve("a", "r2") != alone["a"]
    await meta.put_namespace(Namespace("team", tenants=("b", "a")))
    assert await resolve("a") == await resolve("b")
    assert await resolve("a") not in alone.values()
    assert await resolve("team") == alone["team"]


async def test_a_namespace_can_switch_its_cache_off(meta: MetaClient) -> None:
    stored_as = await meta.put_namespace(Namespace("quiet", cache_enabled=False))
    assert await meta.list_namespaces() == (stored_as,)
    grant = await meta.resolve_namespace("quiet", model_revision="r", layout_fingerprint=b"l")
    assert (grant.domain, grant.cache_enabled) == ("quiet", False)


async def test_names_that_can_not_be_are_the_users_to_change(meta: MetaClient) -> None:
    await meta.put_namespace(Namespace("team", tenants=("a",)))
    for bad in (Namespace("no spaces"), Namespace("x", tenants=("",)), Namespace("y", ("a",))):
        with pytest.raises(UserError) as caught:
            await meta.put_namespace(bad)
        assert caught.value.message
    with pytest.raises(UserError, match="not a tenant name"):
        await meta.resolve_namespace("shared team", model_revision="r", layout_fingerprint=b"l")
    assert [namespace.name for namespace in await meta.list_namespaces()] == ["team"]


async def test_after_close_there_is_no_directory(meta: MetaClient) -> None:
    await meta.list_nodes()
    await meta.close()
    await meta.close()
    with pytest.raises(DirectoryUnavailableError):
        await meta.locate(KEYS)
    with pytest.raises(DirectoryUnavailableError):
        await meta.put_namespace(Namespace("x"))


async def test_a_namespaces_policy_comes_back_and_is_granted(meta: MetaClient) -> None:
    policy = ReusePolicy(
        kv_codec=KvCodec.INT8,
        blend=True,
        recompute_ratio=0.25,
        selector=BlendSelector.BOUNDARY,
        gradual=True,
    )
    wanted = Namespace("team", ("a", "b"), policy=policy, limits=KvLimits(1 << 30, 60.0, False))
    assert await meta.put_namespace(wanted) == wanted
    assert await meta.list_namespaces() == (wanted,)
    grants = [
        await meta.resolve_namespace(tenant, model_revision="r", layout_fingerprint=b"l")
        for tenant in ("a", "b", "c")
    ]
    assert [grant.policy for grant in grants] == [policy, policy, ReusePolicy()]
    await meta.put_namespace(Namespace("team", ("a", "b")))
    plain = await meta.resolve_namespace("a", model_revision="r", layout_fingerprint=b"l")
    assert plain.policy == ReusePolicy()
    assert plain.namespace_key != grants[0].namespace_key  # blocks of another codec


async def test_limits_stay_unless_a_change_names_some(meta: MetaClient) -> None:
    kept = KvLimits(5 << 20, 0.5, False, "arc", "r2", 7 << 30, 9, 10, 0.5, 2.0, "disk", "m")
    await meta.put_namespace(Namespace("team", limits=kept))
    changed = await meta.put_namespace(Namespace("team", cache_enabled=False))
    assert (changed.limits, changed.cache_enabled) == (kept, False)
    assert (await meta.put_namespace(Namespace("team", limits=KvLimits()))).limits is None
    with pytest.raises(UserError, match="can't be negative"):
        await meta.put_namespace(Namespace("team", limits=KvLimits(ttl_s=-1.0)))
    with pytest.raises(UserError, match="can't be negative"):
        await meta.put_namespace(Namespace("team", limits=KvLimits(weight=float("nan"))))
    with pytest.raises(UserError, match="no medium 'tape'"):
        await meta.put_namespace(Namespace("team", limits=KvLimits(media="tape")))
    with pytest.raises(UserError, match="no eviction policy 'clock'"):
        await meta.put_namespace(Namespace("team", limits=KvLimits(eviction="clock")))
    with pytest.raises(UserError, match="is not a version name"):
        await meta.put_namespace(Namespace("team", limits=KvLimits(version="r 2")))
    with pytest.raises(UserError, match="too long a name"):
        await meta.put_namespace(Namespace("t" * 128, limits=KvLimits(version="r2")))


async def test_a_namespace_of_one_model_leaves_other_models_alone(meta: MetaClient) -> None:
    async def domain(tenant: str, model: str = "") -> tuple[str, bool]:
        grant = await meta.resolve_namespace(
            tenant, model_revision="r", layout_fingerprint=b"l", model=model
        )
        return grant.domain, grant.cache_enabled

    await meta.put_namespace(Namespace("big", ("a",), limits=KvLimits(model="large")))
    assert [await domain("a", model) for model in ("large", "small", "")] == [
        ("big", True), ("a", True), ("a", True),
    ]  # fmt: skip
    await meta.put_namespace(Namespace("team", ("a", "b"), cache_enabled=False))
    assert [await domain("a", model) for model in ("large", "small", "")] == [
        ("big", True), ("team", False), ("team", False),
    ]  # fmt: skip
    with pytest.raises(UserError, match="tenant a already belongs to namespace big"):
        await meta.put_namespace(Namespace("two", ("a",), limits=KvLimits(model="large")))
    await meta.put_namespace(Namespace("two", ("a",), limits=KvLimits(model="small")))
    with pytest.raises(UserError, match="tenant a already belongs to namespace team"):
        await meta.put_namespace(Namespace("two", ("a",), limits=KvLimits()))
    with pytest.raises(UserError, match="is not a model name"):
        await meta.put_namespace(Namespace("x", limits=KvLimits(model="a model")))
    unchanged = await meta.put_namespace(Namespace("two", ("a",), cache_enabled=False))
    assert unchanged.model == "small"


async def test_a_version_gives_all_tenants_of_a_namespace_other_keys(meta: MetaClient) -> None:
    async def granted(version: str) -> list[NamespaceGrant]:
        limits = KvLimits(version=version)
        await meta.put_namespace(Namespace("team", ("a", "b"), limits=limits))
        return [
            await meta.resolve_namespace(tenant, model_revision="r", layout_fingerprint=b"l")
            for tenant in ("a", "b", "a:salt-01", "c")
        ]

    none, first, second, again = [await granted(name) for name in ("", "r1", "r2", "r1")]
    assert [grant.version for grant in second] == ["r2", "r2", "r2", ""]
    assert first[0].namespace_key == first[1].namespace_key
    assert first == again
    for place in range(3):
        keys = {each[place].namespace_key for each in (none, first, second)}
        assert len(keys) == 3
    assert none[3] == first[3] == second[3]


async def test_a_dropped_namespace_leaves_its_tenants_alone_again(meta: MetaClient) -> None:
    async def key(tenant: str) -> bytes:
        grant = await meta.resolve_namespace(tenant, model_revision="r", layout_fingerprint=b"l")
        return grant.namespace_key

    before = await key("a")
    await meta.put_namespace(Namespace("team", ("a", "b")))
    assert await meta.drop_namespace("team") and not await meta.drop_namespace("team")
    assert await meta.list_namespaces() == ()
    assert await key("a") == before != await key("b")


async def test_records_are_put_replaced_and_removed(meta: MetaClient) -> None:
    limit = ClusterRecord("limit", "tenant:ann", '{"requests": 50}')
    assert not await meta.put_record(limit)
    assert not await meta.put_record(ClusterRecord("key", "k1", "{}"))
    assert await meta.put_record(replace(limit, body='{"é": 1}'))
    assert await meta.list_records("limit") == (replace(limit, body='{"é": 1}'),)
    assert await meta.put_record(replace(limit, body=""))
    assert not await meta.put_record(replace(limit, body=""))
    assert await meta.list_records("limit") == ()
    assert await meta.list_records("key") == (ClusterRecord("key", "k1", "{}"),)
    with pytest.raises(UserError, match="is not a record name"):
        await meta.put_record(replace(limit, name="a b"))
    with pytest.raises(UserError, match="at most"):
        await meta.put_record(replace(limit, body="x" * (limits.MAX_RECORD_CHARS + 1)))


async def test_the_audit_log_keeps_its_latest_lines(
    meta: MetaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_AUDIT_RECORDS", 3)
    for number in range(5):
        await meta.put_record(ClusterRecord("audit", f"{number}", "{}"))
    assert [each.name for each in await meta.list_records("audit")] == ["2", "3", "4"]


async def test_heartbeats_tell_that_namespaces_changed(meta: MetaClient) -> None:
    await meta.register(DMP)

    async def version() -> int:
        reply = await meta.heartbeat(DMP.node_id, DMP.incarnation, NodeReport())
        return reply.namespaces_version

    first = await version()
    assert first and await version() == first
    await meta.put_namespace(Namespace("team", limits=KvLimits(1 << 20)))
    second = await version()
    assert second not in (0, first)
    await meta.drop_namespace("team")
    assert await version() == first


async def test_blending_alone_does_not_rename_blocks(meta: MetaClient) -> None:
    before = await meta.resolve_namespace("a", model_revision="r", layout_fingerprint=b"l")
    await meta.put_namespace(Namespace("a", policy=ReusePolicy(blend=True)))
    after = await meta.resolve_namespace("a", model_revision="r", layout_fingerprint=b"l")
    assert after.policy.blend
    assert after.namespace_key == before.namespace_key


async def test_replicas_of_the_readers_host_come_first_and_memory_before_disk(
    meta: MetaClient,
) -> None:
    far = NodeInfo(NodeId("dmp-1"), Incarnation(1), NodeRole.DMP, HostId("host-b"))
    disk = NodeInfo(NodeId("dmp-2"), Incarnation(1), NodeRole.DMP, HostId("host-c"))
    for node, tier in ((disk, Tier.L4), (DMP, Tier.L2), (far, Tier.L2)):
        await meta.register(node)
        await meta.report_events(inventory(node, stored(0, node, tier)))
    for reader, first in (("host-a", "dmp-0"), ("host-b", "dmp-1")):
        reply = await meta.locate(KEYS, reader=HostId(reader))
        (order,) = [[r.node for r in replicas] for replicas in reply.replicas]
        assert (order[0], order[-1], len(order)) == (first, "dmp-2", 3)
        reply = await meta.locate(KEYS, reader=HostId(reader), max_replicas=1)
        assert [[r.node for r in replicas] for replicas in reply.replicas] == [[first]]
    counted = await meta.locate(KEYS, max_replicas=0)
    assert (len(counted.replicas), counted.prefix_blocks, counted.memory_blocks) == (0, 1, 1)
    with pytest.raises(LocalProtocolError, match="negative"):
        await meta.locate(KEYS, max_replicas=-1)


async def test_memory_ends_where_only_disks_go_on(meta: MetaClient) -> None:
    await meta.register(DMP)
    tiers = (Tier.L2, Tier.L4, Tier.L2)
    await meta.report_events(inventory(DMP, *[stored(n, DMP, t) for n, t in enumerate(tiers)]))
    reply = await meta.locate(KEYS)
    assert (reply.prefix_blocks, reply.memory_blocks, len(reply.replicas)) == (3, 1, 3)


async def chain_in_memory(meta: MetaClient) -> None:
    """Three blocks at the DMP node, the second one at the compute node too, the last at rest."""
    for node in (DMP, COMPUTE):
        await meta.register(node)
    resting = replace(stored(2, DMP, Tier.L4), location=None)
    blocks = [stored(n, DMP, Tier.L2) for n in (0, 1)]
    await meta.report_events(inventory(DMP, *blocks, resting))
    await meta.report_events(inventory(COMPUTE, stored(1, COMPUTE, Tier.L1)))


of_one_server = pytest.mark.parametrize("meta", SINGLE, indirect=True)
"""What a single server's ids and counts look like; tests/unit/metaserver/test_several.py has the
same of several servers.
"""


async def next_order(orders: AsyncGenerator[HoldOrder, None]) -> HoldOrder:
    async with asyncio.timeout(30):
        return await anext(orders)


async def last_order(orders: AsyncGenerator[HoldOrder, None]) -> None:
    """Read on until the stream ends, by whatever it raises then."""
    while True:
        await next_order(orders)


async def until_followed(meta: MetaClient, orders: AsyncGenerator[HoldOrder, None]) -> LeaseId:
    """Reserve until the stream is open: what it heard first is a lease of that time."""
    first = asyncio.ensure_future(next_order(orders))
    lease = (await meta.locate(KEYS, reserve_s=60.0)).lease
    told = (await first).lease
    assert isinstance(meta, SeveralMeta) or told == lease
    return lease


@of_one_server
async def test_what_was_located_is_held_until_the_lease_ends(meta: MetaClient) -> None:
    await chain_in_memory(meta)
    lease = (await meta.locate(KEYS, reserve_s=5.0)).lease
    assert lease != NO_LEASE
    expected = {DMP: (KEYS[0], KEYS[1]), COMPUTE: (KEYS[1],)}
    for node, keys in expected.items():
        async with aclosing(meta.holds(node.node_id, node.incarnation)) as orders:
            assert await next_order(orders) == HoldOrder(lease, keys, 5.0)
            second = (await meta.locate(KEYS, reserve_s=9.0)).lease
            assert second not in (lease, NO_LEASE)
            assert await next_order(orders) == HoldOrder(second, keys, 9.0)
            assert await meta.extend_lease(second, ttl_s=7.0)
            assert await next_order(orders) == HoldOrder(second, (), 7.0)
            assert await meta.end_lease(second, used=True)
            assert await next_order(orders) == HoldOrder(second, (), 0.0)
    assert not await meta.end_lease(second, used=False)
    assert not await meta.extend_lease(second, ttl_s=1.0)


@of_one_server
async def test_a_lease_ends_by_itself_when_its_time_is_over(
    meta: MetaClient, clock: ManualClock
) -> None:
    await chain_in_memory(meta)
    leases = [(await meta.locate(KEYS, reserve_s=1.0)).lease for _ in range(2)]
    clock.advance(0.75)
    assert await meta.extend_lease(leases[1], ttl_s=1.0)
    clock.advance(0.5)
    assert not await meta.extend_lease(leases[0], ttl_s=1.0)
    async with aclosing(meta.holds(DMP.node_id, DMP.incarnation)) as orders:
        assert await next_order(orders) == HoldOrder(leases[1], (KEYS[0], KEYS[1]), 0.5)
    clock.advance(0.5)
    assert not await meta.end_lease(leases[1], used=True)
    assert (await meta.list_blocks(9)).blocks[0].leases == 0


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), -1.0, limits.MAX_LEASE_S + 1])
async def test_a_time_that_can_not_be_reserves_nothing(meta: MetaClient, ttl_s: float) -> None:
    await chain_in_memory(meta)
    reply = await meta.locate(KEYS, reserve_s=ttl_s)
    assert (reply.lease, reply.prefix_blocks) == (NO_LEASE, 3)
    lease = (await meta.locate(KEYS, reserve_s=60.0)).lease
    assert not await meta.extend_lease(lease, ttl_s=ttl_s)
    assert await meta.end_lease(lease, used=False)
    assert not await meta.end_lease(NO_LEASE, used=True)


async def test_a_look_reserves_nothing_and_is_no_use(meta: MetaClient) -> None:
    await chain_in_memory(meta)
    before = (await meta.list_blocks(9)).blocks
    reply = await meta.locate(KEYS, reserve_s=LOOK_ONLY)
    assert (reply.lease, reply.prefix_blocks, reply.memory_blocks) == (NO_LEASE, 3, 2)
    assert [r.prefix_blocks for r in await meta.locate_many([KEYS], reserve_s=LOOK_ONLY)] == [3]
    assert (await meta.list_blocks(9)).blocks == before
    counts = dict(await meta.directory_counts())
    assert counts["leases_granted"] == counts["leases_refused_ttl"] == 0
    await meta.locate(KEYS)
    assert (await meta.list_blocks(9)).blocks != before


async def test_a_chain_that_nobody_knows_reserves_nothing(meta: MetaClient) -> None:
    assert (await meta.locate(KEYS, reserve_s=1.0)).lease == NO_LEASE


async def test_a_reservation_counts_as_a_use_when_it_is_committed(meta: MetaClient) -> None:
    await chain_in_memory(meta)

    async def seen() -> list[tuple[int, int]]:
        blocks = {b.block.key: b for b in (await meta.list_blocks(10)).blocks}
        return [(blocks[key].hits, blocks[key].leases) for key in KEYS[:3]]

    leases = [(await meta.locate(KEYS[:2], reserve_s=9.0)).lease for _ in range(3)]
    assert await seen() == [(0, 3), (0, 3), (0, 0)]
    await meta.end_lease(leases[0], used=True)
    await meta.end_lease(leases[1], used=False)
    assert await seen() == [(1, 1), (1, 1), (0, 0)]
    await meta.locate(KEYS)
    assert await seen() == [(2, 1), (2, 1), (1, 0)]
    first = {b.block.key: b for b in (await meta.list_blocks(10)).blocks}
    assert first[KEYS[0]].heat > first[KEYS[2]].heat > 0.0


async def test_holds_end_at_once_for_a_life_that_is_not_registered(meta: MetaClient) -> None:
    await meta.register(DMP)
    for incarnation in (Incarnation(6), Incarnation(8)):
        assert [order async for order in meta.holds(DMP.node_id, incarnation)] == []
    assert [order async for order in meta.holds(NodeId("nobody"), Incarnation(1))] == []


async def test_holds_end_when_the_node_leaves_or_starts_again(meta: MetaClient) -> None:
    for leave in (True, False):
        await chain_in_memory(meta)
        orders = meta.holds(DMP.node_id, DMP.incarnation)
        await until_followed(meta, orders)
        if leave:
            await meta.deregister(DMP.node_id, DMP.incarnation)
        else:
            await meta.register(replace(DMP, incarnation=Incarnation(8)))
        with pytest.raises(StopAsyncIteration):
            await last_order(orders)


async def test_holds_of_a_lost_server_are_a_lost_directory(meta: MetaClient) -> None:
    await chain_in_memory(meta)
    orders = meta.holds(DMP.node_id, DMP.incarnation)
    await until_followed(meta, orders)
    await meta.close()
    with pytest.raises(DirectoryUnavailableError):
        await last_order(orders)
    with pytest.raises(DirectoryUnavailableError):
        await next_order(meta.holds(DMP.node_id, DMP.incarnation))
    with pytest.raises(DirectoryUnavailableError):
        await meta.end_lease(LeaseId(1), used=True)


@of_one_server
async def test_what_is_there_and_what_was_refused_is_counted(meta: MetaClient) -> None:
    await chain_in_memory(meta)
    lie = replace(stored(3, DMP, Tier.L2), location=None)
    await meta.report_events(EventBatch(DMP.node_id, DMP.incarnation, 2, (lie, lie)))
    await meta.report_events(EventBatch(DMP.node_id, Incarnation(6), 3, ()))
    lease = (await meta.locate(KEYS, reserve_s=5.0)).lease
    await meta.locate(KEYS, reserve_s=-1.0)
    counts = dict(await meta.directory_counts())
    expected = {
        "blocks": 3, "copies": 4, "stale_batches": 1, "events_refused_owner": 2,
        "leases_live": 1, "leases_granted": 1, "leases_refused_ttl": 1, "leases_committed": 0,
    }  # fmt: skip
    assert counts.items() >= expected.items()
    await meta.end_lease(lease, used=True)
    assert dict(await meta.directory_counts()).items() >= {
        "leases_live": 0, "leases_committed": 1,
    }.items()  # fmt: skip


async def test_what_only_rests_on_disks_can_be_reserved_and_nobody_is_asked(
    meta: MetaClient,
) -> None:
    await meta.register(DMP)
    await meta.report_events(inventory(DMP, replace(stored(0, DMP, Tier.L4), location=None)))
    lease = (await meta.locate(KEYS, reserve_s=1.0)).lease
    assert lease != NO_LEASE
    assert await meta.end_lease(lease, used=True)

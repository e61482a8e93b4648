"""The stream of locates beside gRPC: what it carries, and that its failures cost no call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fix_chaos import HOLE, ChaosProxy, Fault
from tests.fix_cluster import free_port
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockStored, EventBatch
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvwire.checksums import sealed
from tierkv.kvwire.frames import HEADER_BYTES
from tierkv.kvwire.v1 import meta_pb2 as pb
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.rpc.grpc_client import GrpcMeta
from tierkv.metaserver.rpc.locate_door import MAX_STRANGERS
from tierkv.metaserver.rpc.locate_stream import FRAMES, LocateFrame
from tierkv.metaserver.rpc.server import MetaServer

pytestmark = pytest.mark.integration
TOKEN = "token-of-the-cluster"
DMP = NodeInfo(NodeId("dmp-0"), Incarnation(1), NodeRole.DMP, HostId("host-a"))
KEYS = [BlockKey((n + 1).to_bytes(16, "big")) for n in range(limits.MAX_CHAIN_BLOCKS)]


@asynccontextmanager
async def serving(
    address: str = "127.0.0.1:0", *, stream_port: int = 0, token: str = TOKEN
) -> AsyncIterator[MetaServer]:
    # The tests' pool node sends no heartbeats: it must not be dead when the machine is slow.
    config = MetaConfig(
        address=address, stream_port=stream_port, token=token, suspect_after_s=600.0,
        dead_after_s=900.0, forget_after_s=1e4,
    )  # fmt: skip
    server = MetaServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[GrpcMeta]:
    client = GrpcMeta(address, token=TOKEN, timeout_s=10.0)
    try:
        yield client
    finally:
        await client.close()


async def store(meta: GrpcMeta, count: int = 3) -> None:
    """Tell the directory about the first blocks of KEYS."""
    await meta.register(DMP)
    places = [Location(DMP.node_id, DMP.incarnation, 0, n, 1, 64) for n in range(count)]
    events = [
        BlockStored(BlockSpec(key, KEYS[0], 4), Tier.L2, place)
        for key, place in zip(KEYS, places, strict=False)
    ]
    for seq, start in enumerate(range(0, count, 4_096), 1):
        await meta.report_events(
            EventBatch(
                DMP.node_id, DMP.incarnation, seq, tuple(events[start : start + 4_096]),
                inventory=True, more=start + 4_096 < count, part=seq - 1,
            )
        )  # fmt: skip


@asynccontextmanager
async def paths() -> AsyncIterator[tuple[GrpcMeta, ChaosProxy, ChaosProxy]]:
    """A client whose gRPC and whose stream pass a proxy each."""
    port, stream_port = free_port(), free_port()
    async with serving(f"127.0.0.1:{port}", stream_port=stream_port):
        with (
            ChaosProxy(f"127.0.0.1:{port}", listen=f"127.0.0.2:{port}") as to_grpc,
            ChaosProxy(f"127.0.0.1:{stream_port}", listen=f"127.0.0.2:{stream_port}") as to_stream,
        ):
            async with connected(to_grpc.address) as meta:
                await store(meta)
                assert await meta.open_stream()
                yield meta, to_grpc, to_stream


async def until_open(meta: GrpcMeta) -> None:
    """Locate until the stream has come back."""
    async with asyncio.timeout(30):
        while not await meta.open_stream():
            await asyncio.sleep(0.01)


async def test_locates_do_not_use_grpc_once_the_stream_is_open() -> None:
    async with paths() as (meta, to_grpc, _):
        to_grpc.both(HOLE)
        assert (await meta.locate(KEYS[:5])).prefix_blocks == 3
        replies = await meta.locate_many([KEYS[:2], KEYS[1:5], KEYS[7:9]])
        assert [reply.prefix_blocks for reply in replies] == [2, 2, 0]


async def test_the_longest_chain_and_its_replicas_pass_in_many_pieces() -> None:
    async with serving() as server, connected(server.address) as meta:
        await store(meta, len(KEYS))
        over_grpc = await meta.locate(KEYS)
        assert await meta.open_stream()
        over_stream = await asyncio.gather(*[meta.locate(KEYS) for _ in range(20)])
        assert all(reply == over_grpc for reply in over_stream)
        assert over_grpc.prefix_blocks == len(KEYS)


@pytest.mark.parametrize("fault", [HOLE, Fault(reset_share=1.0), Fault(flip_share=1.0)])
async def test_a_stream_that_fails_costs_no_call(fault: Fault) -> None:
    async with paths() as (meta, _, to_stream):
        to_stream.both(fault)
        for _ in range(3):
            assert (await meta.locate(KEYS[:5])).prefix_blocks == 3
        to_stream.heal()
        await until_open(meta)
        assert (await meta.locate(KEYS[:5])).prefix_blocks == 3


async def test_calls_in_flight_when_the_stream_breaks_are_answered() -> None:
    async with paths() as (meta, _, to_stream):
        to_stream.to_client = HOLE
        calls = [asyncio.create_task(meta.locate(KEYS[:5])) for _ in range(50)]
        await asyncio.to_thread(to_stream.reset_all)
        assert {reply.prefix_blocks for reply in await asyncio.gather(*calls)} == {3}


async def test_a_stream_that_can_not_be_reached_leaves_grpc() -> None:
    port, stream_port = free_port(), free_port()
    async with serving(f"127.0.0.1:{port}", stream_port=stream_port):
        with ChaosProxy(f"127.0.0.1:{port}", listen=f"127.0.0.2:{port}") as to_grpc:
            async with connected(to_grpc.address) as meta:
                await store(meta)
                assert not await meta.open_stream()
                assert (await meta.locate(KEYS[:5])).prefix_blocks == 3


async def test_a_server_without_a_stream_is_asked_over_grpc() -> None:
    async with serving(stream_port=-1) as server, connected(server.address) as meta:
        await store(meta)
        assert not await meta.open_stream()
        assert (await meta.locate(KEYS[:5])).prefix_blocks == 3


async def test_a_restarted_server_offers_its_new_stream() -> None:
    async with serving() as server:
        address = server.address
        client = GrpcMeta(address, token=TOKEN, timeout_s=10.0)
        assert await client.open_stream()
    with pytest.raises(DirectoryUnavailableError):
        await client.locate(KEYS[:5])
    async with serving(address):

        async def is_back() -> bool:
            try:
                return await client.open_stream()
            except DirectoryUnavailableError:
                return False

        async with asyncio.timeout(30):
            while not await is_back():
                await asyncio.sleep(0.01)
        await client.close()
    with pytest.raises(DirectoryUnavailableError, match="closed"):
        await client.locate(KEYS[:5])


async def test_a_stream_port_in_use_is_told() -> None:
    async with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"meta\.stream_port"):
            await MetaServer(MetaConfig(address="127.0.0.1:0", stream_port=port)).start()


def frame(kind: LocateFrame, message: pb.StreamHello | pb.LocateRequest | None = None) -> bytes:
    head = b"" if message is None else sealed(message.SerializeToString())
    return FRAMES.pack(kind, 1, head_bytes=len(head)) + head


@asynccontextmanager
async def door() -> AsyncIterator[tuple[int, int]]:
    """A server's stream port, and the id of its offer."""
    async with serving() as server:
        assert server.stream is not None
        yield server.stream.port, server.stream.id


async def said(port: int, *sent: bytes) -> bytes:
    """Send bytes and return everything up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"".join(sent))
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_strangers_are_turned_away() -> None:
    question = frame(LocateFrame.LOCATE, pb.LocateRequest(keys=KEYS[0]))
    async with door() as (port, id):
        wrong = [
            b"GET / HTTP/1.1\r\n\r\n",
            question,
            frame(LocateFrame.HELLO, pb.StreamHello(id=id, token="wrong")),
            frame(LocateFrame.HELLO, pb.StreamHello(id=id + 1, token=TOKEN)),
            frame(LocateFrame.HELLO, pb.StreamHello(id=id, token=TOKEN)).replace(b"xxh3", b"xxh4"),
            FRAMES.pack(LocateFrame.HELLO, 1, head_bytes=1 << 20),
        ]
        for sent in wrong:
            assert await said(port, sent, question) == b""


async def test_a_friend_that_breaks_the_rules_is_dropped() -> None:
    async with door() as (port, id):
        hello = frame(LocateFrame.HELLO, pb.StreamHello(id=id, token=TOKEN))
        welcome = frame(LocateFrame.REPLY)
        assert await said(port, hello, b"\0" * HEADER_BYTES) in (welcome, b"")
        too_long = FRAMES.pack(LocateFrame.LOCATE, 1, head_bytes=1 << 24)
        assert await said(port, hello, too_long) in (welcome, b"")


async def test_what_the_stream_can_not_answer_is_refused() -> None:
    async with door() as (port, id):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        odd = [
            frame(LocateFrame.LOCATE, pb.LocateRequest(keys=b"cut")),
            frame(LocateFrame.LOCATE, pb.LocateRequest(keys=KEYS[0])).replace(b"xxh3", b"xxh4"),
            frame(LocateFrame.REPLY),
        ]
        writer.write(frame(LocateFrame.HELLO, pb.StreamHello(id=id, token=TOKEN)) + b"".join(odd))
        async with asyncio.timeout(20):
            headers = [FRAMES.parse(await reader.readexactly(HEADER_BYTES)) for _ in range(4)]
        writer.close()
        assert [header.type for header in headers] == [LocateFrame.REPLY] + [
            LocateFrame.REFUSED
        ] * 3


async def test_silent_strangers_do_not_keep_clients_out() -> None:
    async with serving() as server:
        assert server.stream is not None
        crowd = [
            socket.create_connection(("127.0.0.1", server.stream.port))
            for _ in range(MAX_STRANGERS)
        ]
        async with connected(server.address) as meta:
            await store(meta)
            assert (await meta.locate(KEYS[:5])).prefix_blocks == 3
            for sock in crowd:
                sock.close()
            await until_open(meta)


async def test_a_client_that_does_not_read_stops_its_answers() -> None:
    """Its answers would otherwise pile up in the server's memory; others go on."""
    async with serving() as server, connected(server.address) as meta:
        await store(meta, len(KEYS))
        assert server.stream is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", server.stream.port, limit=1024)
        hello = pb.StreamHello(id=server.stream.id, token=TOKEN)
        writer.write(frame(LocateFrame.HELLO, hello))
        question = pb.LocateRequest(keys=b"".join(KEYS), max_replicas=4)
        for _ in range(200):
            writer.write(frame(LocateFrame.LOCATE, question))
        assert await meta.open_stream()
        assert (await meta.locate(KEYS[:5])).prefix_blocks == 5
        kinds, sizes = set(), set()
        async with asyncio.timeout(60):
            for _ in range(201):
                header = FRAMES.parse(await reader.readexactly(HEADER_BYTES))
                kinds.add(header.type)
                sizes.add(header.head_bytes)
                await reader.readexactly(header.head_bytes)
        writer.close()
        assert kinds == {LocateFrame.REPLY} and len(sizes) == 2

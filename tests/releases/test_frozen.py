"""Releases side by side: what a frozen release wrote is read, and what it says is understood.

A fixture per release lies beside this file (tests/releases/freeze.py). A message that has changed
makes a test here fail: what is new belongs into a new field, a new frame type or a new version.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fix_dmp import Rig, block_key, fetch, make_range
from tests.fix_postgres import PostgresServer
from tests.releases.conversation import CLIENT_ID, NODE, Frame, FrozenNode, read_frame, talk
from tests.releases.freeze import (
    DISK_BYTES,
    DISK_FILE_BYTES,
    SCHEMAS,
    SECRET,
    TEAM,
    config,
    filled,
    key_of,
    protocol,
)
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dmp.client.node_link import greet
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.wire.frame import FrameType
from tierkv.dmp.wire.messages import About, Welcome
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import NodeId
from tierkv.kvwire.frames import HEADER_BYTES
from tierkv.metaserver.namespaces import NamespaceStore
from tierkv.storage.disk.segment_store import SegmentStore

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if path.name.startswith("v"))


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def read(release: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((release / f"{name}.json").read_text())
    return found


def raw(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


def unpack(release: Path, name: str, to: Path) -> Path:
    to.write_bytes(gzip.decompress((release / name).read_bytes()))
    return to


# Messages


def test_no_message_call_or_frame_type_of_the_release_has_changed(release: Path) -> None:
    then, now = read(release, "protocol"), protocol()
    for message, fields in then["messages"].items():
        known = now["messages"][message]
        assert {name: known.get(name) for name in fields} == fields, message
    assert {call: now["calls"].get(call) for call in then["calls"]} == then["calls"]
    for stream, types in then["frames"].items():
        assert {name: now["frames"][stream].get(name) for name in types} == types


def test_new_fields_do_not_take_numbers_that_the_release_used(release: Path) -> None:
    then, now = read(release, "protocol")["messages"], protocol()["messages"]
    for message, fields in then.items():
        numbers = {number: name for name, (number, *_) in fields.items()}
        for name, (number, *_) in now[message].items():
            assert numbers.get(number, name) == name, f"{message}.{name}"


def classes() -> dict[str, type[Message]]:
    return {
        each.full_name: GetMessageClass(each)
        for module in SCHEMAS
        for each in module.DESCRIPTOR.message_types_by_name.values()
    }


def test_the_releases_messages_mean_the_same(release: Path) -> None:
    known = classes()
    for name, frozen in read(release, "messages").items():
        message = known[name]()
        message.ParseFromString(base64.b64decode(frozen["bytes"]))
        assert MessageToDict(message, preserving_proto_field_name=True) == frozen["means"], name


def test_a_later_releases_fields_are_no_error(release: Path) -> None:
    """The release's reader skips a field that it does not know: so do we, at any depth."""
    unknown = b"\xfa\x7f\x03new"  # Field 2047, three bytes.
    for name, kind in classes().items():
        message = kind()
        message.ParseFromString(filled(kind()).SerializeToString() + unknown)
        assert MessageToDict(message) == MessageToDict(filled(kind())), name


# The data plane


def exchanges(release: Path) -> list[tuple[Frame, Frame]]:
    pairs = read(release, "talk")["exchanges"]
    return [(frame_of(raw(asked)), frame_of(raw(reply))) for asked, reply in pairs]


def frame_of(data: bytes) -> Frame:
    """Split a frame's bytes."""
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(data) + HEADER_BYTES)
        one.sendall(data)
        frame = read_frame(other)
    assert frame is not None
    return frame


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(config(tmp_path / "frozen.seg"), ManualClock())
    yield rig
    rig.stop()


def test_the_releases_client_gets_the_replies_it_knows(release: Path, node: Rig) -> None:
    host, _, port = node.server.address.rpartition(":")
    talked = exchanges(release)
    assert {FrameType(asked.type) for asked, _ in talked} >= {
        FrameType.HELLO, FrameType.RESERVE, FrameType.WRITE, FrameType.SEAL, FrameType.PUT,
        FrameType.LOOKUP, FrameType.READ, FrameType.HOLD, FrameType.DESCRIBE, FrameType.STATS,
    }  # fmt: skip
    with socket.create_connection((host, int(port)), timeout=10) as client:
        for asked, expected in talked:
            client.sendall(asked.bytes)
            answer = read_frame(client)
            assert answer is not None
            if asked.type == FrameType.HELLO:
                then, now = Welcome.unpack(expected.head), Welcome.unpack(answer.head)
                assert (now.node_id, now.host) == (then.node_id, then.host)
                assert now.incarnation == then.incarnation
            else:
                assert answer == expected, FrameType(asked.type)


def test_our_client_works_with_the_releases_node(release: Path) -> None:
    node = FrozenNode(exchanges(release), raw(read(release, "talk")["refusal"]))
    try:
        talk(node.address)
        assert node.unknown == []
    finally:
        node.close()


def test_a_node_that_refuses_a_new_question_is_used_without_it(release: Path) -> None:
    replies = [
        (frame, reply) for frame, reply in exchanges(release) if frame.type != FrameType.ABOUT
    ]
    node = FrozenNode(replies, raw(read(release, "talk")["refusal"]))
    try:
        hello, _ = replies[0]
        assert hello.type == FrameType.HELLO
        welcome, about = greet(Peer(NodeId(""), node.address, "", client_id=CLIENT_ID))
        assert (welcome.node_id, about) == (NODE, About())
        assert node.unknown == [FrameType.ABOUT]
    finally:
        node.close()


# Files


def test_the_releases_segment_is_attached_with_its_blocks(release: Path, tmp_path: Path) -> None:
    path = unpack(release, "segment.gz", tmp_path / "frozen.seg")
    rig = Rig(config(path), ManualClock(5.0))
    try:
        pool = InprocPoolNode(rig.node)
        for name in "abc":
            (place,) = pool.lookup([block_key(name)])
            assert place is not None
            assert fetch(pool, place) == [make_range(name, 0), make_range(name, 1)]
        parents = {event.key: event.block.parent for event in rig.node.reports.inventory()}
        assert parents[block_key("c")] == block_key("b")
    finally:
        rig.stop()


def test_the_releases_disk_pool_is_read(release: Path, tmp_path: Path) -> None:
    with tarfile.open(release / "disk.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    disk = SegmentStore(tmp_path / "disk", capacity_bytes=DISK_BYTES, segment_bytes=DISK_FILE_BYTES)
    try:
        for name in "abc":
            whole = make_range(name, 0) + make_range(name, 1)
            found = bytearray(len(whole))
            disk.get_block(block_key(name), memoryview(found))
            assert bytes(found) == whole
    finally:
        disk.close()


def test_the_releases_namespaces_are_known_and_changed(release: Path, tmp_path: Path) -> None:
    store = NamespaceStore(str(unpack(release, "meta.db.gz", tmp_path / "meta.db")))
    try:
        assert key_of(store, "ann").hex() == read(release, "facts")["key_of_ann"]
        assert key_of(store, "bob") == key_of(store, "ann")
        store.put(TEAM)
    finally:
        store.close()


def store_with_secret() -> NamespaceStore:
    store = NamespaceStore(":memory:", cluster_secret=SECRET)
    store.put(TEAM)
    return store


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    drop = "DROP SCHEMA IF EXISTS tierkv_meta CASCADE"
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(drop)
        yield connection
        connection.execute(drop)


def test_the_releases_schema_in_postgresql_is_used(
    release: Path, postgres: PostgresServer, database: psycopg.Connection[Any]
) -> None:
    database.execute((release / "meta.sql").read_bytes())
    database.execute("ALTER SCHEMA tierkv_meta OWNER TO alice")
    for table in ("cluster", "namespaces", "changes", "schema_version"):
        database.execute(f"ALTER TABLE tierkv_meta.{table} OWNER TO alice".encode())
    url = postgres.url
    store = NamespaceStore(url, cluster_secret=SECRET)
    try:
        assert key_of(store, "bob") == key_of(store_with_secret(), "bob")
        store.put(TEAM)
    finally:
        store.close()


def test_the_releases_statistics_go_on(release: Path, tmp_path: Path) -> None:
    store = StatisticStore(
        str(unpack(release, "statistics.db.gz", tmp_path / "statistics.db")), now_s=200.0
    )
    try:
        rows = store.select("SELECT queryid, query, calls FROM statements", 200.0)
        assert [tuple(row.values()) for row in rows] == [(7, "SELECT 7", 3)]
    finally:
        store.close(10.0)

"""Freezes what this release writes and says, for the tests of later releases.

Run once per release, and commit the folder: ``python -m tests.releases.freeze v0_2``. Tests of
every later release read all folders here; one is deleted when its release may no longer share a
cluster with the present one.
"""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fix_dmp import Rig, make_put, make_range, store
from tests.releases.conversation import CLIENT_ID, NODE, STRANGE_TYPE, Recorder, read_frame, talk
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistic_tables import STATEMENTS
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameType, pack_header
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import HostId
from tierkv.kvwire.v1 import common_pb2, compute_pb2, meta_pb2
from tierkv.metaserver.client import Namespace
from tierkv.metaserver.database_postgres import MIGRATIONS
from tierkv.metaserver.namespaces import NamespaceStore
from tierkv.metaserver.rpc.locate_stream import LocateFrame
from tierkv.storage.disk.segment_store import SegmentStore

SCHEMAS = (common_pb2, meta_pb2, compute_pb2)
EXTENT_BYTES = 256 << 10
DISK_BYTES, DISK_FILE_BYTES = 4 << 20, 1 << 20
SECRET = b"a secret of the cluster"
TEAM = Namespace("team", ("ann", "bob"), cache_enabled=True)
_DEEPEST = 3


def config(path: Path) -> DmpConfig:
    """Return the configuration of the frozen node."""
    return DmpConfig(
        NODE,
        HostId("here"),
        segment_path=str(path),
        capacity_bytes=4 * EXTENT_BYTES,
        extent_bytes=EXTENT_BYTES,
        tick_interval_s=3600.0,
        attach_wait_s=0.0,
        scrub_rate_bytes_per_s=0,
        rdma="off",
    )


def protocol(modules: tuple[ModuleType, ...] = SCHEMAS) -> dict[str, Any]:
    """Return all messages and calls of the schemas, as far as they decide about bytes."""
    messages: dict[str, Any] = {}
    calls: dict[str, Any] = {}
    for module in modules:
        for message in _all_messages(module):
            messages[message.full_name] = {
                field.name: [field.number, field.type, field.is_repeated]
                for field in message.fields
            }
        for service in module.DESCRIPTOR.services_by_name.values():
            for call in service.methods:
                calls[f"{service.full_name}/{call.name}"] = [
                    call.input_type.full_name,
                    call.output_type.full_name,
                    call.client_streaming,
                    call.server_streaming,
                ]
    frames = {"data": FrameType, "locate": LocateFrame}
    types = {name: {each.name: int(each) for each in kind} for name, kind in frames.items()}
    return {"messages": messages, "calls": calls, "frames": types}


def _all_messages(module: ModuleType) -> Iterator[Descriptor]:
    waiting = list(module.DESCRIPTOR.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting += message.nested_types
        yield message


def filled(message: Message, depth: int = 0) -> Message:
    """Give every field a value that follows from its number."""
    chosen: set[str] = set()
    for field in message.DESCRIPTOR.fields:
        choice = field.containing_oneof
        if choice is not None:
            if choice.name in chosen:
                continue
            chosen.add(choice.name)
        _fill(message, field, depth)
    return message


def _fill(message: Message, field: FieldDescriptor, depth: int) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        is_text = inner.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        key = f"key-{field.number}" if is_text else field.number
        getattr(message, field.name)[key] = field.number
    elif inner is not None:
        if depth == _DEEPEST:
            return
        target = getattr(message, field.name)
        if field.is_repeated:
            filled(target.add(), depth + 1)
        else:
            target.SetInParent()
            filled(target, depth + 1)
    elif field.is_repeated:
        getattr(message, field.name).extend([_value(field), _value(field)])
    else:
        setattr(message, field.name, _value(field))


def _value(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"text-{field.number}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([field.number]) * 16
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return field.number + 0.5
    return field.number


def messages() -> dict[str, Any]:
    """Return each message filled, as bytes and as what they mean."""
    found = {}
    for module in SCHEMAS:
        for each in module.DESCRIPTOR.message_types_by_name.values():
            message = filled(GetMessageClass(each)())
            found[each.full_name] = {
                "bytes": base64.b64encode(message.SerializeToString(deterministic=True)).decode(),
                "means": MessageToDict(message, preserving_proto_field_name=True),
            }
    return found


def record_talk() -> dict[str, Any]:
    """Return the client's talk with a node, and how the node refuses what it does not know."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierkv-test-") as folder:
        rig = Rig(config(Path(folder) / "frozen.seg"), ManualClock())
        try:
            recorder = Recorder(rig.server.address)
            talk(recorder.address)
            recorder.close()
            refusal = refusal_of(rig.server.address)
        finally:
            rig.stop()
    return {
        "exchanges": [
            [_text(asked.bytes), _text(reply.bytes)] for asked, reply in recorder.exchanges
        ],
        "refusal": _text(refusal),
    }


def refusal_of(address: str) -> bytes:
    """Send a HELLO and a frame of no known type; return the answer to the second."""
    host, _, port = address.rpartition(":")
    hello = m.Hello("", CLIENT_ID).pack()
    strange = bytearray(pack_header(FrameType.STATS, 2, head_bytes=0))
    strange[5] = STRANGE_TYPE
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(pack_header(FrameType.HELLO, 1, head_bytes=len(hello)) + hello)
        assert read_frame(sock) is not None
        sock.sendall(strange)
        answer = read_frame(sock)
    assert answer is not None
    return answer.bytes


def _text(raw: bytes) -> str:
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()


def write_files(out: Path) -> None:
    """Write a segment, a disk pool's folder and the databases."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierkv-test-") as name:
        folder = Path(name)
        rig = Rig(config(folder / "frozen.seg"), ManualClock())
        pool = InprocPoolNode(rig.node)
        for block, parent in (("a", None), ("b", "a"), ("c", "b")):
            store(pool, block, parent)
        rig.stop()
        _pack(folder / "frozen.seg", out / "segment.gz")

        disk = SegmentStore(
            folder / "disk", capacity_bytes=DISK_BYTES, segment_bytes=DISK_FILE_BYTES
        )
        for block in "abc":
            disk.put(make_put(block), memoryview(make_range(block, 0) + make_range(block, 1)))
        disk.close()
        with tarfile.open(out / "disk.tar.gz", "w:gz") as tar:
            tar.add(folder / "disk", "disk")

        namespaces = NamespaceStore(str(folder / "meta.db"))
        namespaces.put(TEAM)
        facts = {"key_of_ann": key_of(namespaces, "ann").hex()}
        namespaces.close()
        (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
        _pack(folder / "meta.db", out / "meta.db.gz")

        statistics = StatisticStore(str(folder / "statistics.db"), now_s=100.0)
        query = {"query": "SELECT 7"}
        statistics.add(STATEMENTS, ("ann", 7), {"calls": 3.0}, at_s=100.0, facts=query)
        statistics.close(10.0)
        _pack(folder / "statistics.db", out / "statistics.db.gz")
    schema = (
        "CREATE SCHEMA tierkv_meta;\n"
        "CREATE TABLE tierkv_meta.schema_version (version int NOT NULL);\n"
        + "".join(MIGRATIONS)
        + f"INSERT INTO tierkv_meta.schema_version VALUES ({len(MIGRATIONS)});\n"
        "INSERT INTO tierkv_meta.namespaces (name, tenants, cache_enabled, policy) "
        "VALUES ('team', '[\"ann\", \"bob\"]', true, '{}');\n"
    )
    (out / "meta.sql").write_text(schema)


def key_of(store: NamespaceStore, tenant: str) -> bytes:
    """Return the key that a store grants a tenant; it follows from the cluster's secret."""
    return store.resolve(tenant, model_revision="m", layout_fingerprint=b"l").namespace_key


def _pack(file: Path, out: Path) -> None:
    with file.open("rb") as source, gzip.GzipFile(out, "wb", mtime=0) as target:
        shutil.copyfileobj(source, target)


def freeze(out: Path) -> None:
    """Write everything to a new folder."""
    out.mkdir(parents=True)
    for name, content in (
        ("protocol", protocol()),
        ("messages", messages()),
        ("talk", record_talk()),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    write_files(out)


if __name__ == "__main__":
    freeze(Path(__file__).with_name(sys.argv[1]))

"""The data plane under TLS: who is let in, who is not, and that bytes and faults are as without."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.fix_dmp import Rig, block_key, fetch, make_range, store
from tests.fix_tls import Certificates
from tierkv.dmp.pool_node import RangeRead
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.kvcore.block import BlockSpec, RangeShape
from tierkv.kvcore.errors import BlockNotFoundError, ConfigError, TransportError
from tierkv.kvwire.credentials import TlsFiles, client_context, server_context

pytestmark = pytest.mark.integration
MakeRig = Callable[..., Rig]


def connect(rig: Rig, tls: TlsFiles | None, *, token: str = "") -> TcpPoolNode:
    peer = Peer(rig.node.node_id, rig.server.address, token, tls=tls)
    return TcpPoolNode(peer, host=rig.node.host)


def refusal(rig: Rig, tls: TlsFiles | None, *, token: str = "") -> str:
    pool = connect(rig, tls, token=token)
    with pytest.raises(TransportError) as caught:
        pool.stats()
    pool.close()
    return str(caught.value)


def test_a_client_that_knows_the_ca_is_served(
    make_rig: MakeRig, certificates: Certificates
) -> None:
    rig = make_rig(tls=certificates.server, token="t")
    for tls in (certificates.anonymous, certificates.client):
        pool = connect(rig, tls, token="t")
        place = pool.lookup([block_key("a")])[0] or store(pool, "a")
        assert fetch(pool, place) == [make_range("a", 0), make_range("a", 1)]
        pool.close()
    assert "invalid_api_key" in refusal(rig, certificates.anonymous, token="wrong")


def test_strangers_of_all_kinds_are_refused(make_rig: MakeRig, certificates: Certificates) -> None:
    rig = make_rig(tls=certificates.server)
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(rig, certificates.deceived)
    other_name = replace(certificates.anonymous, server_name="db.test")
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(rig, other_name)
    refusal(rig, None)  # Plain TCP to a door that speaks TLS.
    plain = make_rig("dmp-b")
    refusal(plain, certificates.anonymous)
    pool = connect(rig, replace(certificates.anonymous, server_name="dmp.test"))
    assert pool.stats().memory.blocks_used == 0
    pool.close()


def test_a_node_may_ask_for_certificates(make_rig: MakeRig, certificates: Certificates) -> None:
    rig = make_rig(tls=certificates.strict_server)
    refusal(rig, certificates.anonymous)
    pool = connect(rig, certificates.client)
    store(pool, "a")
    pool.close()


def test_large_blocks_come_back_and_refusals_leave_the_connection(
    make_rig: MakeRig, certificates: Certificates
) -> None:
    rig = make_rig(tls=certificates.server, capacity_bytes=32 << 20, extent_bytes=16 << 20, port=0)
    pool = connect(rig, certificates.anonymous)
    size, ranges = 700_001, 12
    data = memoryview(b"".join(make_range("big", i, size) for i in range(ranges)))
    put = BlockSpec(block_key("big"), block_key("root"), 64, ranges=RangeShape(size, ranges))
    (place,) = pool.put([put], [data])
    assert place is not None
    assert pool.put([put], [data]) == [None]
    buffer = bytearray(len(data))
    view = memoryview(buffer)
    reads = [RangeRead(place, i, view[i * size : (i + 1) * size]) for i in reversed(range(ranges))]
    pool.read_ranges(reads)
    assert buffer == data
    with pytest.raises(BlockNotFoundError):
        pool.read_ranges([*reads, RangeRead(place, 0, view[: size - 1])])
    pool.read_ranges(reads[:1])
    assert len(rig.server._sessions) == 1
    pool.close()


def test_a_peer_that_never_shakes_hands_blocks_nobody(
    make_rig: MakeRig, certificates: Certificates
) -> None:
    rig = make_rig(tls=certificates.server)
    host, port = rig.server.address.split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"\x16\x03\x01")
        pool = connect(rig, certificates.anonymous)
        store(pool, "a")
        pool.close()


def test_files_that_can_not_be_used_say_which(certificates: Certificates, tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"dmp\.tls_cert"):
        server_context(TlsFiles(cert=f"{tmp_path}/nothing.pem"))
    with pytest.raises(ConfigError, match=r"dmp\.tls_client_ca"):
        server_context(replace(certificates.server, ca=f"{tmp_path}/nothing.pem"))
    with pytest.raises(ConfigError, match="needs the CA"):
        client_context(TlsFiles())
    with pytest.raises(ConfigError, match=r"pool\.tls_ca"):
        client_context(TlsFiles(ca=certificates.server.key))

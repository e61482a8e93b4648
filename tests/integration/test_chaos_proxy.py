"""The proxy that injects network faults does what it says, on plain sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.fix_chaos import HOLE, NONE, RESET, ChaosProxy, Fault
from tests.fix_cluster import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65_536):
                    connection.sendall(data)
            except OSError:
                pass

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield "{}:{}".format(*listener.getsockname())
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def proxy(echo: str) -> Iterator[ChaosProxy]:
    with ChaosProxy(echo, seed=1) as made:
        yield made


def dial(proxy: ChaosProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def exactly(client: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size and (more := client.recv(size - len(got))):
        got += more
    return got


def silent(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        return not client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(20)


@pytest.mark.parametrize(
    "fault", [NONE, Fault(delay_s=0.02, jitter_s=0.01), Fault(bytes_per_s=1e6)]
)
def test_bytes_arrive_unchanged(proxy: ChaosProxy, fault: Fault) -> None:
    proxy.both(fault)
    sent = bytes(range(256)) * 200
    with dial(proxy) as client:
        client.sendall(sent)
        assert exactly(client, len(sent)) == sent


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_hole_swallows_one_direction_until_it_heals(proxy: ChaosProxy, direction: str) -> None:
    with dial(proxy) as client:
        client.sendall(b"a")
        assert exactly(client, 1) == b"a"
        setattr(proxy, direction, HOLE)
        client.sendall(b"b")
        assert silent(client)
        proxy.heal()
        client.sendall(b"c")
        assert exactly(client, 1) == b"c"


def test_a_held_connection_is_accepted_and_stays_silent(proxy: ChaosProxy) -> None:
    proxy.hold = True
    with dial(proxy) as client:
        client.sendall(b"a")
        assert silent(client)
        wait_for(lambda: proxy.accepted == 1, what="the connection is taken")


def test_a_reset_arrives_as_rst(proxy: ChaosProxy) -> None:
    with dial(proxy) as client:
        client.sendall(b"a")
        assert exactly(client, 1) == b"a"
        proxy.reset_all()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    proxy.to_client = RESET
    with dial(proxy) as client:
        client.sendall(b"a")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert proxy.resets == 2


def test_one_bit_is_flipped_in_long_chunks_only(proxy: ChaosProxy) -> None:
    proxy.to_server = Fault(flip_share=1.0, flip_from=100)
    with dial(proxy) as client:
        client.sendall(b"\0" * 50)
        assert exactly(client, 50) == b"\0" * 50
        client.sendall(b"\0" * 200)
        got = exactly(client, 200)
    assert sum(byte.bit_count() for byte in got) == proxy.flipped == 1

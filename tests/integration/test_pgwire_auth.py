"""TLS, SCRAM, limits on who may come in, and a clean end."""

from __future__ import annotations

import asyncio
import select
import shutil
import socket
import ssl
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from tests.fix_cluster import wait_for
from tests.fix_pgwire import running_pgwire, tierkv_sql
from tests.fix_tls import make_ca
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.protocol.auth import make_verifier
from tierkv.dbfront.pgwire.server import PgWireServer
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ConfigError

SLOW = "SELECT count(*) FROM range(200000) a, range(200000) b WHERE hash(a.range, b.range) = 1"

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


def test_scram_right_wrong_and_unknown() -> None:
    users = {"alice": "s3cret ü", "bob": make_verifier("builder").text}
    with running_pgwire(users=users) as server:
        for user, password in (("alice", "s3cret ü"), ("bob", "builder")):
            with psycopg.connect(server.dsn, user=user, password=password) as conn:
                assert conn.execute("SELECT current_user").fetchone() == (user,)
        for user, password in (("alice", "wrong"), ("nobody", "s3cret ü"), ("bob", "s3cret ü")):
            with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
                psycopg.connect(server.dsn, user=user, password=password)
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn)


def test_a_wrong_password_is_answered_late() -> None:
    late = {"failed_login_delay_s": 3600.0}
    with running_pgwire(users={"ann": "a"}, **late) as server:
        psycopg.connect(server.dsn, user="ann", password="a").close()
    with running_pgwire(users={"ann": "a"}, auth_timeout_s=0.5, **late) as server:
        with pytest.raises(psycopg.OperationalError) as caught:
            psycopg.connect(server.dsn, user="ann", password="b")
        assert "password authentication failed" not in str(caught.value)


def test_one_user_cannot_take_all_sessions() -> None:
    users = {"ann": "a", "bob": "b"}
    with running_pgwire(users=users, max_connections=5) as server:
        held = [psycopg.connect(server.dsn, user="bob", password="b") for _ in range(4)]
        with pytest.raises(psycopg.OperationalError, match='too many connections for role "bob"'):
            psycopg.connect(server.dsn, user="bob", password="b")
        psycopg.connect(server.dsn, user="ann", password="a").close()
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    ("name", "begin", "sqlstate"),
    [
        ("idle_session_timeout", False, "57P05"),
        ("idle_in_transaction_session_timeout", True, "25P03"),
    ],
)
def test_idle_sessions_end(name: str, begin: bool, sqlstate: str) -> None:
    with (
        running_pgwire(session_settings={"statement_timeout": "7s"}) as server,
        psycopg.connect(server.dsn, autocommit=True) as connection,
    ):
        assert connection.execute("SHOW statement_timeout").fetchone() == ("7000",)
        if begin:
            connection.execute("BEGIN")
        connection.execute(f"SET {name} = '100ms'")
        readable, _, _ = select.select([connection.pgconn.socket], [], [], 20)
        assert readable
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("SELECT 1")
        assert caught.value.sqlstate == sqlstate


def test_keys_without_users_close_sql() -> None:
    with (
        running_pgwire(needs_users=True) as server,
        pytest.raises(psycopg.OperationalError, match=r"Set front\.users"),
    ):
        psycopg.connect(server.dsn)


def test_tls_with_verification_and_scram(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    users = {"alice": "pw"}
    with running_pgwire(tls_cert_file=cert, tls_key_file=key, users=users) as server:
        dsn = f"{server.dsn} sslmode=verify-full sslrootcert={cert} password=pw"
        with psycopg.connect(dsn) as conn:
            assert conn.pgconn.ssl_in_use
            assert len(conn.execute("SELECT repeat('x', 500000)").fetchone()[0]) == 500_000
        with psycopg.connect(f"{server.dsn} sslmode=disable password=pw") as conn:
            assert not conn.pgconn.ssl_in_use


def test_require_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with running_pgwire(tls_cert_file=cert, tls_key_file=key, require_tls=True) as server:
        with pytest.raises(psycopg.OperationalError, match="TLS connections only"):
            psycopg.connect(f"{server.dsn} sslmode=disable")
        psycopg.connect(f"{server.dsn} sslmode=require").close()


def test_plaintext_behind_the_ssl_request_is_refused(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with (
        running_pgwire(tls_cert_file=cert, tls_key_file=key) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock,
    ):
        sock.sendall(struct.pack("!II", 8, 80877103) + b"injected")
        answer = sock.recv(4096)
        assert answer[:1] == b"E"
        assert b"unencrypted data" in answer


def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    cert, key = (shutil.copy(path, tmp_path) for path in certificate)

    def shown(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            plain.sendall(struct.pack("!II", 8, 80877103))
            assert plain.recv(1) == b"S"
            context = ssl._create_unverified_context()
            with context.wrap_socket(plain) as secured:
                return secured.getpeercert(binary_form=True) or b""

    with running_pgwire(tls_cert_file=cert, tls_key_file=key) as server:
        first = shown(server.port)
        make_ca(tmp_path, "fresh")
        for old, fresh in ((key, "fresh.key"), (cert, "fresh.pem")):
            (tmp_path / fresh).rename(old)
        wait_for(lambda: shown(server.port) != first, what="the new certificate is shown")
        Path(cert).write_text("damaged")
        assert shown(server.port)


def test_max_connections_and_shutdown_notice() -> None:
    with running_pgwire(max_connections=1) as server:
        conn = psycopg.connect(server.dsn, autocommit=True)
        with pytest.raises(psycopg.OperationalError, match="too many clients"):
            psycopg.connect(server.dsn)
        server.call(server.server.stop())
        with pytest.raises(psycopg.errors.AdminShutdown):
            conn.execute("SELECT 1")
        conn.close()
        assert not server.sql_server._sessions


def test_a_statement_in_flight_is_told_that_the_server_stops() -> None:
    with running_pgwire() as server, ThreadPoolExecutor(1) as pool:
        conn = psycopg.connect(server.dsn, autocommit=True)
        running = pool.submit(conn.execute, SLOW)
        handlers = server.server._clients
        wait_for(
            lambda: any(h._exchange and h._exchange.running for h in list(handlers.values())),
            what="the statement runs",
        )
        server.call(server.server.stop())
        with pytest.raises(psycopg.errors.AdminShutdown, match="administrator command"):
            running.result(30)
        conn.close()


def test_a_session_that_drains_ends_its_statement_first() -> None:
    with running_pgwire() as server, ThreadPoolExecutor(1) as pool:
        idle, inside, busy = (psycopg.connect(server.dsn) for _ in range(3))
        idle.autocommit = busy.autocommit = True
        assert inside.execute("SELECT 1").fetchone() == (1,)
        running = pool.submit(busy.execute, SLOW)
        handlers = server.server._clients
        wait_for(
            lambda: any(h._exchange and h._exchange.running for h in list(handlers.values())),
            what="the statement runs",
        )
        server.call(server.server.drain(0.0))
        assert not running.done()
        busy.cancel_safe()
        with pytest.raises(psycopg.errors.QueryCanceled):
            running.result(30)
        with pytest.raises(psycopg.OperationalError, match="another front"):
            psycopg.connect(server.dsn)
        with pytest.raises(psycopg.OperationalError):
            idle.execute("SELECT 1")
        assert inside.execute("SELECT 2").fetchone() == (2,)
        inside.commit()
        for conn in (inside, busy):
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")
        for conn in (idle, inside, busy):
            conn.close()


def test_silent_clients_are_sent_away() -> None:
    with (
        running_pgwire(auth_timeout_s=0.1) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock,
    ):
        assert sock.recv(100) == b""


async def test_port_in_use_and_unsafe_settings(tmp_path: Path) -> None:
    sql_server = tierkv_sql()
    first = PgWireServer(PgWireConfig(port=0), DialectServer(sql_server), SystemClock())
    port = await first.start()
    with pytest.raises(ConfigError, match=f"port {port} .* in use") as caught:
        await PgWireServer(
            PgWireConfig(port=port), DialectServer(sql_server), SystemClock()
        ).start()
    assert "--pg-port" in caught.value.hint
    bad = [
        PgWireConfig(bind="0.0.0.0"),
        PgWireConfig(bind="example.org"),
        PgWireConfig(tls_cert_file="x"),
        PgWireConfig(require_tls=True),
        PgWireConfig(port=70_000),
        PgWireConfig(users={"a": ""}),
        PgWireConfig(users={"a": "SCRAM-SHA-256$oops"}),
        PgWireConfig(tls_cert_file=str(tmp_path / "no"), tls_key_file=str(tmp_path / "no")),
    ]
    for config in bad:
        with pytest.raises(ConfigError):
            await PgWireServer(config, DialectServer(sql_server), SystemClock()).start()
    await first.stop()
    await sql_server.close()
    await asyncio.sleep(0)

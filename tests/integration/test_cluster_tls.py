"""A cluster whose processes speak only TLS to each other; its secrets change while it runs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fix_cluster import wait_for
from tests.fix_roles import COMPUTE, Roles
from tests.fix_tls import make_ca, sign
from tests.integration.test_cluster import make_prompts
from tierkv.compute.client import connect_compute
from tierkv.dmp.client.pool import Pool
from tierkv.kvcore.errors import TierKVError
from tierkv.kvwire.credentials import TlsFiles, TokenFile, client_context
from tierkv.metaserver.several_meta import connect_meta

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
PROMPTS = make_prompts(31)[:3]
NAME = "node.tierkv.test"


class TlsRoles(Roles):
    """Roles with a token file and certificates in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.secrets = folder / "secrets"
        self.secrets.mkdir()
        make_ca(self.secrets, "ca")
        self.renew_certificate()
        self.tokens("first")

    @property
    def tls(self) -> TlsFiles:
        """What a process of the cluster has."""
        files = (str(self.secrets / name) for name in ("node.pem", "node.key", "ca.pem"))
        return TlsFiles(*files, server_name=NAME)

    def renew_certificate(self) -> None:
        """Replace certificate and key, as a renewal does."""
        sign(self.secrets, "ca", "fresh", f"subjectAltName=DNS:{NAME}")
        for kind in ("key", "pem"):
            (self.secrets / f"fresh.{kind}").rename(self.secrets / f"node.{kind}")

    def tokens(self, *tokens: str) -> None:
        """Replace the file with the tokens."""
        fresh = self.secrets / "fresh"
        fresh.write_text("# of the cluster\n" + "\n".join(tokens) + "\n")
        fresh.rename(self.secrets / "tokens")

    def _settings(self, name: str) -> Iterator[str]:
        for item in super()._settings(name):
            if not item.startswith("cluster.token="):
                yield item
        yield f"cluster.token_file={self.secrets / 'tokens'}"
        for setting, file in (("cert", "node.pem"), ("key", "node.key"), ("ca", "ca.pem")):
            yield f"cluster.tls_{setting}={self.secrets / file}"
        yield f"cluster.tls_name={NAME}"

    def _access(self) -> dict[str, Any]:
        return {"token": TokenFile(self.secrets / "tokens"), "tls": self.tls}

    def addresses(self) -> list[str]:
        """Return where the roles listen for each other."""
        names = ("meta", "stream", "dmp-0", *COMPUTE)
        return [f"127.0.0.1:{self._ports[name]}" for name in names]

    async def accepts(self, token: str) -> bool:
        """Return whether all roles accept a token."""
        meta, _, dmp, *compute = self.addresses()
        directory = connect_meta(meta, token=token, tls=self.tls)
        nodes = [connect_compute(address, token=token, tls=self.tls) for address in compute]
        try:
            await directory.list_nodes()
            for node in nodes:
                await node.describe()
            await asyncio.to_thread(lambda: Pool.connect(dmp, token=token, tls=self.tls).close())
        except TierKVError:
            return False
        finally:
            await directory.close()
            for node in nodes:
                await node.close()
        return True

    def serial_shown(self, address: str) -> bytes:
        """Return the certificate that a role shows now."""
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            context = client_context(self.tls)
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(plain, server_hostname=NAME) as secured:
                return secured.getpeercert(binary_form=True) or b""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRoles]:
    roles = TlsRoles(tmp_path_factory.mktemp("tls-cluster"))
    try:
        roles.start("meta", "dmp-0", *COMPUTE, "front")
        yield roles
    finally:
        roles.stop()


@pytest.fixture(scope="module")
def expected(cluster: TlsRoles) -> list[str]:
    return [cluster.complete(prompt, use_cache=False) for prompt in PROMPTS]


def answers(cluster: Roles) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(cluster.complete, PROMPTS))


def test_answers_and_the_pool_are_as_without_tls(cluster: TlsRoles, expected: list[str]) -> None:
    cluster.wait_whole()
    assert answers(cluster) == answers(cluster) == expected
    wait_for(lambda: cluster.in_pool() > 0, what="blocks are in the pool")
    cluster.drop_caches()
    assert answers(cluster) == expected


def test_every_port_between_processes_wants_a_certificate(cluster: TlsRoles) -> None:
    for address in cluster.addresses():
        host, _, port = address.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cluster.tls.ca)
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            pytest.raises(OSError),
            context.wrap_socket(plain, server_hostname=NAME) as secured,
        ):
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            if not secured.recv(100):
                raise ConnectionResetError


async def test_strangers_are_refused(cluster: TlsRoles) -> None:
    meta, _, dmp, *_ = cluster.addresses()
    plain = connect_meta(meta, token="first")
    with pytest.raises(TierKVError):
        await plain.list_nodes()
    await plain.close()
    wrong = connect_meta(meta, token="wrong", tls=cluster.tls)
    with pytest.raises(TierKVError, match="refused our cluster token"):
        await wrong.list_nodes()
    await wrong.close()
    with pytest.raises(TierKVError):
        Pool.connect(dmp, token="first")


def test_a_new_certificate_is_used_without_a_restart(
    cluster: TlsRoles, expected: list[str]
) -> None:
    before = {address: cluster.serial_shown(address) for address in cluster.addresses()}
    cluster.renew_certificate()
    for address, old in before.items():
        wait_for(lambda at=address, was=old: cluster.serial_shown(at) != was,  # type: ignore[misc]
                 what=f"{address} shows the new certificate")  # fmt: skip
    assert answers(cluster) == expected
    cluster.kill("compute-0")
    cluster.start("compute-0")
    cluster.wait_whole()
    assert answers(cluster) == expected


def test_the_token_changes_step_by_step_without_a_restart(
    cluster: TlsRoles, expected: list[str]
) -> None:
    for tokens in (("first", "second"), ("second", "first"), ("second",)):
        cluster.tokens(*tokens)
        wait_for(lambda: asyncio.run(cluster.accepts("second")), what="all roles have read it")
        assert answers(cluster) == expected
        cluster.drop_caches()
        assert answers(cluster) == expected
    wait_for(lambda: not asyncio.run(cluster.accepts("first")), what="the old token is refused")
    cluster.kill("compute-1")
    cluster.start("compute-1")
    cluster.wait_whole()
    assert answers(cluster) == expected

"""Certificates for tests: a CA, a server and a client it signed, and a CA nobody knows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tierkv.kvwire.credentials import TlsFiles


@dataclass(frozen=True)
class Certificates:
    """What the two ends of a connection are given.

    Attributes:
        server: for the node; asks no certificate of clients.
        strict_server: for the node; asks for one.
        client: knows the CA and shows a certificate.
        anonymous: knows the CA and shows none.
        deceived: trusts another CA.
    """

    server: TlsFiles
    strict_server: TlsFiles
    client: TlsFiles
    anonymous: TlsFiles
    deceived: TlsFiles


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("tls")
    ca, other = make_ca(folder, "ca"), make_ca(folder, "other")
    server, server_key = sign(folder, "ca", "server", "subjectAltName=IP:127.0.0.1,DNS:dmp.test")
    client, client_key = sign(folder, "ca", "client", "subjectAltName=DNS:client.test")
    return Certificates(
        server=TlsFiles(server, server_key),
        strict_server=TlsFiles(server, server_key, ca),
        client=TlsFiles(client, client_key, ca),
        anonymous=TlsFiles(ca=ca),
        deceived=TlsFiles(ca=other),
    )


@pytest.fixture
def get_certificates(request: pytest.FixtureRequest) -> Callable[[], Certificates]:
    """Certificates on demand: where no test needs them, no openssl is needed either."""
    return lambda: request.getfixturevalue("certificates")


def make_ca(folder: Path, name: str) -> str:
    """Make a self-signed certificate that may sign others."""
    openssl(
        "req", "-x509", *_new_key(folder, name), "-days", "2", "-subj", f"/CN={name}",
        "-addext", "keyUsage=critical,keyCertSign", "-out", f"{folder}/{name}.pem",
    )  # fmt: skip
    return f"{folder}/{name}.pem"


def sign(folder: Path, ca: str, name: str, extension: str) -> tuple[str, str]:
    """Make a certificate and its key."""
    openssl(
        "req", "-x509", *_new_key(folder, name), "-days", "2", "-subj", f"/CN={name}",
        "-addext", extension, "-addext", "basicConstraints=critical,CA:FALSE",
        "-CA", f"{folder}/{ca}.pem", "-CAkey", f"{folder}/{ca}.key", "-out", f"{folder}/{name}.pem",
    )  # fmt: skip
    return f"{folder}/{name}.pem", f"{folder}/{name}.key"


def _new_key(folder: Path, name: str) -> list[str]:
    curve = "ec_paramgen_curve:P-256"
    return ["-newkey", "ec", "-pkeyopt", curve, "-nodes", "-keyout", f"{folder}/{name}.key"]


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)

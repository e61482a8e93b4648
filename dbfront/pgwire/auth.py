"""SCRAM-SHA-256 logins, on top of the scramp library.

The server makes one ``Authenticator`` from its users and one ``login`` per client; no I/O here.
An unknown user goes through the same motions as a wrong password and fails at the same step.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import scramp

from kvcore.errors import AuthenticationError, ConfigError, RemoteProtocolError

MECHANISM: Final = "SCRAM-SHA-256"
_ITERATIONS: Final = 4_096
_SALT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ScramVerifier:
    """What the server keeps of a password; it can check it but not log in elsewhere with it."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    @property
    def text(self) -> str:
        """PostgreSQL's spelling, as in pg_authid.rolpassword."""
        salt, stored, server = (
            base64.b64encode(part).decode()
            for part in (self.salt, self.stored_key, self.server_key)
        )
        return f"{MECHANISM}${self.iterations}:{salt}${stored}:{server}"


def make_verifier(password: str) -> ScramVerifier:
    """Derive a verifier from a clear password; costs some milliseconds on purpose."""
    parts = scramp.ScramMechanism(MECHANISM).make_auth_info(password, iteration_count=_ITERATIONS)
    return ScramVerifier(*parts)


def parse_verifier(user: str, secret: str) -> ScramVerifier:
    """Read PostgreSQL's verifier text; anything else is taken for a clear password.

    Raises:
        ConfigError: it starts like a verifier but is malformed, or is empty.
    """
    if not secret:
        raise ConfigError(f"pgwire user {user!r} has an empty password")
    if not secret.startswith(MECHANISM + "$"):
        return make_verifier(secret)
    try:
        _, head, keys = secret.split("$")
        iterations, salt = head.split(":")
        stored, server = keys.split(":")
        parts = [base64.b64decode(part, validate=True) for part in (salt, stored, server)]
        return ScramVerifier(parts[0], parts[1], parts[2], int(iterations))
    except (ValueError, binascii.Error):
        raise ConfigError(
            f"pgwire user {user!r} has a malformed SCRAM verifier",
            hint="expected SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>",
        ) from None


class ScramLogin:
    """One client's exchange: first message in and out, final message in and out."""

    def __init__(self, user: str, verifier: ScramVerifier, *, known: bool) -> None:
        self._user = user
        self._known = known
        info = (verifier.salt, verifier.stored_key, verifier.server_key, verifier.iterations)
        # PostgreSQL ignores the name inside SCRAM: the startup message's counts.
        self._server = scramp.ScramMechanism(MECHANISM).make_server(lambda _name: info)

    def first(self, mechanism: str, client_first: bytes) -> bytes:
        """Answer the client's first message.

        Raises:
            RemoteProtocolError: unknown mechanism or malformed message.
        """
        if mechanism != MECHANISM:
            raise RemoteProtocolError(f"client selected an invalid SASL mechanism {mechanism!r}")
        return self._step(
            self._server.set_client_first, self._server.get_server_first, client_first
        )

    def final(self, client_final: bytes) -> bytes:
        """Check the client's proof and answer with ours.

        Raises:
            AuthenticationError: wrong password or unknown user.
        """
        try:
            answer = self._step(
                self._server.set_client_final, self._server.get_server_final, client_final
            )
        except RemoteProtocolError:
            raise self._refused() from None
        if not self._known:
            raise self._refused()
        return answer

    def _refused(self) -> AuthenticationError:
        return AuthenticationError(f'password authentication failed for user "{self._user}"')

    @staticmethod
    def _step(take: Any, give: Any, data: bytes) -> bytes:
        try:
            take(data.decode())
            return bytes(give().encode())
        except (scramp.ScramException, ValueError):
            raise RemoteProtocolError("malformed SCRAM message") from None


class Authenticator:
    """The users of one server."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._verifiers = {user: parse_verifier(user, secret) for user, secret in users.items()}
        self._mock_key = secrets.token_bytes(32)

    @property
    def trust(self) -> bool:
        """Whether nobody is asked for a password."""
        return not self._verifiers

    def login(self, user: str) -> ScramLogin:
        """Begin one client's exchange."""
        verifier = self._verifiers.get(user)
        return ScramLogin(user, verifier or self._mock(user), known=verifier is not None)

    def _mock(self, user: str) -> ScramVerifier:
        """A verifier nobody can satisfy, the same for each try, so names can't be probed."""
        salt = hmac.new(self._mock_key, user.encode(), hashlib.sha256).digest()[:_SALT_BYTES]
        return ScramVerifier(salt, secrets.token_bytes(32), secrets.token_bytes(32), _ITERATIONS)

"""SCRAM-SHA-256 logins (RFC 5802 and 7677).

The server creates one ``Authenticator`` from its users and one ``login`` per client; no I/O here.
The exchange is implemented here because scramp's exchange refuses the empty user name that libpq
sends; keys and SASLprep come from scramp. An unknown user gets the same exchange as a user with a
wrong password.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import scramp

from tierkv.kvcore.errors import AuthenticationError, ConfigError, RemoteProtocolError

MECHANISM: Final = "SCRAM-SHA-256"
_ITERATIONS: Final = 4_096
_SALT_BYTES: Final = 16
_UNKNOWN: Final = "unknown user"
_KEY_BYTES: Final = hashlib.sha256().digest_size
_NONCE_BYTES: Final = 18
_CLIENT_FIRST: Final = re.compile(
    r"(?P<header>[ny],(?:a=[^,]*)?,)(?P<bare>n=[^,]*,r=(?P<nonce>[!-+\--~]{8,256})(?:,[a-z]=[^,]*)*)"
)
_CLIENT_FINAL: Final = re.compile(
    r"(?P<unproved>c=(?P<channel>[^,]+),r=(?P<nonce>[^,]+)(?:,[a-z]=[^,]*)*),p=(?P<proof>[^,]+)"
)


@dataclass(frozen=True, slots=True)
class ScramVerifier:
    """The server's form of a password; checks a login but cannot be used for a login elsewhere."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    @property
    def text(self) -> str:
        """Return PostgreSQL's text, as in pg_authid.rolpassword."""
        salt, stored, server = (
            base64.b64encode(part).decode()
            for part in (self.salt, self.stored_key, self.server_key)
        )
        return f"{MECHANISM}${self.iterations}:{salt}${stored}:{server}"


def make_verifier(password: str) -> ScramVerifier:
    """Derive a verifier from a clear password; takes some milliseconds on purpose."""
    parts = scramp.ScramMechanism(MECHANISM).make_auth_info(password, iteration_count=_ITERATIONS)
    return ScramVerifier(*parts)


def parse_verifier(user: str, secret: str) -> ScramVerifier:
    """Parse PostgreSQL's verifier text; treat any other text as a clear password.

    Raises:
        ConfigError: the text is empty, or starts like a verifier but is malformed.
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
        verifier = ScramVerifier(parts[0], parts[1], parts[2], int(iterations))
        if verifier.iterations < 1 or {len(part) for part in parts[1:]} != {_KEY_BYTES}:
            raise ValueError(keys)
        return verifier
    except (ValueError, binascii.Error):
        raise ConfigError(
            f"pgwire user {user!r} has a malformed SCRAM verifier",
            hint="Write SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>.",
        ) from None


class ScramLogin:
    """The exchange with one client: first message in and out, final message in and out."""

    def __init__(self, user: str, verifier: ScramVerifier, *, known: bool) -> None:
        self._user = user
        self._verifier = verifier
        self._known = known
        self._header = ""
        self._nonce = ""
        self._said = ""

    def first(self, mechanism: str, client_first: bytes) -> bytes:
        """Answer the client's first message.

        Raises:
            RemoteProtocolError: unknown mechanism or malformed message.
        """
        if mechanism != MECHANISM:
            raise RemoteProtocolError(f"client selected an invalid SASL mechanism {mechanism!r}")
        match = _CLIENT_FIRST.fullmatch(client_first.decode("utf-8", "replace"))
        if match is None:
            raise RemoteProtocolError("malformed SCRAM message")
        self._header = match["header"]
        self._nonce = match["nonce"] + secrets.token_urlsafe(_NONCE_BYTES)
        salt = base64.b64encode(self._verifier.salt).decode()
        answer = f"r={self._nonce},s={salt},i={self._verifier.iterations}"
        self._said = f"{match['bare']},{answer}"
        return answer.encode()

    def final(self, client_final: bytes) -> bytes:
        """Check the client's proof and return the server's signature.

        Raises:
            RemoteProtocolError: a malformed message, or no answer to the server's first message.
            AuthenticationError: wrong password or unknown user.
        """
        match = _CLIENT_FINAL.fullmatch(client_final.decode("utf-8", "replace"))
        channel = base64.b64encode(self._header.encode()).decode()
        if match is None or match["channel"] != channel or match["nonce"] != self._nonce:
            raise RemoteProtocolError("malformed SCRAM message")
        said = f"{self._said},{match['unproved']}".encode()
        if not self._proves(match["proof"], said) or not self._known:
            raise AuthenticationError(f'password authentication failed for user "{self._user}"')
        return b"v=" + base64.b64encode(_hmac(self._verifier.server_key, said))

    def _proves(self, proof_text: str, said: bytes) -> bool:
        """Return True if the proof shows knowledge of the password (RFC 5802, section 3)."""
        try:
            proof = base64.b64decode(proof_text, validate=True)
        except binascii.Error:
            return False
        signature = _hmac(self._verifier.stored_key, said)
        if len(proof) != len(signature):
            return False
        client_key = bytes(x ^ y for x, y in zip(proof, signature, strict=True))
        return hmac.compare_digest(hashlib.sha256(client_key).digest(), self._verifier.stored_key)


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


class Authenticator:
    """The users of one server.

    Attributes:
        stored: verifier texts of the users made in SQL, by name; replaced as a whole. A user of the
            configuration has the configuration's password.
        failed: logins refused so far by user, for the audit log; unknown users count as one.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self.stored: Mapping[str, str] = {}
        self.failed: Counter[str] = Counter()
        self._verifiers = {user: parse_verifier(user, secret) for user, secret in users.items()}
        self._mock_key = secrets.token_bytes(32)

    @property
    def trust(self) -> bool:
        """Return True if clients need no password."""
        return not self._verifiers and not self.stored

    @property
    def has_several(self) -> bool:
        """Return True if there are two users or more."""
        return len(self._verifiers) + len(self.stored) > 1

    def login(self, user: str) -> ScramLogin:
        """Begin the exchange with one client."""
        verifier = self._verifiers.get(user) or self._made(user)
        return ScramLogin(user, verifier or self._mock(user), known=verifier is not None)

    def note_failure(self, user: str) -> None:
        """Count a refused login."""
        self.failed[user if user in self._verifiers or user in self.stored else _UNKNOWN] += 1

    def _made(self, user: str) -> ScramVerifier | None:
        try:
            return parse_verifier(user, self.stored[user]) if user in self.stored else None
        except ConfigError:
            return None

    def _mock(self, user: str) -> ScramVerifier:
        """Return an unsatisfiable verifier; a constant salt per user prevents probing of names."""
        salt = hmac.new(self._mock_key, user.encode(), hashlib.sha256).digest()[:_SALT_BYTES]
        return ScramVerifier(salt, secrets.token_bytes(32), secrets.token_bytes(32), _ITERATIONS)

"""The steps from a DSN to a logged-in session: the server behind the relay, startup and login.

Each client gets a separate connection to the server. Login messages pass unchanged in both
directions, including passwords and SCRAM proofs, because PostgreSQL itself decides about users. The
relay answers requests for encryption, removes channel binding from the offer (TLS ends at the
relay), and sends the defaults of ``tierkv.*`` settings. SET, SHOW and ROLLBACK of these settings
are therefore PostgreSQL's own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tierkv.dbfront.pgwire.config import is_loopback
from tierkv.dbfront.pgwire.protocol import messages as frontend
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.connection import PgConnection
from tierkv.dbfront.pgwire.protocol.stream import StartupExchange
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.conversation import LENGTH
from tierkv.dbfront.postgres.wire.endpoint import Endpoint
from tierkv.kvcore.errors import AuthenticationError, ConfigError, NoNodeError, RemoteProtocolError
from tierkv.sql.settings import SETTINGS, parse_setting

_CONNECT_S: Final = 10.0
_ENCRYPTED: Final = frozenset({"require", "verify-ca", "verify-full"})
_SSL_MODES: Final = frozenset({"disable", "allow", "prefer"}) | _ENCRYPTED


@dataclass(frozen=True, slots=True)
class Target:
    """Address and TLS mode of the PostgreSQL server.

    Attributes:
        host, port: of the server.
        dsn: as given; the installer logs in with the DSN.
        sslmode: libpq's word.
        tls: None for mode ``disable`` or ``allow``.
    """

    host: str
    port: int
    dsn: str = field(repr=False)
    sslmode: str = "prefer"
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """Return host and port, for messages."""
        return f"{self.host}:{self.port}"


def parse_dsn(dsn: str) -> Target:
    """Parse a libpq connection string or URI.

    Raises:
        ConfigError: the string is invalid or unusable, or psycopg is not installed.
    """
    try:
        from psycopg import ProgrammingError  # only with a PostgreSQL server behind the front
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise ConfigError(
            "front.postgres needs psycopg", hint="Run `pip install 'tierkv[postgres]'`."
        ) from None
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    except ProgrammingError:  # Its text quotes pieces of the string, perhaps of the password.
        raise ConfigError(
            "front.postgres is no connection string of PostgreSQL",
            hint="Write it as postgresql://tierkv@127.0.0.1:5432/app; in a password a space is %20 "
            "and an @ is %40.",
        ) from None
    host = given.get("host") or "localhost"
    if host.startswith(("/", "@")) or "," in host:
        raise ConfigError(
            f"front.postgres names {host!r}; the relay needs one host and a TCP port",
            hint="Write it as postgresql://tierkv@127.0.0.1:5432/app.",
        )
    mode = given.get("sslmode", "prefer")
    if mode not in _SSL_MODES:
        raise ConfigError(f"front.postgres: sslmode {mode!r} is unknown")
    return Target(host, int(given.get("port") or 5432), dsn, mode, _context(mode, given))


def _context(mode: str, given: dict[str, str]) -> ssl.SSLContext | None:
    if mode in ("disable", "allow"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = mode == "verify-full"
    roots = given.get("sslrootcert", "")
    # As in libpq: with a root certificate "require" verifies like verify-ca.
    checked = mode in ("verify-ca", "verify-full") or (mode == "require" and bool(roots))
    context.verify_mode = ssl.CERT_REQUIRED if checked else ssl.CERT_NONE
    try:
        if checked and roots in ("", "system"):
            context.load_default_certs()
        elif checked:
            context.load_verify_locations(roots)
        if given.get("sslcert"):
            context.load_cert_chain(given["sslcert"], given.get("sslkey"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"front.postgres: a certificate can't be loaded: {error}") from None
    return context


async def connect(target: Target) -> tuple[Endpoint, bool]:
    """Open a connection, encrypted if the mode asks for encryption.

    Returns:
        endpoint, encrypted: no message has been sent yet.

    Raises:
        NoNodeError: the server is unreachable, or refuses the required encryption.
    """
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, endpoint = await asyncio.get_running_loop().create_connection(
                Endpoint, target.host, target.port
            )
            try:
                return endpoint, await _encrypt(target, endpoint)
            except BaseException:
                endpoint.abort()
                raise
    except (OSError, TimeoutError) as error:
        raise NoNodeError(
            f"could not connect to PostgreSQL at {target.address}: {error or 'no answer'}",
            hint="The front is running; check front.postgres and that server.",
        ) from None


async def _encrypt(target: Target, endpoint: Endpoint) -> bool:
    if target.tls is None:
        return False
    endpoint.write(messages.SSL_REQUEST)
    answer = await endpoint.read()
    if answer == b"S":
        await endpoint.start_tls(target.tls, server_side=False, hostname=target.host)
        return True
    if target.sslmode in _ENCRYPTED:
        raise NoNodeError(
            f"PostgreSQL at {target.address} does not speak TLS, and sslmode={target.sslmode} "
            "wants it"
        )
    return False


_MAX_LOGIN_FRAME_BYTES: Final = 65_536
_OK, _SASL, _SASL_CONTINUE, _SASL_FINAL = 0, 10, 11, 12
_NO_ANSWER: Final = frozenset({_OK, _SASL_FINAL})
_PLUS: Final = "SCRAM-SHA-256-PLUS"


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """A session that PostgreSQL has accepted.

    Attributes:
        backend: the connection to PostgreSQL.
        user, database, application_name: from the StartupMessage.
        pid, secret: from BackendKeyData; the client needs both to cancel.
        parameters: settings reported by PostgreSQL.
        leftover: bytes that the client sent after its login.
        behind: bytes that PostgreSQL sent after its ReadyForQuery.
    """

    backend: Endpoint
    user: str
    database: str
    application_name: str
    pid: int
    secret: bytes
    parameters: dict[str, str]
    leftover: bytes
    behind: bytes


class Login:
    """The login of one client."""

    def __init__(
        self,
        client: Endpoint,
        target: Target,
        *,
        tls: ssl.SSLContext | None,
        require_tls: bool,
        defaults: Mapping[str, str],
        on_cancel: Callable[[frontend.CancelRequest], Awaitable[None]],
        admit: Callable[[], None],
    ) -> None:
        self._client = client
        self._target = target
        self._defaults = defaults
        self._admit = admit
        self._connection = PgConnection()
        self._startup = StartupExchange(
            self._connection,
            client,
            tls=tls,
            require_tls=require_tls,
            start_tls=self._start_tls,
            on_cancel=on_cancel,
        )
        self._backend_encrypted = False
        self._challenged = False

    async def run(self) -> LoggedIn | None:
        """Log the client in; None if the client left, was refused, or only sent a cancel.

        Raises:
            TierKVError: sent to the client as FATAL.
        """
        startup = await self._startup.run()
        if startup is None:
            return None
        parameters = startup_parameters(startup.parameters, self._defaults)
        self._connection.accept_startup()
        self._admit()
        backend, self._backend_encrypted = await connect(self._target)
        try:
            backend.write(messages.startup(parameters, minor=startup.minor))
            logged_in = await self._authenticate(backend, parameters)
        except BaseException:
            backend.abort()
            raise
        if logged_in is None:
            await backend.finish()
        return logged_in

    async def _start_tls(self, context: ssl.SSLContext) -> None:
        self._client.write(b"S")
        await self._client.start_tls(context, server_side=True)

    async def _authenticate(self, backend: Endpoint, startup: Mapping[str, str]) -> LoggedIn | None:
        buffer = b""
        pid, secret = 0, b""
        reported: dict[str, str] = {}
        while True:
            while (frame := _first_frame(buffer)) is None:
                data = await backend.read()
                if not data:
                    return None
                buffer += data
            buffer = buffer[len(frame) :]
            kind = frame[:1]
            if kind == b"R":
                if not await self._pass_challenge(backend, frame):
                    return None
                continue
            if kind == b"S":
                name, value = frame[5:].split(b"\0")[:2]
                reported[name.decode()] = value.decode("utf-8", "replace")
            elif kind == b"K":
                pid, secret = int.from_bytes(frame[5:9], "big"), frame[9:]
            self._client.write(frame)
            if kind == b"E":
                return None
            if kind == b"Z":
                break
        return LoggedIn(
            backend,
            startup.get("user", ""),
            startup.get("database", "") or startup.get("user", ""),
            startup.get("application_name", ""),
            pid,
            secret,
            reported,
            self._connection.take_buffered(),
            buffer,
        )

    async def _pass_challenge(self, backend: Endpoint, frame: bytes) -> bool:
        """Pass an Authentication frame on, and the answer back; False if the client left."""
        code = LENGTH(frame, 5)[0]
        if code == _OK:
            self._refuse_trust()
        offered = messages.mechanisms(frame)
        if offered is not None:
            frame = replies.authentication_sasl([name for name in offered if name != _PLUS])
        self._client.write(frame)
        if code in _NO_ANSWER:
            return True
        self._challenged = True
        answer = await self._startup.next_message()
        if not isinstance(answer, frontend.PasswordData):
            return False
        if code == _SASL:
            self._check_binding(answer.data)
        backend.write(messages.framed(b"p", answer.data))
        return True

    def _refuse_trust(self) -> None:
        """Refuse a remote client if PostgreSQL accepts it only for the front's own address."""
        if self._challenged or is_loopback(self._client.peer):
            return
        raise AuthenticationError(
            "PostgreSQL did not ask this connection for a password",
            detail="It trusts the address of the TierKV front, so anyone could log in as any user "
            "through the front.",
            hint="Require scram-sha-256 in pg_hba.conf for the front's address.",
        )

    def _check_binding(self, data: bytes) -> None:
        """Explain a channel binding, which PostgreSQL would take for an attack."""
        mechanism, first = frontend.sasl_initial(data)
        if mechanism == _PLUS or (first.startswith(b"y") and self._backend_encrypted):
            raise AuthenticationError(
                "channel binding is not possible through the TierKV front, because TLS ends there",
                hint="Connect with channel_binding=disable.",
            )


def startup_parameters(given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Add defaults of the ``tierkv.*`` settings to a client's startup parameters.

    Raises:
        SqlError: 42704, the client asked for an unknown setting.
        UserError: 22023, the client asked for an invalid value.
    """
    parameters = dict(given)
    for name, text in given.items():
        if name.lower().startswith("tierkv."):
            parse_setting(name, text)
    asked = {name.lower() for name in given}
    # PostgreSQL reads ``options`` first, so a default beside it would win.
    options = given.get("options", "").lower()
    for name, spec in SETTINGS.items():
        if name not in asked and f"{name}=" not in options:
            parameters[name] = defaults.get(name, spec.shown(spec.default))
    return parameters


def _first_frame(buffer: bytes) -> bytes | None:
    if len(buffer) < 5:
        return None
    size = LENGTH(buffer, 1)[0]
    if not 4 <= size <= _MAX_LOGIN_FRAME_BYTES:
        raise RemoteProtocolError("the server at front.postgres is not a PostgreSQL server")
    return buffer[: 1 + size] if len(buffer) >= 1 + size else None

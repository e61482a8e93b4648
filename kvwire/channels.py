"""gRPC channels and servers with common options, and the cluster token on both ends.

Called by the service and client files of all rooms. Control messages only: KV bytes never travel
over gRPC. A process that created a channel or a server must not fork afterwards (start children
with spawn or exec).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from tierkv.kvcore import limits
from tierkv.kvcore.errors import AuthenticationError, ConfigError
from tierkv.kvwire.checksums import checked_handler
from tierkv.kvwire.credentials import ChangedFiles, ClusterToken, TlsFiles, accepts, pem_of, shown
from tierkv.kvwire.status import abort_with

log = logging.getLogger("tierkv.tls")
_TLS: Final = "cluster"
_TARGET_NAME: Final = "grpc.ssl_target_name_override"
_AUTHORIZATION: Final = "authorization"
_HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"
_MESSAGE_OPTIONS: Final = (
    ("grpc.max_send_message_length", limits.MAX_GRPC_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_GRPC_MESSAGE_BYTES),
    # A silent peer (vanished machine, network partition) is detected 5 s after a ping: right after
    # a call was sent, and within 15 s on an idle connection. Without ping_timeout_ms gRPC waits a
    # minute regardless of keepalive_timeout_ms.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Room for a typed error with long texts (kvwire/status.py).
    ("grpc.max_metadata_size", 32 << 10),
    ("grpc.absolute_max_metadata_size", 64 << 10),
)
_CHANNEL_OPTIONS: Final = (
    *_MESSAGE_OPTIONS,
    # Cluster traffic must not use the http_proxy of the user's shell.
    ("grpc.enable_http_proxy", 0),
    # Reconnect to a restarted peer within about a second; gRPC's default is up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time limit of one attempt to connect; a busy peer may need more than the pause above.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER_OPTIONS: Final = (
    *_MESSAGE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Silent unauthenticated connections and departed peers must not keep descriptors.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_allowed_incoming_connections", 4_096),
    # With port sharing, two processes could listen on one port without a "port in use" error.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class BoundServer:
    """A bound server, not started yet; add servicers, then start.

    Attributes:
        server: the grpc.aio server.
        address: ``host:port`` for clients, with the actual port.
    """

    server: grpc.aio.Server
    address: str


def open_channel(
    address: str, *, token: ClusterToken | None = None, tls: TlsFiles | None = None
) -> grpc.aio.Channel:
    """Open a channel to ``host:port``; connects lazily. Call it inside the event loop.

    Args:
        address: ``host:port``.
        token: the cluster token, sent with every call; None sends none.
        tls: certificate files; None means without TLS.

    Raises:
        ConfigError: a certificate can't be used.
    """
    interceptors: list[Any] = [] if token is None else [_SendUnary(token), _SendStream(token)]
    if tls is None:
        return grpc.aio.insecure_channel(
            address, options=_CHANNEL_OPTIONS, interceptors=interceptors
        )
    cert, key, ca = pem_of(tls, setting=_TLS)
    name = ((_TARGET_NAME, tls.server_name),) if tls.server_name else ()
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(ca, key, cert),
        options=(*_CHANNEL_OPTIONS, *name),
        interceptors=interceptors,
    )


class PeerChannel:
    """A channel that is opened when first used, and anew after certificate files were replaced.

    Calls that run on an earlier channel go on there; it is closed at the next change.
    """

    def __init__(
        self, address: str, *, token: ClusterToken | None = None, tls: TlsFiles | None = None
    ) -> None:
        """Open nothing yet; arguments as ``open_channel``."""
        self._address, self._token, self._tls = address, token, tls
        self._changes = ChangedFiles(tls) if tls is not None else None
        self._channel: grpc.aio.Channel | None = None
        self._earlier: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """Return the channel for new calls.

        Raises:
            ConfigError: a certificate can't be used, at the first call.
        """
        if self._channel is None:
            self._channel = open_channel(self._address, token=self._token, tls=self._tls)
        elif self._changes is not None and self._changes.changed():
            try:
                fresh = open_channel(self._address, token=self._token, tls=self._tls)
            except ConfigError as error:
                log.warning("the earlier certificate stays in use: %s", error.message)
                return self._channel
            if self._earlier is not None:
                task = asyncio.get_running_loop().create_task(self._earlier.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            self._earlier, self._channel = self._channel, fresh
        return self._channel

    async def close(self) -> None:
        """Close all channels and cancel their calls."""
        for channel in (self._earlier, self._channel):
            if channel is not None:
                await channel.close()


def bind_server(
    address: str,
    *,
    token: ClusterToken | None = None,
    tls: TlsFiles | None = None,
    setting: str = "address",
) -> BoundServer:
    """Create a server and bind its address. Call it inside the event loop.

    Args:
        address: ``host:port``; port 0 lets the system choose.
        token: the cluster token required from every caller (except health probes).
        tls: certificate files, followed when replaced; callers then need a certificate of the same
            CA. None means without TLS.
        setting: configuration key of the address, named in errors.

    Raises:
        ConfigError: a public address without a token, a port in use, an unknown address, or a
            certificate that can't be used.
    """
    host, port = split_address(address, setting=setting)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{setting} = {address!r} can be reached from other machines, but no token is set",
            hint="Set cluster.token, the same on all nodes, or listen on 127.0.0.1.",
        )
    tokens = () if token is None else (_CheckToken(token),)
    interceptors = (*tokens, _CheckMessages())
    server = grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _server_credentials(tls))
    except RuntimeError as error:
        raise _bind_error(address, host, port, setting) from error
    return BoundServer(server=server, address=f"{address.rpartition(':')[0]}:{bound}")


def _server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that follow the files; gRPC asks at each handshake, in its threads."""
    changes = ChangedFiles(tls)

    def load() -> grpc.ServerCertificateConfiguration:
        cert, key, ca = pem_of(tls, setting=_TLS)
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        if not changes.changed():
            return None
        try:
            return load()
        except ConfigError as error:
            log.warning("the earlier certificate stays in use: %s", error.message)
            return None

    return grpc.dynamic_ssl_server_credentials(  # The stubs do not know that None means unchanged.
        load(),
        fetch,  # type: ignore[arg-type]
        require_client_authentication=True,
    )


def split_address(address: str, *, setting: str = "address") -> tuple[str, int]:
    """Split ``host:port`` (IPv6 in brackets).

    Raises:
        ConfigError: the address does not have this form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{setting} = {address!r} is not host:port, such as 127.0.0.1:7400")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a listener on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind_error(address: str, host: str, port: int, setting: str) -> ConfigError:
    """Return the reason of a failed bind; gRPC reports none, so a plain socket repeats the bind."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return ConfigError(f"can't listen on {setting} = {address!r}: {error}")
    return ConfigError(
        f"port {port} on {host} is in use ({setting} = {address!r})",
        hint=f"Stop the process that holds port {port}, or choose another port.",
    )


def call_metadata(token: ClusterToken | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with a stream of requests, which no interceptor sees."""
    return () if token is None else ((_AUTHORIZATION, _credentials(shown(token))),)


def _credentials(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError("the cluster token must be printable ASCII and not empty")
    return f"Bearer {token}"


class _CheckToken(grpc.aio.ServerInterceptor):
    """Refuses calls without the cluster token."""

    def __init__(self, token: ClusterToken) -> None:
        _credentials(shown(token))  # Refuses a token that no call could carry.
        self._token = token
        self._refusal: Any = grpc.unary_unary_rpc_method_handler(self._refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(_HEALTH_PREFIX):
            return await continuation(handler_call_details)
        sent = dict(handler_call_details.invocation_metadata).get(_AUTHORIZATION, "")
        given = sent.decode(errors="replace") if isinstance(sent, bytes) else sent
        if accepts(self._token, given.removeprefix("Bearer ")) and given.startswith("Bearer "):
            return await continuation(handler_call_details)
        return self._refusal

    async def _refuse(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort_with(
            context,
            AuthenticationError(
                "the cluster token is missing or wrong",
                hint="Set the same cluster.token on all nodes.",
            ),
        )


class _CheckMessages(grpc.aio.ServerInterceptor):
    """Verifies checksums of messages to our own services."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None or method.startswith(_HEALTH_PREFIX):
                return handler
            self._handlers[method] = checked_handler(handler)
        return self._handlers[method]


class _SendUnary(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds the cluster token to calls with a single answer."""

    def __init__(self, token: ClusterToken) -> None:
        _credentials(shown(token))
        self._token = token

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(
            _with_token(client_call_details, _credentials(shown(self._token))), request
        )


class _SendStream(grpc.aio.UnaryStreamClientInterceptor):
    """Adds the cluster token to calls with a stream of answers."""

    def __init__(self, token: ClusterToken) -> None:
        _credentials(shown(token))
        self._token = token

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(
            _with_token(client_call_details, _credentials(shown(self._token))), request
        )


def _with_token(details: grpc.aio.ClientCallDetails, value: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.add(_AUTHORIZATION, value)
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=metadata,
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )

"""Makes the client of a cluster's directory from ``cluster.meta_address``."""

from __future__ import annotations

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.rpc.grpc_client import GrpcMeta
from tierkv.metaserver.several.several import SeveralMeta


def meta_addresses(text: str) -> tuple[str, ...]:
    """Read ``host:port``, or several of them separated by commas.

    Raises:
        ConfigError: no address, an address without a port, one given twice, or too many.
    """
    found = tuple(each.strip() for each in text.split(",") if each.strip())
    for address in found:
        if not address.rpartition(":")[2].isdecimal():
            raise ConfigError(
                f"cluster.meta_address: {address!r} is not host:port",
                hint="Give one address, or several separated by commas: a:7400,b:7400,c:7400.",
            )
    if not found or len(set(found)) < len(found) or len(found) > limits.MAX_META_SERVERS:
        raise ConfigError(
            f"cluster.meta_address = {text!r} does not name 1 to {limits.MAX_META_SERVERS} "
            "different servers",
            hint="Give each meta server's address once, and the same list on all machines.",
        )
    return found


def connect_meta(text: str, *, token: str | None = None, home: str = "") -> MetaClient:
    """Return a client of the server, or of all servers, that an address names; does not connect.

    Args:
        text: value of ``cluster.meta_address``.
        token: the cluster token.
        home: home of a node that will register.

    Raises:
        ConfigError: as ``meta_addresses``.
    """
    addresses = meta_addresses(text)
    clients = [GrpcMeta(address, token=token, home=home) for address in addresses]
    return clients[0] if len(clients) == 1 else SeveralMeta(clients, addresses)

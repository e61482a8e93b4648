"""Connection of a process to a meta server in another process.

Commands and nodes call ``connect_meta``. gRPC is loaded at the first call, not with this module: a
process with every role inside never dials.
"""

from __future__ import annotations

from tierkv.metaserver.client import MetaClient


def connect_meta(
    address: str, *, token: str | None = None, home: str = "", timeout_s: float = 2.0
) -> MetaClient:
    """Return a client of the meta server at ``host:port``; the first call connects.

    Args:
        address: the meta server's ``host:port``.
        token: the cluster token; None without a configured token.
        home: address of the registering node; only one process at a time owns a node id. Empty:
            unknown.
        timeout_s: how long one call may take before it counts as "no directory".
    """
    # gRPC is heavy and optional: see the head of this file.
    from tierkv.metaserver.rpc.grpc_client import GrpcMeta

    return GrpcMeta(address, token=token, home=home, timeout_s=timeout_s)

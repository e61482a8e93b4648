"""Connects a front to a compute node in another process.

The composition of processes calls ``connect_compute``. gRPC is loaded at the first call, not with
this module: a process with all roles in it never connects.
"""

from __future__ import annotations

from tierkv.compute.client import ComputeClient


def connect_compute(address: str, *, token: str | None = None) -> ComputeClient:
    """Return a client of the compute node at ``host:port``; the first RPC connects.

    Call this function inside the event loop that will use the client.
    """
    # gRPC is heavy and optional: see the head of this file.
    from tierkv.compute.grpc_client import GrpcComputeClient

    return GrpcComputeClient(address, token=token)

"""How a front reaches a compute node that runs elsewhere.

The composition of processes calls ``connect_compute``. gRPC is loaded at the first call, not with
this module: a process with every role inside never dials.
"""

from __future__ import annotations

from tierkv.compute.client import ComputeClient


def connect_compute(address: str, *, token: str | None = None) -> ComputeClient:
    """Return a client of the compute node at ``host:port``; the first call connects.

    Call it inside the event loop that will use it.
    """
    # gRPC is heavy and optional: see the head of this file.
    from tierkv.compute.grpc_client import GrpcComputeClient

    return GrpcComputeClient(address, token=token)

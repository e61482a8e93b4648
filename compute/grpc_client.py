"""A compute node on the other end of a gRPC channel, behind the ComputeClient Protocol.

Used by the scheduler. A lost node is a TransportError even after events were streamed; typed errors
of the node arrive unchanged. Never imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from tierkv.kvcore.errors import AuthenticationError, NodeRefusedError, TierKVError, TransportError
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest
from tierkv.kvwire.channels import open_channel
from tierkv.kvwire.checksums import checked, intact
from tierkv.kvwire.convert_compute import (
    describe_reply_from_proto,
    generate_event_from_proto,
    generate_request_to_proto,
)
from tierkv.kvwire.status import error_from_rpc
from tierkv.kvwire.v1 import compute_pb2 as pb
from tierkv.kvwire.v1 import compute_pb2_grpc

_CONTROL_TIMEOUT_S = 5.0
_PREFETCH_TIMEOUT_S = 30.0


class GrpcComputeClient:
    """ComputeClient over one channel; create the client inside the event loop of its calls."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._address = address
        self._channel = open_channel(address, token=token)
        self._stub = compute_pb2_grpc.ComputeStub(checked(self._channel))
        self._closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Answer a request with a stream of events; closing the stream cancels the request."""
        if self._closed:
            raise TransportError("this client of the compute node is closed")
        call = self._stub.Generate(generate_request_to_proto(request))
        finished = False
        try:
            async for message in call:
                event = generate_event_from_proto(intact(message))
                finished = event.finish_reason is not None
                yield event
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        except asyncio.CancelledError:
            if self._closed:  # Otherwise our own caller was cancelled.
                raise TransportError("the channel to the compute node was closed") from None
            raise
        finally:
            call.cancel()
        if not finished:
            raise TransportError("the compute node ended the stream without a last event")

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request; return False when the request is unknown."""
        try:
            reply = await self._stub.Cancel(
                pb.CancelRequest(request_id=request_id), timeout=_CONTROL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        return intact(reply).found

    async def describe(self) -> tuple[NodeInfo, NodeReport]:
        """Return registration and current report."""
        try:
            reply = await self._stub.Describe(pb.DescribeRequest(), timeout=_CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        return describe_reply_from_proto(intact(reply))

    async def drop_cache(self) -> int:
        """Forget unused L1 pages; return the number of dropped blocks."""
        try:
            reply = await self._stub.DropCache(pb.DropCacheRequest(), timeout=_CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        return intact(reply).dropped_blocks

    async def prefetch(self, request: GenerateRequest) -> int:
        """Bring known blocks of a prompt into L1; return the number of prompt tokens in L1."""
        try:
            reply = await self._stub.Prefetch(
                generate_request_to_proto(request), timeout=_PREFETCH_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        return intact(reply).loaded_tokens

    def _translated(self, error: grpc.aio.AioRpcError) -> TierKVError:
        """Return the typed error.

        A refused token is the cluster's token, not the password of a user.
        """
        typed = error_from_rpc(error, default=TransportError)
        if isinstance(typed, AuthenticationError):
            return NodeRefusedError(
                f"the compute node at {self._address} refused our cluster token",
                hint="for the operator: set the same cluster.token on all nodes",
            )
        return typed

    async def close(self) -> None:
        """Close the channel; open streams end with TransportError."""
        self._closed = True
        await self._channel.close(None)

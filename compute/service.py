"""The gRPC service of a compute node: messages in, node calls, messages out.

One servicer for all RPCs; an RPC cancelled by its client cancels the request. Every typed error
travels as a typed error (kvwire/status.py); no other error is translated here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import grpc.aio

from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest
from tierkv.kvwire.channels import BoundServer, bind_server
from tierkv.kvwire.convert_compute import (
    describe_reply_to_proto,
    generate_event_to_proto,
    generate_request_from_proto,
)
from tierkv.kvwire.status import answering
from tierkv.kvwire.v1 import compute_pb2 as pb
from tierkv.kvwire.v1 import compute_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class ServedNode(Protocol):
    """Interface of a served node: our own (compute/node.py), or another engine's.

    ``generate``, ``cancel``, ``drop_cache`` and ``prefetch`` keep the sentences of
    tierkv.compute.client.ComputeClient; ``info`` and ``report`` are quick and never fail.
    """

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]: ...

    async def cancel(self, request_id: RequestId) -> bool: ...

    def info(self) -> NodeInfo: ...

    def report(self) -> NodeReport: ...

    async def drop_cache(self) -> int: ...

    async def prefetch(self, request: GenerateRequest) -> int: ...

    def set_control_address(self, address: str) -> None: ...


class ComputeServicer(compute_pb2_grpc.ComputeServicer):
    """Serves one node."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node

    async def Generate(
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateEvent]:
        """Stream the answer to one request."""
        async with answering(context):
            asked = generate_request_from_proto(request)
            async with aclosing(self._node.generate(asked)) as events:
                async for event in events:
                    yield generate_event_to_proto(event)

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelReply:
        """End a request by its id."""
        async with answering(context):
            return pb.CancelReply(found=await self._node.cancel(RequestId(request.request_id)))

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeReply:
        """Return registration and current report."""
        async with answering(context):
            return describe_reply_to_proto(self._node.info(), self._node.report())

    async def DropCache(self, request: pb.DropCacheRequest, context: _Context) -> pb.DropCacheReply:
        """Forget unused L1 pages."""
        async with answering(context):
            return pb.DropCacheReply(dropped_blocks=await self._node.drop_cache())

    async def Prefetch(self, request: pb.GenerateRequest, context: _Context) -> pb.PrefetchReply:
        """Load known blocks ahead of a request."""
        async with answering(context):
            asked = generate_request_from_proto(request)
            return pb.PrefetchReply(loaded_tokens=await self._node.prefetch(asked))


async def serve_node(
    node: ServedNode, address: str, *, token: str | None = None, setting: str = "compute.address"
) -> BoundServer:
    """Bind, start serving a node, and tell the node its address. The caller stops the server.

    Raises:
        ConfigError: the address can't be bound, or is public without a token.
    """
    bound = bind_server(address, token=token, setting=setting)
    compute_pb2_grpc.add_ComputeServicer_to_server(ComputeServicer(node), bound.server)
    await bound.server.start()
    node.set_control_address(bound.address)
    return bound

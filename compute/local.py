"""A compute node in the same process, behind the ComputeClient Protocol.

Used by ``tierkv sql`` and tests; calls go straight to the node. The creator of the node starts and
stops the node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from tierkv.compute.node import ComputeNode
from tierkv.kvcore.errors import TransportError
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest


class LocalComputeClient:
    """ComputeClient over a node in this process."""

    def __init__(self, node: ComputeNode) -> None:
        self._node = node
        self._closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Answer a request with a stream of events."""
        if self._closed:
            raise TransportError("this client of the compute node is closed")
        async with aclosing(self._node.generate(request)) as events:
            async for event in events:
                yield event

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request; return False when the request is unknown."""
        return await self._node.cancel(request_id)

    async def describe(self) -> tuple[NodeInfo, NodeReport]:
        """Return registration and current report."""
        return self._node.info(), self._node.report()

    async def drop_cache(self) -> int:
        """Forget unused L1 pages; return the number of dropped blocks."""
        return await self._node.drop_cache()

    async def prefetch(self, request: GenerateRequest) -> int:
        """Bring known blocks of a prompt into L1; return the number of prompt tokens in L1."""
        if self._closed:
            raise TransportError("this client of the compute node is closed")
        return await self._node.prefetch(request)

    async def close(self) -> None:
        """Refuse further requests; the creator of the node closes the node."""
        self._closed = True

"""A compute node as the scheduler sees it: one Protocol, reached in process or over gRPC.

Importing this file imports neither torch nor gRPC: a front without torch can talk to nodes with
torch, and a process with all roles in it never connects. ``tierkv sql`` and tests use
``LocalComputeClient``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from tierkv.kvcore.block import Erased
from tierkv.kvcore.errors import TransportError
from tierkv.kvcore.ids import BlockKey, RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest, PromptBlocks
from tierkv.kvwire.credentials import ClusterToken, TlsFiles

if TYPE_CHECKING:
    from tierkv.compute.node import ComputeNode  # Imports torch.


class ComputeClient(Protocol):
    """Access to a compute node.

    1. ``generate`` yields at least one event. Only the last event has a finish_reason and a usage.
       Closing the iterator early cancels the request within a step.
    2. ``generate`` raises UserError for a request that can't work, OverloadedError when the queue
       is full, and TransportError when the node is lost, whatever was already yielded.
    3. ``cancel`` returns False when the request is unknown.
    4. ``prefetch`` brings full blocks of a prompt from the pool into L1, as far as there is room to
       spare, and returns the number of prompt tokens in L1 afterwards; a request may or may not
       follow. Unavailable blocks count as 0 tokens, but a lost node is a TransportError.
    5. A request that ``reads_out`` yields one event: no tokens, STOP, and either ``scores`` in the
       order of ``score_token_ids`` or an ``embedding`` of unit length. The request is never handed
       over. If the model's ``score_refusal`` or ``embed_refusal`` gives a reason, the request is a
       UserError.
    6. ``find_prompt`` waits for running saves, and then names the blocks of a prompt.
    7. ``erase`` removes blocks and overwrites the bytes: from L1 with all following blocks, or
       (``pool``) from all connected pool nodes, with the names of these nodes in the result.
       TransportError: copies may be left. FeatureNotSupportedError: the cache is another engine's.
    """

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...

    async def cancel(self, request_id: RequestId) -> bool: ...

    async def describe(self) -> tuple[NodeInfo, NodeReport]: ...

    async def drop_cache(self) -> int: ...

    async def prefetch(self, request: GenerateRequest) -> int: ...

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks: ...

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]: ...

    async def close(self) -> None: ...


def check_guide(guide: str) -> None:
    """Refuse a JSON Schema or grammar that no answer can follow; runs no model, needs no node.

    Raises:
        UdfArgumentError: the guide is no JSON object and no grammar, or uses an unsupported
            feature, which the message names.
        FeatureNotSupportedError: the compiler is not installed here; a node may have it.
    """
    # Lazy: the compiler is heavy, and most callers never need it.
    from tierkv.compute.engine.guides import check_guide as check

    check(guide)


def connect_compute(
    address: str, *, token: ClusterToken | None = None, tls: TlsFiles | None = None
) -> ComputeClient:
    """Return a client of the compute node at ``host:port``; the first RPC connects.

    Call this function inside the event loop that will use the client.
    """
    # gRPC is heavy and optional: see the head of this file.
    from tierkv.compute.grpc_client import GrpcComputeClient

    return GrpcComputeClient(address, token=token, tls=tls)


class LocalComputeClient:
    """ComputeClient over a node in this process; the creator of the node starts and stops it."""

    def __init__(self, node: ComputeNode) -> None:
        self._node = node
        self._closed = False
        self.cancel = node.cancel
        self.drop_cache = node.drop_cache
        self.find_prompt = node.find_prompt
        self.erase = node.erase

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Answer a request with a stream of events."""
        if self._closed:
            raise TransportError("this client of the compute node is closed")
        async with aclosing(self._node.generate(request)) as events:
            async for event in events:
                yield event

    async def describe(self) -> tuple[NodeInfo, NodeReport]:
        """Return registration and current report."""
        return self._node.info(), self._node.report()

    async def prefetch(self, request: GenerateRequest) -> int:
        """Bring known blocks of a prompt into L1; return the number of prompt tokens in L1."""
        if self._closed:
            raise TransportError("this client of the compute node is closed")
        return await self._node.prefetch(request)

    async def close(self) -> None:
        """Refuse further requests."""
        self._closed = True

"""A compute node as the scheduler sees it: one Protocol, reached in process or over gRPC.

Importing this file never imports torch, so that a front without torch can talk to nodes that
have it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest


class ComputeClient(Protocol):
    """A compute node's door.

    1. ``generate`` yields at least one event; the last one, and only it, has a finish_reason and a
       usage. Closing the iterator early cancels the request within a step.
    2. It raises UserError for a request that can't work, OverloadedError when the queue is full,
       and TransportError when the node is lost, whatever was already yielded.
    3. ``cancel`` returns False when no such request is known.
    4. ``prefetch`` brings full blocks of a prompt that the pool holds into L1, as far as there is
       room to spare, and answers how many of its tokens L1 then holds; a request may follow it or
       not. What can't be had is 0 tokens, but a lost node is a TransportError.
    5. A request that ``reads_out`` yields one event: no tokens, STOP, and ``scores`` in the order
       of ``score_token_ids``, or an ``embedding`` of unit length. It is never handed over.
    """

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...

    async def cancel(self, request_id: RequestId) -> bool: ...

    async def describe(self) -> tuple[NodeInfo, NodeReport]: ...

    async def drop_cache(self) -> int: ...

    async def prefetch(self, request: GenerateRequest) -> int: ...

    async def close(self) -> None: ...


def check_json_schema(schema: str) -> None:
    """Refuse a JSON Schema that no answer can be held to; runs no model, needs no node.

    Raises:
        UdfArgumentError: it is no JSON object, or uses what is not supported, which is named.
        FeatureNotSupportedError: the schema compiler is not installed here; a node may have it.
    """
    # Lazy: the schema compiler is heavy, and most callers never ask.
    from tierkv.compute.engine.guides import check_schema

    check_schema(schema)

"""A compute node as the scheduler sees it: one Protocol, reached in process or over gRPC.

Importing this file never imports torch, so a front without torch can talk to nodes with torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest


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
       over.
    """

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...

    async def cancel(self, request_id: RequestId) -> bool: ...

    async def describe(self) -> tuple[NodeInfo, NodeReport]: ...

    async def drop_cache(self) -> int: ...

    async def prefetch(self, request: GenerateRequest) -> int: ...

    async def close(self) -> None: ...


def check_json_schema(schema: str) -> None:
    """Refuse a JSON Schema that no answer can follow; runs no model, needs no node.

    Raises:
        UdfArgumentError: the schema is not a JSON object, or uses an unsupported feature, which the
            message names.
        FeatureNotSupportedError: the schema compiler is not installed here; a node may have it.
    """
    # Lazy: the schema compiler is heavy, and most callers never need it.
    from tierkv.compute.engine.guides import check_schema

    check_schema(schema)

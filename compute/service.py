"""The gRPC service of a compute node: messages in, node calls, messages out.

```
front (compute/grpc_client.py)                    node
generate()  -- request 7 --+                      +-- task of call 7 -- node.generate()
generate()  -- request 8 --+-- CallPack --------->+-- task of call 8 -- node.generate()
closed      -- cancel 3  --+                      +   task of call 3 is cancelled

queue of 7  <-- event 7 ---+                      +-- event 7
queue of 8  <-- event 8 ---+<-------- EventPack --+-- events 8 and 8, joined
```

One stream holds all calls of a front (``Exchange``). A gRPC message per call and per token takes
more time than the front's other work for a call, so a pack holds everything since the last write.
While HTTP/2 holds a write back, the next pack grows: new tokens join the unsent event of their
call, so a pack has about a frame per call. The error of a call is a frame, typed as everywhere
(kvwire/status.py). The error of the stream ends all its calls with a TransportError, and the
scheduler sends the requests again. ``Generate`` has a stream per call, for fronts of versions
without ``Exchange``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import grpc.aio

from tierkv.kvcore.block import Erased
from tierkv.kvcore.errors import TierKVError, TransportError
from tierkv.kvcore.ids import BlockKey, RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest, PromptBlocks
from tierkv.kvwire.channels import BoundServer, bind_server
from tierkv.kvwire.checksums import intact
from tierkv.kvwire.codec import split_keys
from tierkv.kvwire.convert_compute import (
    ERASED,
    describe_reply_to_proto,
    generate_event_to_proto,
    generate_request_from_proto,
    prompt_blocks_to_proto,
)
from tierkv.kvwire.credentials import ClusterToken, TlsFiles
from tierkv.kvwire.status import answering, error_to_proto
from tierkv.kvwire.v1 import compute_pb2 as pb
from tierkv.kvwire.v1 import compute_pb2_grpc

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class ServedNode(Protocol):
    """Interface of a served node: our own (compute/node.py), or another engine's.

    ``generate``, ``cancel``, ``drop_cache``, ``prefetch``, ``find_prompt`` and ``erase`` keep the
    sentences of tierkv.compute.client.ComputeClient; ``info`` and ``report`` are quick and never
    fail.
    """

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]: ...

    async def cancel(self, request_id: RequestId) -> bool: ...

    def info(self) -> NodeInfo: ...

    def report(self) -> NodeReport: ...

    async def drop_cache(self) -> int: ...

    async def prefetch(self, request: GenerateRequest) -> int: ...

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks: ...

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]: ...

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

    async def Exchange(
        self, packs: AsyncIterator[pb.CallPack], context: _Context
    ) -> AsyncIterator[pb.EventPack]:
        """Answer all calls of one front."""
        async with answering(context), aclosing(serve_calls(self._node, packs)) as answers:
            async for pack in answers:
                yield pack

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

    async def FindPrompt(self, request: pb.GenerateRequest, context: _Context) -> pb.PromptBlocks:
        """Name the known blocks of a prompt."""
        async with answering(context):
            asked = generate_request_from_proto(request)
            return prompt_blocks_to_proto(await self._node.find_prompt(asked))

    async def Erase(self, request: pb.EraseRequest, context: _Context) -> pb.EraseReply:
        """Remove blocks."""
        async with answering(context):
            keys = split_keys(request.keys, "erase.keys")
            erased, nodes = await self._node.erase(keys, pool=request.pool)
            return pb.EraseReply(erased=ERASED.to_proto(erased), pool_nodes=nodes)


async def serve_calls(
    node: ServedNode, packs: AsyncIterator[pb.CallPack | None]
) -> AsyncGenerator[pb.EventPack, None]:
    """Answer the calls of one stream until the front closes the stream; then cancel the rest.

    Raises:
        TransportError: a pack was damaged in transit, so its calls are unknown.
    """
    calls = _ServedCalls(node)
    reader = asyncio.create_task(calls.read(packs))
    try:
        async for pack in calls.answers():
            yield pack
    finally:
        reader.cancel()
        await asyncio.wait([reader])
        await calls.cancel_all()


class _ServedCalls:
    """The node's end: a task per call, and the frames not yet written."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: list[pb.EventFrame] = []
        self._growing: dict[int, pb.EventFrame] = {}
        self._filled = asyncio.Event()
        self._closed = False
        self._failure: TierKVError | None = None

    async def read(self, packs: AsyncIterator[pb.CallPack | None]) -> None:
        """Begin and cancel calls as the front says, until the front closes the stream."""
        try:
            async for pack in packs:
                for frame in intact(pack).frames:
                    self._obey(frame)
        except TierKVError as error:
            self._failure = error
        finally:
            self._closed = True
            self._filled.set()

    def _obey(self, frame: pb.CallFrame) -> None:
        number = frame.call
        if frame.HasField("request"):
            task = asyncio.create_task(self._answer(number, frame.request))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, request: pb.GenerateRequest) -> None:
        try:
            asked = generate_request_from_proto(request)
            async with aclosing(self._node.generate(asked)) as events:
                async for event in events:
                    self._add(number, event)
        except TierKVError as error:
            self._fail(number, error)
        except Exception:  # noqa: BLE001 - gRPC does the same around a handler.
            _log.exception("request %s failed at this node", request.request_id)
            self._fail(number, TransportError("the compute node failed to answer the request"))

    def _add(self, number: int, event: GenerateEvent) -> None:
        """Add an event to the next pack; its tokens join those of the call's unsent event."""
        message = generate_event_to_proto(event)
        growing = self._growing.get(number)
        if growing is not None and not event.published_tokens:
            message.token_ids[:] = [*growing.event.token_ids, *event.token_ids]
            if growing.event.logprobs:
                one_each = [*growing.event.logprobs, *message.logprobs]
                del message.logprobs[:]
                message.logprobs.extend(one_each)
            growing.event.CopyFrom(message)
            return
        frame = pb.EventFrame(call=number, event=message)
        if event.token_ids:
            self._growing[number] = frame
        self._unsent.append(frame)
        self._filled.set()

    def _fail(self, number: int, error: TierKVError) -> None:
        self._unsent.append(pb.EventFrame(call=number, error=error_to_proto(error)))
        self._filled.set()

    async def answers(self) -> AsyncIterator[pb.EventPack]:
        """Yield what has come since the last pack; end when the front has closed the stream."""
        while not self._closed:
            await self._filled.wait()
            self._filled.clear()
            frames, self._unsent = self._unsent, []
            self._growing.clear()
            if frames:
                yield pb.EventPack(frames=frames)
        if self._failure is not None:
            raise self._failure

    async def cancel_all(self) -> None:
        """Cancel every call and wait until its request has left the node."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve_node(
    node: ServedNode,
    address: str,
    *,
    token: ClusterToken | None = None,
    tls: TlsFiles | None = None,
    setting: str = "compute.address",
) -> BoundServer:
    """Bind, start serving a node, and tell the node its address. The caller stops the server.

    Raises:
        ConfigError: the address can't be bound, or is public without a token.
    """
    bound = bind_server(address, token=token, tls=tls, setting=setting)
    compute_pb2_grpc.add_ComputeServicer_to_server(ComputeServicer(node), bound.server)
    await bound.server.start()
    node.set_control_address(bound.address)
    return bound

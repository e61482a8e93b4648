"""A compute node on the other end of a gRPC channel, behind the ComputeClient Protocol.

Used by the scheduler. All calls of this process at the node share one stream (the picture is at the
head of compute/service.py). A lost node is a TransportError even after events were streamed; typed
errors of the node arrive unchanged. Never imports torch.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc
import grpc.aio

from tierkv.kvcore.block import Erased
from tierkv.kvcore.errors import AuthenticationError, NodeRefusedError, TierKVError, TransportError
from tierkv.kvcore.ids import BlockKey, RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest, PromptBlocks
from tierkv.kvwire.channels import PeerChannel, call_metadata
from tierkv.kvwire.checksums import checked, intact
from tierkv.kvwire.convert_compute import (
    ERASED,
    describe_reply_from_proto,
    generate_event_from_proto,
    generate_request_to_proto,
    prompt_blocks_from_proto,
)
from tierkv.kvwire.credentials import ClusterToken, TlsFiles
from tierkv.kvwire.status import error_from_proto, error_from_rpc
from tierkv.kvwire.v1 import compute_pb2 as pb
from tierkv.kvwire.v1 import compute_pb2_grpc

_CONTROL_TIMEOUT_S = 5.0
_PREFETCH_TIMEOUT_S = 30.0
_ERASE_TIMEOUT_S = 180.0
"""The node waits for its saves, for transfers of the pool, and for disks and archives."""


_PACK_TOKENS = 1 << 20
"""A pack with this many prompt tokens is full. A token takes at most 5 bytes of a message's 64 MiB.
"""


class CallStreamMissing(Exception):
    """The node runs a version without this stream; nothing was asked of the node.

    Attributes:
        certain: the node said so. False: the stream broke before its first answer, as it may when
            the node's refusal crosses our first message.
    """

    def __init__(self, *, certain: bool = True) -> None:
        super().__init__("the compute node has no stream for all calls")
        self.certain = certain

    def __copy__(self) -> CallStreamMissing:
        return CallStreamMissing(certain=self.certain)


AskAlone = Callable[[GenerateRequest, CallStreamMissing], AsyncGenerator[GenerateEvent, None]]
"""Asks with an RPC for this request alone."""


class CallStream:
    """The front's end; all methods run in one event loop.

    The first call opens the stream. After a failure the next call opens another stream.
    """

    def __init__(
        self,
        open_stream: Callable[[], Any],
        *,
        translated: Callable[[grpc.aio.AioRpcError], TierKVError],
    ) -> None:
        """Open nothing yet.

        Args:
            open_stream: begins the RPC; returns a grpc.aio.StreamStreamCall.
            translated: returns the typed error of a failed stream.
        """
        self._open_stream = open_stream
        self._translated = translated
        self._opened: _OpenStream | None = None

    async def generate(
        self, request: GenerateRequest, *, otherwise: AskAlone | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Answer a request with a stream of events; closing the generator cancels the call.

        Args:
            request: the request.
            otherwise: asks a node that has no such stream.

        Raises:
            CallStreamMissing: the node has no such stream, and ``otherwise`` is not given.
            TransportError: the stream was lost.
            TierKVError: the error of the node for this request.
        """
        if self._opened is None or self._opened.failure is not None:
            self._opened = _OpenStream(self._open_stream(), self._translated)
        stream = self._opened
        number, events = stream.begin(generate_request_to_proto(request))
        ended = False
        try:
            while not ended:
                received = await events.get()
                if isinstance(received, Exception):
                    ended = True
                    raise received
                event = generate_event_from_proto(received)
                ended = event.finish_reason is not None
                yield event
            return
        except CallStreamMissing as missing:
            if otherwise is None:
                raise
            events_alone = otherwise(request, missing)
        finally:
            stream.end(number, cancel=not ended)
        async with aclosing(events_alone) as alone:
            async for event in alone:
                yield event

    async def close(self) -> None:
        """End the stream; its calls end with TransportError."""
        if self._opened is not None:
            await self._opened.close()


_Received = asyncio.Queue[pb.GenerateEvent | Exception]
"""Unread events of one call, at most as many as the answer has tokens."""


class _OpenStream:
    """One RPC with its open calls.

    Attributes:
        failure: why the stream ended; None while the stream is open.
    """

    def __init__(
        self, call: Any, translated: Callable[[grpc.aio.AioRpcError], TierKVError]
    ) -> None:
        self.failure: Exception | None = None
        self._call = call
        self._translated = translated
        self._numbers = itertools.count(1)
        self._received: dict[int, _Received] = {}
        self._unsent: list[pb.CallFrame] = []
        self._filled = asyncio.Event()
        self._answered = False
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def begin(self, request: pb.GenerateRequest) -> tuple[int, _Received]:
        """Send a request with the next pack; return the number of the call and its events."""
        number = next(self._numbers)
        received = self._received[number] = asyncio.Queue()
        self._send(pb.CallFrame(call=number, request=request))
        return number, received

    def end(self, number: int, *, cancel: bool) -> None:
        """Forget a call, and cancel the call at the node."""
        self._received.pop(number, None)
        if cancel and self.failure is None:
            self._send(pb.CallFrame(call=number, cancel=True))

    def _send(self, frame: pb.CallFrame) -> None:
        self._unsent.append(frame)
        self._filled.set()  # The writer runs after everything that is ready in this loop turn.

    async def _write(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # The reader tells why.
            while True:
                await self._filled.wait()
                self._filled.clear()
                frames, self._unsent = self._unsent, []
                for pack in _packs(frames):
                    await self._call.write(pack)

    async def _read(self) -> None:
        failure: Exception = TransportError("the compute node ended the stream of calls")
        try:
            async for pack in self._call:
                self._answered = True
                for frame in intact(pack).frames:
                    self._deliver(frame)
        except grpc.aio.AioRpcError as error:
            refused = error.code() is grpc.StatusCode.UNIMPLEMENTED
            crossed = error.code() is grpc.StatusCode.INTERNAL and not self._answered
            missing = refused or crossed
            failure = CallStreamMissing(certain=refused) if missing else self._translated(error)
        except TierKVError as error:
            failure = error
        except asyncio.CancelledError:
            failure = TransportError("the channel to the compute node was closed")
        finally:
            self.failure = failure
            self._writer.cancel()
            self._call.cancel()
            for received in self._received.values():
                received.put_nowait(copy.copy(failure))  # A raised error keeps its traceback.

    def _deliver(self, frame: pb.EventFrame) -> None:
        received = self._received.get(frame.call)
        if received is None:
            return  # The reader has left.
        if frame.HasField("error"):
            received.put_nowait(error_from_proto(frame.error, default=TransportError))
        else:
            received.put_nowait(frame.event)

    async def close(self) -> None:
        """End the stream and wait for its tasks."""
        self._reader.cancel()
        await asyncio.wait([self._reader, self._writer])


def _packs(frames: Sequence[pb.CallFrame]) -> Iterator[pb.CallPack]:
    """Split frames into packs far below the limit of a message."""
    pack, tokens = pb.CallPack(), 0
    for frame in frames:
        tokens += len(frame.request.token_ids)
        if pack.frames and tokens > _PACK_TOKENS:
            yield pack
            pack, tokens = pb.CallPack(), len(frame.request.token_ids)
        pack.frames.append(frame)
    yield pack


class GrpcComputeClient:
    """ComputeClient over one channel; create the client inside the event loop of its calls."""

    def __init__(
        self, address: str, *, token: ClusterToken | None = None, tls: TlsFiles | None = None
    ) -> None:
        self._address = address
        self._peer = PeerChannel(address, token=token, tls=tls)
        self._channel = self._peer.current()
        self._made = compute_pb2_grpc.ComputeStub(checked(self._channel))
        self._closed = False
        self._calls: CallStream | None = CallStream(
            lambda: self._stub.Exchange(metadata=call_metadata(token)), translated=self._translated
        )

    @property
    def _stub(self) -> compute_pb2_grpc.ComputeAsyncStub:
        channel = self._peer.current()
        if channel is not self._channel:
            self._channel = channel
            self._made = compute_pb2_grpc.ComputeStub(checked(channel))
        return self._made

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Answer a request with a stream of events; closing the stream cancels the request."""
        if self._closed:
            raise TransportError("this client of the compute node is closed")
        if self._calls is None:
            return self._generate_alone(request)
        return self._calls.generate(request, otherwise=self._generate_alone)

    async def _generate_alone(
        self, request: GenerateRequest, missing: CallStreamMissing | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Ask a node of a version without a stream for all calls."""
        if missing is not None and missing.certain:
            self._calls = None
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

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks:
        """Name the known blocks of a prompt."""
        try:
            reply = await self._stub.FindPrompt(
                generate_request_to_proto(request), timeout=_ERASE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        return prompt_blocks_from_proto(intact(reply))

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]:
        """Remove blocks from L1, or from the node's pool nodes, which are returned too."""
        message = pb.EraseRequest(keys=b"".join(keys), pool=pool)
        try:
            reply = intact(await self._stub.Erase(message, timeout=_ERASE_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        return ERASED.from_proto(reply.erased), tuple(reply.pool_nodes)

    def _translated(self, error: grpc.aio.AioRpcError) -> TierKVError:
        """Return the typed error.

        A refused token is the cluster's token, not the password of a user.
        """
        typed = error_from_rpc(error, default=TransportError)
        if isinstance(typed, AuthenticationError):
            return NodeRefusedError(
                f"the compute node at {self._address} refused our cluster token",
                hint="Operators set the same cluster.token on all nodes.",
            )
        return typed

    async def close(self) -> None:
        """Close the channel; open streams end with TransportError."""
        self._closed = True
        if self._calls is not None:
            await self._calls.close()
        await self._channel.close(None)

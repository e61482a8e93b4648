"""A MetaClient over gRPC, for a meta server in another process.

Locates go over a stream (metaserver/rpc/locate_stream.py) where the server offers one. Every
failure of the server or of the connection becomes DirectoryUnavailableError, which means "no hits".
Only errors that the caller must act on (UserError, StaleEpochError) are raised unchanged.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc.aio

from tierkv.kvcore.block_event import EventBatch, HoldOrder, LeaseId
from tierkv.kvcore.errors import (
    AuthenticationError,
    DirectoryUnavailableError,
    LocalProtocolError,
    RemoteProtocolError,
    StaleEpochError,
    TierKVError,
    UserError,
)
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvwire import convert
from tierkv.kvwire.channels import PeerChannel
from tierkv.kvwire.checksums import checked, intact
from tierkv.kvwire.codec import split_keys
from tierkv.kvwire.credentials import ClusterToken, TlsFiles
from tierkv.kvwire.event_records import pack_events
from tierkv.kvwire.status import error_from_rpc
from tierkv.kvwire.v1 import meta_pb2 as pb
from tierkv.kvwire.v1 import meta_pb2_grpc as rpc
from tierkv.metaserver.client import (
    MAX_LISTED_REPLICAS,
    BlockListing,
    ClusterRecord,
    DirectoryNode,
    HeartbeatReply,
    LocateReply,
    Namespace,
    NamespaceGrant,
    Registration,
    ReportReply,
)
from tierkv.metaserver.directory.locate_reply import chain_of, checked_question
from tierkv.metaserver.rpc import wire
from tierkv.metaserver.rpc.locate_stream import LocateFrame, LocateStream

_Value = TypeVar("_Value")
_Located = TypeVar("_Located", pb.LocateReply, pb.LocateManyReply)


class GrpcRecords(ABC):
    """The durable records of a meta server: namespaces, rights, limits, keys, pins, audit log."""

    @abstractmethod
    async def _call(
        self, method: str, request: Any, convert_reply: Callable[[Any], _Value]
    ) -> _Value: ...

    async def list_namespaces(self) -> tuple[Namespace, ...]:
        return await self._call(
            "ListNamespaces",
            pb.ListNamespacesRequest(),
            lambda reply: tuple(map(wire.NAMESPACE.from_proto, reply.namespaces)),
        )

    async def put_namespace(self, namespace: Namespace) -> Namespace:
        request = wire.NAMESPACE.to_proto(namespace)
        return await self._call("PutNamespace", request, wire.NAMESPACE.from_proto)

    async def drop_namespace(self, name: str) -> bool:
        request = pb.DropNamespaceRequest(name=name)
        return await self._call("DropNamespace", request, lambda reply: bool(reply.existed))

    async def list_records(self, kind: str) -> tuple[ClusterRecord, ...]:
        return await self._call(
            "ListRecords",
            pb.ListRecordsRequest(kind=kind),
            lambda reply: tuple(map(wire.RECORD.from_proto, reply.records)),
        )

    async def put_record(self, record: ClusterRecord) -> bool:
        request = wire.RECORD.to_proto(record)
        return await self._call("PutRecord", request, lambda reply: bool(reply.existed))


class GrpcMeta(GrpcRecords):
    """A meta server at an address; implements MetaClient.

    Attributes:
        _home: home of the registering node.
        _stream: the stream of locates; None for a client that only uses gRPC.
        _channel: made at the first call, inside the call's event loop; None before.
    """

    def __init__(
        self,
        address: str,
        *,
        token: ClusterToken | None = None,
        tls: TlsFiles | None = None,
        home: str = "",
        timeout_s: float = 2.0,
        use_stream: bool = True,
    ) -> None:
        self._address = address
        self._home = home
        self._timeout_s = timeout_s
        self._peer = PeerChannel(address, token=token, tls=tls)
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._stream = LocateStream(address, token=token, tls=tls) if use_stream else None
        self._closed = False

    async def register(self, info: NodeInfo) -> Registration:
        request = pb.RegisterRequest(info=convert.NODE_INFO.to_proto(info), home=self._home)
        return await self._call(
            "Register",
            request,
            lambda reply: Registration(reply.heartbeat_interval_s, reply.send_inventory),
        )

    async def heartbeat(
        self, node_id: NodeId, incarnation: Incarnation, report: NodeReport
    ) -> HeartbeatReply:
        request = pb.HeartbeatRequest(
            node_id=node_id,
            incarnation=incarnation,
            report=convert.NODE_REPORT.to_proto(report),
        )
        return await self._call(
            "Heartbeat",
            request,
            lambda reply: HeartbeatReply(
                reply.known, reply.send_inventory, reply.pool_version, reply.namespaces_version
            ),
        )

    async def deregister(self, node_id: NodeId, incarnation: Incarnation) -> None:
        request = pb.DeregisterRequest(node_id=node_id, incarnation=incarnation)
        await self._call("Deregister", request, lambda reply: None)

    async def report_events(self, batch: EventBatch) -> ReportReply:
        return await self._call(
            "ReportEvents",
            convert.event_records_to_proto(pack_events(batch)),
            lambda reply: ReportReply(reply.accepted, reply.send_inventory),
        )

    async def locate(
        self,
        keys: Sequence[BlockKey],
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        reserve_s: float = 0.0,
    ) -> LocateReply:
        if max_replicas < 0:
            raise LocalProtocolError(f"max_replicas can't be negative, got {max_replicas}")
        chain = chain_of(keys)
        request = pb.LocateRequest(
            keys=chain,
            reader=reader or "",
            max_replicas=max_replicas,
            reserve_s=reserve_s,
        )
        reply = await self._locate(LocateFrame.LOCATE, "Locate", request, pb.LocateReply)
        with self._translating("Locate"):
            return wire.locate_reply_from_proto(reply, chain)

    async def locate_many(
        self, chains: Sequence[Sequence[BlockKey]], *, reserve_s: float = 0.0
    ) -> list[LocateReply]:
        asked = checked_question(map(chain_of, chains))
        request = pb.LocateManyRequest(chains=asked, reserve_s=reserve_s)
        reply = await self._locate(
            LocateFrame.LOCATE_MANY, "LocateMany", request, pb.LocateManyReply
        )
        with self._translating("LocateMany"):
            return wire.locate_replies_from_proto(reply, asked)

    async def open_stream(self) -> bool:
        """Ask where the stream of locates is and wait for it; return whether it is open.

        Locates open the stream in the background too; this is for callers that need it at once.

        Raises:
            DirectoryUnavailableError: as every method.
        """
        await self.locate((), max_replicas=0)
        return self._stream is not None and await self._stream.settled()

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool:
        request = pb.ExtendLeaseRequest(lease=lease, ttl_s=ttl_s)
        return await self._call("ExtendLease", request, lambda reply: bool(reply.known))

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        request = pb.EndLeaseRequest(lease=lease, used=used)
        return await self._call("EndLease", request, lambda reply: bool(reply.known))

    async def holds(
        self, node_id: NodeId, incarnation: Incarnation
    ) -> AsyncGenerator[HoldOrder, None]:
        request = pb.HoldsRequest(node_id=node_id, incarnation=incarnation)
        stream = self._method("Holds")(request)
        try:
            while True:
                with self._translating("Holds"):
                    message = await stream.read()
                    if message is grpc.aio.EOF:
                        return
                    whole = intact(message, lost=DirectoryUnavailableError)
                    order = wire.hold_order_from_proto(whole)
                yield order
        finally:
            stream.cancel()

    async def resolve_namespace(
        self, tenant: str, *, model_revision: str, layout_fingerprint: bytes, model: str = ""
    ) -> NamespaceGrant:
        request = pb.ResolveNamespaceRequest(
            tenant=tenant,
            model_revision=model_revision,
            layout_fingerprint=layout_fingerprint,
            model=model,
        )
        return await self._call("ResolveNamespace", request, wire.GRANT.from_proto)

    async def list_nodes(self) -> tuple[DirectoryNode, ...]:
        return await self._call(
            "ListNodes",
            pb.ListNodesRequest(),
            lambda reply: tuple(map(wire.NODE_STATE.from_proto, reply.nodes)),
        )

    async def list_blocks(self, limit: int) -> BlockListing:
        if limit < 0:
            raise UserError(f"the limit of a block listing can't be negative, got {limit}")
        request = pb.ListBlocksRequest(limit=min(limit, (1 << 32) - 1))
        return await self._call("ListBlocks", request, wire.listing_from_proto)

    async def blocks_after(self, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockKey]:
        request = pb.BlocksAfterRequest(keys=b"".join(keys))
        return await self._call(
            "BlocksAfter",
            request,
            lambda reply: dict(
                zip(
                    split_keys(reply.keys, "blocks_after.keys"),
                    split_keys(reply.parents, "blocks_after.parents"),
                    strict=False,
                )
            ),
        )

    async def directory_counts(self) -> tuple[tuple[str, int], ...]:
        return await self._call(
            "DirectoryCounts",
            pb.DirectoryCountsRequest(),
            lambda reply: tuple(zip(reply.names, reply.counts, strict=False)),
        )

    async def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            await self._stream.close()
        if self._channel is not None:
            channel, self._channel, self._stub = self._channel, None, None
            await channel.close(None)

    async def _locate(
        self, frame: LocateFrame, method: str, request: Any, reply_kind: type[_Located]
    ) -> _Located:
        """Ask over the stream, or else over gRPC."""
        if self._stream is not None:
            answer = await self._stream.ask(frame, request, reply_kind)
            if answer is not None:
                return answer
        reply: _Located = await self._call(method, request, lambda message: message)
        if self._stream is not None:
            self._stream.offered(reply.stream)
        return reply

    async def _call(
        self, method: str, request: Any, convert_reply: Callable[[Any], _Value]
    ) -> _Value:
        with self._translating(method):
            reply = await self._method(method)(request, timeout=self._timeout_s)
            return convert_reply(intact(reply, lost=DirectoryUnavailableError))
        raise AssertionError("the block above returns or raises")

    @contextmanager
    def _translating(self, method: str) -> Iterator[None]:
        """Turn every failure of an RPC into the error named by the contract."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._translated(method, error) from error
        except RemoteProtocolError as error:
            raise DirectoryUnavailableError(
                f"the meta server at {self._address} answered nonsense to {method}: {error}"
            ) from error
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise self._closed_error() from error
        except asyncio.CancelledError:
            # Closing a channel cancels its calls; only a cancellation of our own task goes on.
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise self._closed_error() from None
            raise

    def _method(self, name: str) -> Callable[..., Any]:
        if self._closed:
            raise self._closed_error()
        channel = self._peer.current()
        if channel is not self._channel:
            self._channel = channel
            self._stub = rpc.MetaStub(checked(channel))
        method: Callable[..., Any] = getattr(self._stub, name)
        return method

    def _closed_error(self) -> DirectoryUnavailableError:
        return DirectoryUnavailableError(f"the client of {self._address} is closed")

    def _translated(self, method: str, error: grpc.aio.AioRpcError) -> TierKVError:
        typed = error_from_rpc(error, default=DirectoryUnavailableError)
        if isinstance(typed, AuthenticationError):
            return DirectoryUnavailableError(
                f"the meta server at {self._address} refused our cluster token",
                hint="Set the same token on all nodes.",
            )
        if isinstance(typed, UserError | StaleEpochError):
            return typed
        return DirectoryUnavailableError(
            f"the meta server at {self._address} did not answer {method}: {typed.message}",
            detail=typed.detail,
            hint=typed.hint,
        )

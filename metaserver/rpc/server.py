"""The meta server on the network: the gRPC service, and binding, serving and stopping.

Made by the composition root (``tierkv serve meta``, ``tierkv up``); also answers the standard gRPC
health service, and locates over a stream (metaserver/rpc/locate_door.py). The service translates
calls to the LocalMeta of this process and back; it holds no state and decides nothing. Errors
become status codes in tierkv.kvwire.status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tierkv.kvcore.block_event import LeaseId
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.kvwire import convert
from tierkv.kvwire.channels import BoundServer, bind_server, split_address
from tierkv.kvwire.codec import checked_name, split_keys
from tierkv.kvwire.credentials import ServerTls
from tierkv.kvwire.status import answering
from tierkv.kvwire.v1 import meta_pb2 as pb
from tierkv.kvwire.v1 import meta_pb2_grpc as rpc
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.metaserver.rpc import wire
from tierkv.metaserver.rpc.locate_door import LocateDoor, answer_locate, answer_locate_many

_SERVICES = ("", "tierkv.v1.Meta")


class _MetaService(rpc.MetaServicer):
    """Serves ``meta``; one method per RPC of kvwire/v1/meta.proto."""

    def __init__(self, meta: LocalMeta, door: LocateDoor) -> None:
        self._meta = meta
        self._door = door

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterReply:
        async with answering(context):
            info = convert.NODE_INFO.from_proto(request.info)
            home = checked_name(request.home, "home") if request.home else ""
            reply = await self._meta.register(info, home=home)
            return pb.RegisterReply(
                heartbeat_interval_s=reply.heartbeat_interval_s,
                send_inventory=reply.send_inventory,
            )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        async with answering(context):
            reply = await self._meta.heartbeat(
                NodeId(request.node_id),
                Incarnation(request.incarnation),
                convert.NODE_REPORT.from_proto(request.report),
            )
            return pb.HeartbeatReply(
                known=reply.known,
                send_inventory=reply.send_inventory,
                pool_version=reply.pool_version,
                namespaces_version=reply.namespaces_version,
            )

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterReply:
        async with answering(context):
            await self._meta.deregister(NodeId(request.node_id), Incarnation(request.incarnation))
            return pb.DeregisterReply()

    async def ReportEvents(self, request: pb.EventBatch, context: Any) -> pb.ReportReply:
        async with answering(context):
            reply = await self._meta.report_events(convert.event_records_from_proto(request))
            return pb.ReportReply(accepted=reply.accepted, send_inventory=reply.send_inventory)

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateReply:
        async with answering(context):
            reply = answer_locate(self._meta, request)
            reply.stream.CopyFrom(self._door.offer)
            return reply

    async def LocateMany(self, request: pb.LocateManyRequest, context: Any) -> pb.LocateManyReply:
        async with answering(context):
            reply = answer_locate_many(self._meta, request)
            reply.stream.CopyFrom(self._door.offer)
            return reply

    async def ExtendLease(
        self, request: pb.ExtendLeaseRequest, context: Any
    ) -> pb.ExtendLeaseReply:
        async with answering(context):
            lease = LeaseId(request.lease)
            known = await self._meta.extend_lease(lease, ttl_s=request.ttl_s)
            return pb.ExtendLeaseReply(known=known)

    async def EndLease(self, request: pb.EndLeaseRequest, context: Any) -> pb.EndLeaseReply:
        async with answering(context):
            known = await self._meta.end_lease(LeaseId(request.lease), used=request.used)
            return pb.EndLeaseReply(known=known)

    async def Holds(self, request: pb.HoldsRequest, context: Any) -> AsyncIterator[pb.HoldOrder]:
        async with answering(context):
            node_id, incarnation = NodeId(request.node_id), Incarnation(request.incarnation)
            async for order in self._meta.holds(node_id, incarnation):
                yield wire.hold_order_to_proto(order)

    async def ResolveNamespace(
        self, request: pb.ResolveNamespaceRequest, context: Any
    ) -> pb.NamespaceGrant:
        async with answering(context):
            grant = await self._meta.resolve_namespace(
                request.tenant,
                model_revision=request.model_revision,
                layout_fingerprint=request.layout_fingerprint,
                model=request.model,
            )
            return wire.GRANT.to_proto(grant)

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesReply:
        async with answering(context):
            nodes = await self._meta.list_nodes()
            return pb.ListNodesReply(nodes=map(wire.NODE_STATE.to_proto, nodes))

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksReply:
        async with answering(context):
            return wire.listing_to_proto(await self._meta.list_blocks(request.limit))

    async def BlocksAfter(
        self, request: pb.BlocksAfterRequest, context: Any
    ) -> pb.BlocksAfterReply:
        async with answering(context):
            found = await self._meta.blocks_after(split_keys(request.keys, "blocks_after.keys"))
            return pb.BlocksAfterReply(keys=b"".join(found), parents=b"".join(found.values()))

    async def DirectoryCounts(
        self, request: pb.DirectoryCountsRequest, context: Any
    ) -> pb.DirectoryCountsReply:
        async with answering(context):
            counts = await self._meta.directory_counts()
            return pb.DirectoryCountsReply(
                names=[name for name, _ in counts], counts=[count for _, count in counts]
            )

    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: Any
    ) -> pb.ListNamespacesReply:
        async with answering(context):
            namespaces = await self._meta.list_namespaces()
            return pb.ListNamespacesReply(namespaces=map(wire.NAMESPACE.to_proto, namespaces))

    async def DropNamespace(
        self, request: pb.DropNamespaceRequest, context: Any
    ) -> pb.DropNamespaceReply:
        async with answering(context):
            return pb.DropNamespaceReply(existed=await self._meta.drop_namespace(request.name))

    async def ListRecords(
        self, request: pb.ListRecordsRequest, context: Any
    ) -> pb.ListRecordsReply:
        async with answering(context):
            records = await self._meta.list_records(request.kind)
            return pb.ListRecordsReply(records=map(wire.RECORD.to_proto, records))

    async def PutRecord(self, request: pb.Record, context: Any) -> pb.PutRecordReply:
        async with answering(context):
            existed = await self._meta.put_record(wire.RECORD.from_proto(request))
            return pb.PutRecordReply(existed=existed)

    async def PutNamespace(self, request: pb.Namespace, context: Any) -> pb.Namespace:
        async with answering(context):
            stored = await self._meta.put_namespace(wire.NAMESPACE.from_proto(request))
            return wire.NAMESPACE.to_proto(stored)


class MetaServer:
    """A meta server, with a port for gRPC and a port for the stream of locates.

    Attributes:
        local: the same server for callers in this process; None before ``start``.
    """

    def __init__(self, config: MetaConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock
        self._bound: BoundServer | None = None
        self._door: LocateDoor | None = None
        self._health = health.aio.HealthServicer()
        self.local: LocalMeta | None = None

    @property
    def address(self) -> str:
        """Return the ``host:port`` for clients; empty before ``start``."""
        return self._bound.address if self._bound else ""

    @property
    def stream(self) -> pb.StreamOffer | None:
        """Return where locates are taken in frames; None before ``start``, and without a stream."""
        return self._door.offer if self._door and self._door.offer.port else None

    async def start(self) -> str:
        """Open the database, bind and serve; return the address.

        Raises:
            ConfigError: port in use, public address without token, unusable database.
        """
        config = self._config
        local = LocalMeta(config, clock=self._clock)
        tls = None if config.tls is None else ServerTls(config.tls, setting="cluster")
        door = LocateDoor(local, token=config.token, tls=tls)
        try:
            bound = bind_server(
                config.address, token=config.token, tls=config.tls, setting="meta.address"
            )
        except ConfigError:
            await local.close()
            raise
        try:
            await door.start(split_address(config.address)[0], config.stream_port)
        except ConfigError:
            await bound.server.stop(None)
            await local.close()
            raise
        self.local, self._door = local, door
        rpc.add_MetaServicer_to_server(_MetaService(local, door), bound.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, bound.server)
        for service in _SERVICES:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await bound.server.start()
        self._bound = bound
        return bound.address

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """Let running calls end for ``grace_s``, then close; may be called twice."""
        if self._door is not None:
            await self._door.stop()
            self._door = None
        if self._bound is not None:
            await self._health.enter_graceful_shutdown()
            if self.local is not None:
                self.local.end_holds()
            await self._bound.server.stop(grace_s)
            self._bound = None
        if self.local is not None:
            await self.local.close()
            self.local = None

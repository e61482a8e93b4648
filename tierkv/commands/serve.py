"""``tierkv serve ROLE``: one part of a cluster as a process.

The process starts the part and reports the start with one JSON line on standard output. Logs go to
standard error, as JSON lines; records of the standard library use the same handler, with the bound
request id. The process ends on SIGTERM or SIGINT and, under ``tierkv up``, when standard input
closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from tierkv.config import LoadedConfig, name_list
from tierkv.dbfront.siblings import Siblings
from tierkv.dmp.config import DmpConfig
from tierkv.kvcore import limits
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId, ZoneId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.config import MetaConfig
from tierkv.parts.access import cluster_access, server_tls
from tierkv.parts.parts import DmpPart, announce, disk_tier, path_options
from tierkv.parts.served_models import compute_config, namespace_policy
from tierkv.processes.cluster_files import claim_home, segment_home, segment_prefix
from tierkv.processes.own_process import keep_files_private, raise_descriptor_limit
from tierkv.processes.start_order import await_cluster, import_role
from tierkv.processes.worker_group import WorkerGroup, siblings

log = structlog.get_logger(__name__)


async def serve_role(
    config: LoadedConfig,
    role: str,
    *,
    node_id: str = "",
    supervised: bool = False,
    worker: int | None = None,
) -> int:
    """Run one role until stopped; return the exit status.

    Args:
        config: the process's configuration.
        role: see ``tierkv serve``.
        node_id: the node's name; empty: the role and the machine.
        supervised: end when standard input closes.
        worker: number of this process among the workers of a front; None: no worker.

    Raises:
        ConfigError: a setting can't be used; the message names the setting and the cure.
    """
    settings = config.settings
    front = NodeId(node_id or f"{role}-{socket.gethostname()}")
    name = front if worker is None else NodeId(f"{front}.{worker}")
    _configure_logging(settings.cluster.log_level, node=name)
    raise_descriptor_limit()
    keep_files_private()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if supervised:
        loop.add_reader(sys.stdin.fileno(), _stop_at_end, stop)
    async with AsyncExitStack() as stack:
        if role == "front" and worker is None and settings.front.workers > 1:
            return await _serve_group(config, front, stop, stack)
        await asyncio.to_thread(import_role, settings, role)
        await await_cluster(settings.cluster, role, stop)
        if stop.is_set():
            return 0
        if worker is None:
            told = await _START[role](config, name, stack)
        else:
            others = siblings(settings, front, worker)
            told = await _start_front(config, name, stack, others)
        _tell_ready(name, told)
        await stop.wait()
    return 0


def _tell_ready(name: NodeId, told: dict[str, str]) -> None:
    told["pid"] = str(os.getpid())
    print(json.dumps({"event": "ready", "node": name, **told}), flush=True)


async def _serve_group(
    config: LoadedConfig, name: NodeId, stop: asyncio.Event, stack: AsyncExitStack
) -> int:
    """Run the workers of a front until stopped, also while they start."""
    group = WorkerGroup(config, name)
    stack.push_async_callback(group.stop)
    starting = asyncio.create_task(group.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            _tell_ready(name, starting.result())
            await stopping
    finally:
        starting.cancel()
        stopping.cancel()
    return 0


def run_on_loop(work: Coroutine[Any, Any, int], loop: str) -> int:
    """Run a coroutine to its end, as asyncio.run does.

    Args:
        work: the work of this process.
        loop: ``asyncio`` or ``uvloop``.

    Raises:
        ConfigError: uvloop is not installed.
    """
    factory = None
    if loop == "uvloop":
        try:
            import uvloop  # optional
        except ImportError:
            work.close()
            raise ConfigError(
                "front.event_loop = uvloop, but uvloop is not installed",
                hint="Run pip install 'tierkv[uvloop]', or leave front.event_loop at asyncio.",
            ) from None
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def _stop_at_end(stop: asyncio.Event) -> None:
    """Stop when the supervisor is gone: it never writes, so readable input means the end."""
    if not os.read(sys.stdin.fileno(), 1):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


async def _start_meta(config: LoadedConfig, name: NodeId, stack: AsyncExitStack) -> dict[str, str]:
    from tierkv.metaserver.rpc.server import MetaServer  # gRPC: only this role serves it

    settings = config.settings
    if not settings.meta.database and not settings.cluster.secret:
        log.warning(
            "cached blocks can't be found again after a restart of the meta server: set "
            "meta.database or cluster.secret"
        )
    access = cluster_access(settings.cluster)
    server = MetaServer(
        MetaConfig(
            address=f"{settings.meta.bind}:{settings.meta.port}",
            stream_port=settings.meta.stream_port,
            token=access.token,
            tls=access.tls,
            database=settings.meta.database or ":memory:",
            cluster_secret=settings.cluster.secret.encode() or None,
            default_policy=namespace_policy(settings.namespace),
        )
    )
    address = await server.start()
    stack.push_async_callback(server.stop)
    assert server.local is not None, "a started meta server has its local side"
    info = _info(config, name, NodeRole.META, address)
    namespaces = server.local.namespaces

    def report() -> NodeReport:
        trouble = namespaces.trouble[: limits.MAX_REASON_CHARS]
        return NodeReport(notes=(trouble,) if trouble else ())

    agent = await announce(server.local, info, report)
    stack.push_async_callback(agent.stop)
    return {"address": address}


async def _start_dmp(config: LoadedConfig, name: NodeId, stack: AsyncExitStack) -> dict[str, str]:
    settings = config.settings
    pool = DmpConfig(
        node_id=name,
        host=_host(config),
        zone=ZoneId(settings.cluster.zone),
        segment_path=str(_segment_path(config, name)),
        capacity_bytes=int(settings.dmp.capacity),
        ready_ahead_bytes=int(settings.dmp.ready_ahead),
        bind=settings.dmp.bind,
        port=settings.dmp.port,
        advertise_host=settings.cluster.advertise,
        token=cluster_access(settings.cluster).token or "",
        tls=server_tls(settings),
        rdma=settings.dmp.rdma,
        rdma_devices=name_list(settings.dmp.rdma_devices),
        owner_folder=_owner_folder(config),
        remove_on_stop=settings.dmp.remove_on_stop,
        demote_above=settings.dmp.demote_above,
        eviction_policy=settings.dmp.eviction_policy,
        lease_share=settings.dmp.lease_share,
        scrub_rate_bytes_per_s=int(settings.dmp.scrub_rate),
        drain_s=settings.dmp.drain_s,
        attach_wait_s=settings.dmp.attach_wait_s,
    )
    part = DmpPart(
        pool,
        _meta(config, name, stack, home=segment_home(pool.segment_file))
        if settings.cluster.meta_address
        else None,
        open_lower=disk_tier(settings.dmp, name, extent_bytes=pool.extent_bytes),
    )
    await part.start()
    stack.push_async_callback(part.stop)
    return {
        "address": part.address,
        "segment": str(part.node.config.segment_file),
        "next": f"tierkv pool stats {part.address}",
    }


def _segment_path(config: LoadedConfig, name: NodeId) -> Path:
    """Name the segment after the node and the cluster's run directory."""
    prefix = segment_prefix(config.settings.cluster.run_dir)
    return Path(config.settings.dmp.segment_dir) / f"{prefix}{name}.seg"


def _owner_folder(config: LoadedConfig) -> str:
    """Return the cluster's folder, the segment's owner; empty without a folder."""
    folder = config.settings.cluster.run_dir.expanduser().resolve()
    return str(folder) if folder.is_dir() else ""


async def _start_compute(
    config: LoadedConfig, name: NodeId, stack: AsyncExitStack, role: NodeRole = NodeRole.COMPUTE
) -> dict[str, str]:
    if config.settings.engine.kind:
        return await _start_engine(config, name, stack, role)
    from tierkv.parts.compute_part import make_compute_part  # torch: only this role

    settings = config.settings
    wanted = replace(
        compute_config(settings.compute, node_id=name, host=_host(config), role=role),
        zone=ZoneId(settings.cluster.zone),
    )
    part = await make_compute_part(wanted, _meta(config, name, stack))
    await part.start(
        listen=f"{settings.compute.bind}:{settings.compute.port}",
        advertise=settings.cluster.advertise,
        access=cluster_access(settings.cluster),
        paths=path_options(settings),
    )
    stack.push_async_callback(part.stop)
    return {"address": part.address, "model": part.node.model.name}


async def _start_engine(
    config: LoadedConfig, name: NodeId, stack: AsyncExitStack, role: NodeRole
) -> dict[str, str]:
    from tierkv.parts.engine_part import (  # HTTP client: only with an engine
        EnginePart,
        engine_config,
    )

    settings = config.settings
    wanted = replace(
        engine_config(settings.engine, node_id=name, host=_host(config), role=role),
        zone=ZoneId(settings.cluster.zone),
    )
    part = EnginePart(wanted, settings.engine, _meta(config, name, stack))
    stack.push_async_callback(part.stop)
    await part.start(
        listen=f"{settings.compute.bind}:{settings.compute.port}",
        advertise=settings.cluster.advertise,
        access=cluster_access(settings.cluster),
    )
    return {"address": part.address, "engine": wanted.kind, "url": wanted.url, "model": part.model}


async def _start_prefill(
    config: LoadedConfig, name: NodeId, stack: AsyncExitStack
) -> dict[str, str]:
    return await _start_compute(config, name, stack, NodeRole.PREFILL)


async def _start_decode(
    config: LoadedConfig, name: NodeId, stack: AsyncExitStack
) -> dict[str, str]:
    return await _start_compute(config, name, stack, NodeRole.DECODE)


async def _start_front(
    config: LoadedConfig, name: NodeId, stack: AsyncExitStack, others: Siblings | None = None
) -> dict[str, str]:
    from tierkv.parts.front_part import FrontPart  # DuckDB, FastAPI: only this role
    from tierkv.parts.record_follower import NodeFile  # protobuf: only this role too

    meta = _meta(config, name, stack)
    cluster = config.settings.cluster
    path = cluster.run_dir.expanduser() / f"{name}.nodes.json"
    memory = NodeFile(path, meta_address=cluster.meta_address)
    part = FrontPart(config, meta, memory=memory, external_access=False, siblings=others)
    await part.start()
    stack.push_async_callback(part.stop)
    told = await part.open_doors()
    info = _info(config, name, NodeRole.FRONT, told["pg"])
    part.source.own_id = name
    stack.push_async_callback((await announce(meta, info, part.source.own_report)).stop)
    stack.push_async_callback(part.drain)
    return told


def _meta(
    config: LoadedConfig, name: NodeId, stack: AsyncExitStack, *, home: str = ""
) -> MetaClient:
    from tierkv.metaserver.several_meta import connect_meta  # gRPC

    cluster = config.settings.cluster
    address = cluster.meta_address
    if not address:
        raise ConfigError(
            "this role needs the meta server's address",
            hint="Give --set cluster.meta_address=HOST:PORT.",
        )
    home = home or claim_home(cluster.run_dir.expanduser(), name, stack)
    access = cluster_access(cluster)
    meta = connect_meta(address, token=access.token, tls=access.tls, home=home)
    stack.push_async_callback(meta.close)
    return meta


def _info(config: LoadedConfig, name: NodeId, role: NodeRole, address: str) -> NodeInfo:
    incarnation = Incarnation(int(SystemClock().wall() * 1000))
    zone = ZoneId(config.settings.cluster.zone)
    return NodeInfo(name, incarnation, role, _host(config), zone, control_address=address)


def _host(config: LoadedConfig) -> HostId:
    return HostId(config.settings.cluster.host or socket.gethostname())


_START = {
    "meta": _start_meta,
    "dmp": _start_dmp,
    "compute": _start_compute,
    "prefill": _start_prefill,
    "decode": _start_decode,
    "front": _start_front,
}


def _configure_logging(level: str, *, node: str) -> None:
    """Send structlog and stdlib records of ``level`` and above to standard error, as JSON lines."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Nodes look at engines every second, and each request would be a line.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    if node:
        structlog.contextvars.bind_contextvars(node=node)

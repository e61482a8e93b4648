"""Another engine as a compute node of the cluster: ``tierkv serve compute --engine``.

The part serves the same gRPC as TierKV's own node (tierkv/parts/compute_part.py) and queries the
engine over HTTP. The engine may be down at the start, and may restart. The node is in the cluster
while the engine runs.
"""

from __future__ import annotations

from pathlib import Path

from tierkv.compute.service import serve_node
from tierkv.integrations.events.feed import EngineEvents
from tierkv.integrations.events.listener import EventEndpoint, event_endpoints
from tierkv.integrations.remote.door import EngineDoor, EngineKind, RemoteConfig
from tierkv.integrations.remote.http import EngineHttp
from tierkv.integrations.remote.keeper import Keeper
from tierkv.integrations.remote.node import RemoteNode
from tierkv.integrations.remote.openai_http import OpenAiDoor
from tierkv.integrations.remote.sglang_http import SglangDoor
from tierkv.integrations.remote.vllm_http import VllmDoor
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.node import ModelInfo, NodeRole
from tierkv.kvwire.channels import BoundServer
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.reporter import MetaReporter
from tierkv.parts.access import ClusterAccess
from tierkv.settings import EngineSettings


def engine_config(
    settings: EngineSettings, *, node_id: NodeId, host: HostId, role: NodeRole
) -> RemoteConfig:
    """Convert settings to the room's configuration.

    Raises:
        ConfigError: the URL is missing, the key's file can't be read, or an unused model folder is
            given.
    """
    if not settings.url:
        raise ConfigError(
            f"--engine {settings.kind} needs the engine's address",
            hint="Give --url http://HOST:PORT.",
        )
    if EngineKind(settings.kind) is EngineKind.OPENAI and settings.model:
        raise ConfigError(
            f"--engine openai reads no model folder, but {settings.model!r} was given",
            hint="Select one of the server's models with --set engine.served_model=NAME.",
        )
    return RemoteConfig(
        node_id=node_id,
        host=host,
        role=role,
        kind=EngineKind(settings.kind),
        url=settings.url,
        api_key=_key(settings.api_key_file),
        served=settings.served_model,
        model_name=settings.model_name,
        model_folder=settings.model,
        dtype=settings.dtype,
        max_requests=settings.max_requests,
        idle_timeout_s=settings.idle_timeout_s,
    )


def _key(file: str) -> str:
    if not file:
        return ""
    try:
        key = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.api_key_file {file} can't be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"engine.api_key_file {file} must hold a key: one line of ASCII")
    return key


class EnginePart:
    """The node of an engine, the engine's keeper, and the node's gRPC service.

    Attributes:
        node: the node.
        address: ``host:port`` of the service.
    """

    def __init__(self, config: RemoteConfig, settings: EngineSettings, meta: MetaClient) -> None:
        """Create the part.

        Raises:
            ConfigError: an address can't be used.
        """
        door = open_door(config)
        self.node = RemoteNode(config, door)
        self.address = ""
        self._bound: BoundServer | None = None
        self._endpoints: tuple[EventEndpoint, ...] = ()
        if config.kind is not EngineKind.OPENAI:
            self._endpoints = event_endpoints(
                config.url,
                events_url=settings.events_url,
                replay_url=settings.events_replay_url,
                ranks=settings.events_ranks,
            )
        self._keeper = Keeper(self.node, door, meta, make_feed=self._make_feed)

    @property
    def model(self) -> str:
        """The model that the node serves now; empty while the engine is down."""
        return self.node.life.model.name if self.node.life is not None else ""

    async def start(self, *, listen: str, advertise: str = "", access: ClusterAccess) -> None:
        """Serve gRPC and begin to watch the engine, which may start later.

        Args:
            listen: ``host:port`` of the service.
            advertise: host name for other nodes; empty means the bound host.
            access: token and certificates of the cluster.

        Raises:
            ConfigError: the port is taken, or the engine refuses access for good.
            ModelFolderError: the model's folder can't be used.
        """
        self._bound = await serve_node(self.node, listen, token=access.token, tls=access.tls)
        host, _, port = self._bound.address.rpartition(":")
        self.address = f"{advertise or host}:{port}"
        self.node.set_control_address(self.address)
        await self._keeper.start()

    async def stop(self) -> None:
        """Refuse new requests, end the running ones, leave the cluster."""
        if self._bound is not None:
            await self._bound.server.stop(grace=1.0)
        await self._keeper.stop()

    def _make_feed(self, model: ModelInfo, reporter: MetaReporter) -> EngineEvents | None:
        if not self._endpoints:
            return None
        return EngineEvents(self._endpoints, model=model, reporter=reporter)


def open_door(config: RemoteConfig) -> EngineDoor:
    """Return the door to an engine, not yet connected.

    Raises:
        ConfigError: the engine's URL can't be used.
    """
    http = EngineHttp(
        config.url.rstrip("/").removesuffix("/v1"),
        api_key=config.api_key,
        connect_timeout_s=config.connect_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
    )
    match config.kind:
        case EngineKind.VLLM:
            return VllmDoor(http, served=config.served)
        case EngineKind.SGLANG:
            return SglangDoor(http, served=config.served)
        case EngineKind.OPENAI:
            return OpenAiDoor(http, served=config.served)

"""Membership of an engine in a cluster: namespace key, the pool's nodes, heartbeats.

Runs one thread with an event loop, started by integrations/pool_door.py if a meta server is
configured. The engine registers with the role ``engine``, to which no requests are sent. While the
meta server is away, everything stays as it was. At the start nothing is guessed: no key means no
cache.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tierkv.integrations.engine_report import Complaints
from tierkv.integrations.identity import EngineIdentity, differences, layout_fields
from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import DirectoryUnavailableError, UserError
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, ZoneId
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeReport, NodeRole
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.client import DirectoryNode, MetaClient
from tierkv.metaserver.reporter import MetaReporter

LOOK_INTERVAL_S: Final = 1.0
_STOP_S: Final = 3.0


class EngineMembership:
    """Exchanges an engine's key, pool addresses and reports with the meta server.

    Attributes:
        base_key: names the blocks of the engine's tenant; None until the meta server has granted a
            key.
        addresses: the pool's live nodes, as last heard.
        node_id: the engine's own name.
    """

    def __init__(
        self,
        settings: PoolAccess,
        identity: EngineIdentity,
        complaints: Complaints,
        *,
        node_id: NodeId,
        report: Callable[[], NodeReport],
        on_change: Callable[[], None],
        clock: Clock,
    ) -> None:
        """Create a member; ``start`` begins.

        Args:
            settings: the address of the meta server.
            identity: identity of the engine's KV.
            complaints: receives problems.
            node_id: the engine's name in the cluster.
            report: called for each heartbeat; must be quick.
            on_change: called in the member's thread after the key or the addresses changed.
            clock: its wall time becomes the incarnation.
        """
        self.base_key: NamespaceKey | None = None
        self._version = ""
        self.addresses: tuple[str, ...] = ()
        self.node_id = node_id
        self._settings = settings
        self._identity = identity
        self._complaints = complaints
        self._report = report
        self._on_change = on_change
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._stop_asked = False
        self._thread = threading.Thread(target=self._run, name="tierkv-member", daemon=True)

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Leave the cluster, if the meta server answers soon."""
        self._stop_asked = True
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop has ended already.
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        from tierkv.metaserver.several_meta import connect_meta  # gRPC: only with a meta server

        self._loop = asyncio.get_running_loop()
        if self._stop_asked:  # ``stop`` was called before the loop existed.
            return
        token, tls = self._settings.cluster_token or None, self._settings.meta_tls
        meta = connect_meta(self._settings.meta, token=token, tls=tls)
        incarnation = Incarnation(int(self._clock.wall() * 1_000))
        model = self._identity.model_info()
        info = NodeInfo(
            self.node_id,
            incarnation,
            NodeRole.ENGINE,
            HostId(self._settings.host_id),
            ZoneId(self._settings.zone),
            models=() if model is None else (model,),
        )
        agent = NodeAgent(meta, info, MetaReporter(self.node_id, incarnation), self._report)
        await agent.start()
        try:
            while not self._stopping.is_set():
                await self._look(meta)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_INTERVAL_S):
                        await self._stopping.wait()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S / 2):
                    await agent.stop()
            await meta.close()

    async def _look(self, meta: MetaClient) -> None:
        try:
            changed = await self._resolve(meta)
            changed |= self._see(await meta.list_nodes())
        except DirectoryUnavailableError as error:
            self._complaints.hold("meta_down", error.message, hint=error.hint)
            return
        except UserError as error:
            self._complaints.hold("tenant", error.message, hint=error.hint)
            return
        except Exception as error:  # noqa: BLE001 - outermost loop: it outlives its own bugs
            self._complaints.complain("member_failed", f"{type(error).__name__}: {error}")
            return
        self._complaints.settle("meta_down")
        self._complaints.settle("tenant")
        if changed:
            self._on_change()

    async def _resolve(self, meta: MetaClient) -> bool:
        """Ask the meta server for the key; return True if the key changed."""
        grant = await meta.resolve_namespace(
            self._settings.tenant,
            model_revision=self._identity.revision,
            layout_fingerprint=self._identity.fingerprint(),
            model=self._identity.label,
        )
        if not grant.cache_enabled:
            self._complaints.hold(
                "cache_off", f"the cache of {grant.domain} is switched off (tierkv.namespaces)"
            )
            was, self.base_key = self.base_key, None
            return was is not None
        self._complaints.settle("cache_off")
        if self.base_key == grant.namespace_key:
            return False
        switched = grant.version != self._version
        self._version = grant.version
        if self.base_key is not None and not switched:
            self._complaints.complain(
                "new_secret",
                "the meta server has another cluster secret than before: blocks stored until now "
                "are not found any more",
                hint="Set meta.database or cluster.secret, so that a restart keeps it.",
            )
        self.base_key = grant.namespace_key
        return True

    def _see(self, nodes: tuple[DirectoryNode, ...]) -> bool:
        """Take over the list of nodes; return True if the pool's addresses changed."""
        self._compare([state for state in nodes if state.state != "dead"])
        live = (n.info for n in nodes if n.info.role is NodeRole.DMP and n.state != "dead")
        addresses = tuple(info.data_address for info in live if info.data_address)
        if addresses == self.addresses:
            return False
        self.addresses = addresses
        return True

    def _compare(self, nodes: list[DirectoryNode]) -> None:
        """Complain of a node with the same model in a form that prevents sharing."""
        here = self._identity.model_info()
        if here is None:
            return
        for state in nodes:
            for there in state.info.models:
                if there.name == here.name or there.revision == here.revision:
                    unlike = differences(_model_fields(here), _model_fields(there))
                    if unlike and state.info.node_id != self.node_id:
                        self._complaints.hold(
                            "node_mismatch",
                            f"shares nothing with {state.info.role} node {state.info.node_id}, "
                            f"which serves {there.name} too: {unlike}",
                            hint="Both nodes serve on. Make the values equal to share KV.",
                        )
                        return
        self._complaints.settle("node_mismatch")


def _model_fields(model: ModelInfo) -> dict[str, str]:
    return {"revision": model.revision} | layout_fields(model.layout)

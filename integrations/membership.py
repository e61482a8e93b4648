"""Membership of an engine in a cluster: namespace key, the pool's nodes, heartbeats.

Runs one thread with an event loop, started by integrations/pool_door.py if a meta server is
configured. The engine registers with the role ``engine``, to which no requests are sent. While the
meta server is away, everything stays as it was. At the start nothing is guessed: no key means no
cache.

Engines with different KV never share blocks, which looks like a cache without hits. Each engine
therefore writes its identity into the pool under the model's name (``Manifest``), reads the other
identities and reports the differing fields. The keeper's thread calls the manifest.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.client.pool import Pool
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


PERIOD_S: Final = 6 * 3600.0
"""Length of a period. Nothing is ever deleted from a pool, so names contain the period and only
entries of the current and the last period are read. The entry of an engine that has left is
forgotten after twelve hours at most."""

SLOTS: Final = 8
"""Most identities of one model that are kept per period."""

MANIFEST_LOOK_S: Final = 60.0
_MOST_BYTES: Final = 16 << 10
_MOST_FIELDS: Final = 64


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The entry of one engine.

    Attributes:
        engine: the engine and its version.
        node: name of the engine in the cluster.
        fields: the engine's identity.
    """

    engine: str
    node: str
    fields: dict[str, str]

    def to_bytes(self) -> bytes:
        """Encode the entry as JSON."""
        text = json.dumps({"engine": self.engine, "node": self.node, "fields": self.fields})
        return text.encode()


class Manifest:
    """Writes an engine's identity into the pool and compares the identities there.

    Attributes:
        _next_at: time of the next look.
    """

    def __init__(
        self, identity: EngineIdentity, node_id: NodeId, complaints: Complaints, clock: Clock
    ) -> None:
        self._label = identity.label
        self._mine = ManifestEntry(
            f"{identity.engine} {identity.version}", node_id, identity.fields()
        )
        self._complaints = complaints
        self._clock = clock
        self._next_at = float("-inf")

    def look(self, pool: Pool) -> None:
        """Read, write and compare entries if ``MANIFEST_LOOK_S`` has passed since the last look."""
        now = self._clock.now()
        if now < self._next_at:
            return
        self._next_at = now + MANIFEST_LOOK_S
        period = int(self._clock.wall() // PERIOD_S)
        here = self._read(pool, period)
        others = [*here.values(), *self._read(pool, period - 1).values()]
        if all(entry.fields != self._mine.fields for entry in here.values()):
            others += self._leave(pool, period, taken=here)
        self._compare(others)

    def _read(self, pool: Pool, period: int) -> dict[int, ManifestEntry]:
        values = pool.get_many([self._name(period, slot) for slot in range(SLOTS)])
        read = {slot: _entry(value) for slot, value in enumerate(values) if value is not None}
        return {slot: entry for slot, entry in read.items() if entry is not None}

    def _leave(self, pool: Pool, period: int, *, taken: Iterable[int]) -> list[ManifestEntry]:
        """Write the own entry into a free slot; return entries that other engines wrote first."""
        faster: list[ManifestEntry] = []
        for slot in (slot for slot in range(SLOTS) if slot not in set(taken)):
            name = self._name(period, slot)
            # The first value under a name stays, so reading back shows which engine has the slot.
            value = pool.get(name) if pool.put(name, self._mine.to_bytes()) else None
            entry = _entry(value) if value is not None else None
            if value is None or (entry is not None and entry.fields == self._mine.fields):
                break
            if entry is not None:
                faster.append(entry)
        return faster

    def _compare(self, others: list[ManifestEntry]) -> None:
        for entry in others:
            unlike = differences(self._mine.fields, entry.fields)
            if unlike:
                self._complaints.hold(
                    "layout_mismatch",
                    f"{entry.engine} ({entry.node}) keeps {self._label} in this pool too, but "
                    f"nothing is shared with it: {unlike}",
                    hint="Both nodes serve on. Make the values equal to share KV.",
                )
                return
        self._complaints.settle("layout_mismatch")

    def _name(self, period: int, slot: int) -> str:
        return f"tierkv-manifest-1|{self._label}|{period}|{slot}"


def _entry(value: bytes) -> ManifestEntry | None:
    """Decode an entry; None for bytes not written by TierKV's classes."""
    if len(value) > _MOST_BYTES:
        return None
    try:
        found = json.loads(value)
        fields = dict(found["fields"])
        texts = [found["engine"], found["node"], *fields, *fields.values()]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if len(fields) > _MOST_FIELDS or not all(isinstance(text, str) for text in texts):
        return None
    return ManifestEntry(found["engine"], found["node"], fields)

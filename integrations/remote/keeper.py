"""Watches an engine and keeps the engine's node in the cluster while the engine lives.

Started by tierkv/parts/engine_part.py. Each start of the engine is a life of the node with an
incarnation of its own, so knowledge of the engine's cache ends with the life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Protocol

from tierkv.integrations.remote.door import EngineDoor, EngineLook
from tierkv.integrations.remote.node import L1Book, Life, RemoteNode
from tierkv.integrations.remote.served_model import served_model
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import DirectoryUnavailableError, TierKVError, TransportError, UserError
from tierkv.kvcore.ids import Incarnation
from tierkv.kvcore.node import ModelInfo, NodeRole
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.reporter import MetaReporter

_log = logging.getLogger(__name__)

_MISSES: Final = 3
"""Failed looks in a row before an engine counts as dead: it may only be busy."""


class EventFeed(L1Book, Protocol):
    """Listens to the engine's KV events during one life (integrations/events/feed.py)."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def inventory(self) -> tuple[Any, ...]: ...


MakeFeed = Callable[[ModelInfo, MetaReporter], EventFeed | None]


class Keeper:
    """Watches one engine.

    Attributes:
        node: the engine's node.
    """

    def __init__(
        self,
        node: RemoteNode,
        door: EngineDoor,
        meta: MetaClient,
        *,
        make_feed: MakeFeed | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create a keeper; ``start`` begins.

        Args:
            node: the node whose lives the keeper begins and ends.
            door: the engine.
            meta: the meta server to register with.
            make_feed: creates the listener to the engine's events for a life; None: no listener.
            clock: wall time for the incarnation.
        """
        self.node = node
        self._door = door
        self._meta = meta
        self._make_feed = make_feed
        self._clock = clock or SystemClock()
        self._agent: NodeAgent | None = None
        self._feed: EventFeed | None = None
        self._task: asyncio.Task[None] | None = None
        self._misses = 0
        self._said = ""
        self._last = Incarnation(0)
        self._described: tuple[EngineLook, tuple[ModelInfo, ...], ModelInfo] | None = None

    async def start(self) -> None:
        """Look once, so that permanent errors are raised at once; then keep looking.

        Raises:
            ConfigError: the engine refuses the API key, or the model is unknown here.
            ModelFolderError: the model's folder can't be used.
        """
        with suppress(TransportError):
            await self._look()
        if self.node.life is None:
            _log.warning(
                "%s is waiting for its engine at %s",
                self.node.config.node_id,
                self.node.config.url,
            )
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Leave the cluster; the engine keeps running."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._end("the node stops")
        await self._door.http.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.node.config.poll_s)
            try:
                await self._look()
            except TierKVError as error:
                await self._miss(error)
            except Exception:  # noqa: BLE001 - the watch outlives a bug in a look
                _log.exception("looking at the engine at %s failed", self.node.config.url)

    async def _look(self) -> None:
        """Check that the engine runs unchanged, begin or end a life, and note the engine's load."""
        look = await self._door.look()
        seen = await self._engines_models()
        model = await self._model_of(look, seen)
        life = self.node.life
        if life is not None and (life.model != model or life.look != look):
            await self._end(f"the engine at {self.node.config.url} started again or changed")
        if self.node.life is None:
            await self._begin(look, model)
        assert self.node.life is not None
        self.node.life.look = look
        self._misses, self._said = 0, ""

    async def _model_of(self, look: EngineLook, seen: tuple[ModelInfo, ...]) -> ModelInfo:
        """Describe the model; the model's files are read again only after a change."""
        if self._described is None or self._described[:2] != (look, seen):
            model = await asyncio.to_thread(served_model, self.node.config, self._door, look, seen)
            self._described = (look, seen, model)
        return self._described[2]

    async def _engines_models(self) -> tuple[ModelInfo, ...]:
        """Return the models, with layouts, of the engines that keep KV in the pool."""
        try:
            nodes = await self._meta.list_nodes()
        except DirectoryUnavailableError:
            return () if self.node.life is None else (self.node.life.model,)
        return tuple(
            model
            for state in nodes
            if state.info.role is NodeRole.ENGINE and state.state != "dead"
            for model in state.info.models
        )

    async def _miss(self, error: TierKVError) -> None:
        self._misses += 1
        for_good = isinstance(error, UserError)
        if self.node.life is not None and (self._misses >= _MISSES or for_good):
            _log.warning("%s lost its engine: %s", self.node.config.node_id, error.message)
            await self._end(error.message)
        elif error.message != self._said and self.node.life is None:
            self._said = error.message
            _log.warning("%s is waiting: %s", self.node.config.node_id, error.message)

    async def _begin(self, look: EngineLook, model: ModelInfo) -> None:
        config = self.node.config
        incarnation = Incarnation(max(int(self._clock.wall() * 1000), self._last + 1))
        self._last = incarnation
        reporter = MetaReporter(config.node_id, incarnation)
        feed = None if self._make_feed is None else self._make_feed(model, reporter)
        if feed is not None:
            reporter.set_inventory(feed.inventory)
            await feed.start()
        self._feed = feed
        self.node.begin_life(Life(incarnation, model, look, feed))
        self._agent = NodeAgent(self._meta, self.node.info(), reporter, self.node.report)
        await self._agent.start()
        _log.info(
            "%s serves %s by %s %s at %s",
            *(config.node_id, model.name, config.kind, look.version or "(version unknown)"),
            config.url,
        )

    async def _end(self, why: str) -> None:
        self.node.end_life(why)
        ending: list[Coroutine[Any, Any, None]] = []
        if self._feed is not None:
            ending.append(self._feed.stop())
        if self._agent is not None:
            ending.append(self._agent.stop())
        self._feed = self._agent = None
        await asyncio.gather(*ending)

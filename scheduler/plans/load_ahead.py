"""Questions to nodes to load blocks before their request comes; nobody waits for an answer.

Used by scheduler/dispatcher.py. A failure is no blocks: the request loads or computes for itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from tierkv.kvcore.errors import CacheError, TierKVError
from tierkv.kvcore.request import GenerateRequest
from tierkv.scheduler.events import Event, Prefetch, PrefetchDone
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.scheduler.requests.job import Job
from tierkv.scheduler.routing_stats import RoutingStats

log = logging.getLogger("tierkv.scheduler")


class LoadAhead:
    """The questions under way; one per request at most."""

    def __init__(
        self, view: ClusterView, stats: RoutingStats, handle: Callable[[Event], None]
    ) -> None:
        self._view = view
        self._stats = stats
        self._handle = handle
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, job: Job, prefetch: Prefetch) -> None:
        """Ask a node to load ahead, behind everything else, unless the job is asking already."""
        if job.prefetching is not None and not job.prefetching.done():
            self._handle(PrefetchDone(prefetch.request_id, prefetch.node_id, tokens=0))
            return
        job.prefetching = asyncio.create_task(
            self._ask(job.answer.ahead(prefetch), prefetch), name="scheduler-prefetch"
        )
        self._asking.add(job.prefetching)
        job.prefetching.add_done_callback(self._asking.discard)

    async def _ask(self, request: GenerateRequest, prefetch: Prefetch) -> None:
        tokens = 0
        try:
            tokens = await self.load(request, prefetch)
        finally:
            self._handle(PrefetchDone(prefetch.request_id, prefetch.node_id, tokens))

    async def load(self, request: GenerateRequest, prefetch: Prefetch) -> int:
        """Have a node load what a prompt will need; never fails.

        Returns:
            how many of the prompt's tokens are in the node's pages now.
        """
        try:
            client = self._view.client(prefetch.node_id, prefetch.incarnation)
            tokens = await client.prefetch(request)
            self._stats.prefetches += 1
        except CacheError as error:
            self._stats.cache_errors[error.code] += 1
        except TierKVError as error:
            log.debug("%s could not load ahead: %s", prefetch.node_id, error)
        else:
            return tokens
        return 0

    async def stop(self) -> None:
        """Ask nobody any more."""
        for asking in tuple(self._asking):
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking

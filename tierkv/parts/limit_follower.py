"""Keeps a front's limits of AI calls equal to those that the meta server keeps.

Used by tierkv/parts/front_part.py. The meta server is asked every second; without an answer the
front goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from tierkv.kvcore.call_limits import limits_of
from tierkv.kvcore.errors import DirectoryUnavailableError
from tierkv.metaserver.client import MetaClient
from tierkv.scheduler.limits.gate import CallGate

_log = logging.getLogger(__name__)
LOOK_S: Final = 0.8


class LimitFollower:
    """Applies limits within a second of a change."""

    def __init__(self, meta: MetaClient, gate: CallGate) -> None:
        self._meta = meta
        self._gate = gate
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then keep looking in the background."""
        with suppress(DirectoryUnavailableError):
            await self.look()
        self._task = asyncio.create_task(self._follow(), name="limits-follow")

    async def stop(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def look(self) -> None:
        """Apply the limits of now; also called after a change by this front.

        Raises:
            DirectoryUnavailableError: the meta server does not answer; nothing changed.
        """
        limits = limits_of(await self._meta.list_records())
        namespaces = await self._meta.list_namespaces() if limits else ()
        self._gate.namespace_of = {
            tenant: namespace.name for namespace in namespaces for tenant in namespace.members
        }
        self._gate.follow(limits)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except DirectoryUnavailableError:
                continue
            except Exception:  # noqa: BLE001 - outermost loop: the look must outlive any bug
                _log.exception("could not look at the limits of calls")

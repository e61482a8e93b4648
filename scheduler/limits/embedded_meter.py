"""A meter in the memory of one process, and in a file between two runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tierkv.kvcore.clock import Clock
from tierkv.scheduler.limits.buckets import Buckets, Charge, Taken
from tierkv.scheduler.limits.place_leases import PlaceLeases

_log = logging.getLogger(__name__)
_WRITE_EACH_S: Final = 1.0
_WORTH_KEEPING_S: Final = 10.0
"""Buckets that are full again so soon are not written: a restart takes about as long."""


class EmbeddedMeter:
    """Implements LimitMeter.

    With a file, a restart does not fill a day's budget again; a kill forgets the last second.
    """

    def __init__(self, clock: Clock, path: Path | None = None) -> None:
        """Begin with full buckets, or with the file's buckets.

        Args:
            clock: a wall clock that jumps changes no bucket, except between two runs.
            path: the file; None keeps nothing.
        """
        self.places: PlaceLeases | None = None
        self._clock = clock
        self._path = path
        self._buckets = Buckets()
        self._writer: asyncio.Task[None] | None = None
        self._load()

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            latest = float(found["latest"])
            # A clock that was set back must not lengthen debts.
            base_s = self._clock.now() - max(latest, self._clock.wall())
            self._buckets.restore(
                {str(name): float(full_s) + base_s for name, full_s in found["full_s"].items()}
            )
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s can't be read, limits begin anew: %s", self._path, error)

    async def take(self, charges: Sequence[Charge], patience_s: float) -> Taken:
        taken = self._buckets.take(charges, patience_s, self._clock.now())
        self._note()
        return taken

    async def give_back(self, charges: Sequence[Charge]) -> None:
        self._buckets.give_back(charges)
        self._note()

    async def left(self, charges: Sequence[Charge]) -> list[float]:
        now = self._clock.now()
        return [self._buckets.left(charge, now) for charge in charges]

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer
            self._writer = None
        if self._path is not None:
            await asyncio.to_thread(self._write)

    def _note(self) -> None:
        """Write the file within a second."""
        if self._path is not None and self._writer is None:
            self._writer = asyncio.create_task(self._write_soon(), name="limits-write")

    async def _write_soon(self) -> None:
        await asyncio.sleep(_WRITE_EACH_S)
        self._writer = None
        await asyncio.to_thread(self._write)

    def _write(self) -> None:
        assert self._path is not None
        now, wall = self._clock.now(), self._clock.wall()
        kept = {
            name: full_s - now + wall
            for name, full_s in self._buckets.moments().items()
            if full_s > now + _WORTH_KEEPING_S
        }
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            fresh.write_text(json.dumps({"latest": wall, "full_s": kept}), encoding="utf-8")
            os.replace(fresh, self._path)
        except OSError as error:
            _log.warning("%s can't be written: %s", self._path, error)

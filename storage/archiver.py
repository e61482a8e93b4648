"""The thread that copies blocks from the disk tier to the archive and looks archived blocks up.

Used by storage/l4.py. The queue holds keys, not bytes, and is bounded: a key that does not fit is
not archived but counted. A failing archive never disturbs the disk tier.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final

from tierkv.kvcore.errors import BlockNotFoundError, CacheError, TransportError
from tierkv.kvcore.ids import BlockKey
from tierkv.storage.archive import ObjectArchive
from tierkv.storage.disk.direct_io import AlignedBuffers
from tierkv.storage.disk.segment_store import SegmentStore

log = logging.getLogger(__name__)

QUEUE_KEYS: Final = 16_384
"""Maximum length of the queue; one segment file of 256 MiB holds 4096 blocks of 64 KiB."""


class Errand(Enum):
    """A task for one key: copy the block up, fetch its record, or delete its object."""

    STORE = "store"
    LEARN = "learn"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class ArchiveStats:
    """Counters of the archiver.

    Attributes:
        stored_blocks: blocks copied to the archive.
        stored_bytes: payload bytes of these blocks.
        missed_blocks: blocks that left the disk before they were copied, or found the queue full.
        errors: failed errands.
        waiting: errands in the queue now.
        failing: error of the last errand; empty after a success.
    """

    stored_blocks: int = 0
    stored_bytes: int = 0
    missed_blocks: int = 0
    errors: int = 0
    waiting: int = 0
    failing: str = ""


class Archiver:
    """Runs errands in sequence in a single thread, lookups first.

    Attributes:
        deleting: keys whose object is about to be deleted; these keys count as absent.
    """

    def __init__(self, disk: SegmentStore, archive: ObjectArchive) -> None:
        self.deleting: set[BlockKey] = set()
        self._disk = disk
        self._archive = archive
        self._buffers = AlignedBuffers()
        self._changed = threading.Condition()
        self._errands: OrderedDict[tuple[BlockKey, Errand], None] = OrderedDict()
        self._busy = True  # The first thing done is to list the archive.
        self._stopping = False
        self._stats = ArchiveStats()
        self._thread = threading.Thread(target=self._run, name="tierkv-archiver", daemon=True)

    def start(self) -> None:
        """Begin: list the archive, then run errands."""
        self._thread.start()

    def stop(self) -> None:
        """End after the request under way (bounded by the archive's timeouts); drop the rest."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._buffers.close()

    def ask(self, keys: Sequence[BlockKey], errand: Errand) -> None:
        """Queue errands without blocking; errands that don't fit are dropped and counted."""
        with self._changed:
            for key in keys:
                self._enqueue(key, errand)
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every errand is done; False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._errands or self._busy), timeout_s)

    def erase(self, keys: Sequence[BlockKey], *, timeout_s: float) -> int:
        """Delete objects and wait until they are deleted; return how many were known.

        Raises:
            TransportError: the archive did not delete all of them in time.
        """
        known = sum(self._archive.known(key) for key in keys)
        self.ask(keys, Errand.DELETE)
        waited = set(keys)
        with self._changed:
            if not self._changed.wait_for(lambda: not waited & self.deleting, timeout_s):
                left = len(waited & self.deleting)
                raise TransportError(f"the archive has not deleted {left} objects yet")
        return known

    def stats(self) -> ArchiveStats:
        """Return the counters; cheap."""
        with self._changed:
            return replace(self._stats, waiting=len(self._errands))

    def _enqueue(self, key: BlockKey, errand: Errand) -> None:
        if errand is Errand.DELETE:
            self._errands.pop((key, Errand.STORE), None)
            self.deleting.add(key)
        elif errand is Errand.STORE:
            self.deleting.discard(key)
            self._errands.pop((key, Errand.DELETE), None)
        if len(self._errands) >= QUEUE_KEYS and errand is not Errand.DELETE:
            self._count(missed_blocks=int(errand is Errand.STORE))
            return
        self._errands[key, errand] = None
        if errand is Errand.LEARN:
            self._errands.move_to_end((key, errand), last=False)

    def _count(self, **more: int) -> None:
        """Add to counters; the lock is held."""
        added = {name: getattr(self._stats, name) + count for name, count in more.items()}
        self._stats = replace(self._stats, **added)

    def _run(self) -> None:
        self._attempt(self._list)
        while (errand := self._next()) is not None:
            key, what = errand
            if what is Errand.STORE:
                self._attempt(partial(self._store, key))
            elif what is Errand.LEARN:
                self._attempt(partial(self._archive.record, key))
            else:
                self._attempt(partial(self._delete, key))

    def _next(self) -> tuple[BlockKey, Errand] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._errands) or self._stopping)
            if self._stopping:
                return None
            self._busy = True
            return self._errands.popitem(last=False)[0]

    def _attempt(self, action: Callable[[], object]) -> None:
        """Run an archive action; remember a failure, log it once and carry on."""
        try:
            action()
        except BlockNotFoundError:
            return  # Gone meanwhile: from the disk (counted in _store) or from the archive.
        except CacheError as error:
            with self._changed:
                news = not self._stats.failing
                self._count(errors=1)
                self._stats = replace(self._stats, failing=str(error))
            if news:
                log.warning("the archive does not work: %s", error)
            return
        with self._changed:
            recovered = bool(self._stats.failing)
            self._stats = replace(self._stats, failing="")
        if recovered:
            log.info("the archive %s works again", self._archive.url)

    def _list(self) -> None:
        for _ in self._archive.list_keys():
            if self._stopping:
                return

    def _store(self, key: BlockKey) -> None:
        if self._archive.known(key):
            return
        block = self._disk.find(key)
        try:
            if block is None:
                raise BlockNotFoundError(f"block {key.hex()} left the disk before it was archived")
            with self._buffers.lend(block.ranges.payload_bytes) as lent:
                payload = lent[: block.ranges.payload_bytes]
                self._disk.get_block(key, payload, touch=False)
                self._archive.put(block, payload)
        except BlockNotFoundError:
            with self._changed:
                self._count(missed_blocks=1)
            raise
        with self._changed:
            self._count(stored_blocks=1, stored_bytes=block.ranges.payload_bytes)

    def _delete(self, key: BlockKey) -> None:
        self._archive.delete(key)
        with self._changed:
            self.deleting.discard(key)
            self._changed.notify_all()

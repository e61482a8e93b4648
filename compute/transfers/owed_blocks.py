"""Full blocks that the pool could not take when they were saved, remembered for another try.

Pure; owned by compute/transfers/saves.py in the engine's thread. A block is owed from the moment
its pool node failed, or when there was none, until L1 has evicted it or the pool has it. Nothing is
kept in memory for it: a block that L1 has given up is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tierkv.compute.batching.batch_plan import FullBlock
from tierkv.compute.tiers.block_puts import PublishJob
from tierkv.kvcore.ids import BlockKey

NO_SEQUENCE: Final = 0
"""Sequences count from 1: what is saved again belongs to none."""


class OwedBlocks:
    """Blocks by key, the oldest first, each in a job of its own without a sequence."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: dict[BlockKey, PublishJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def note(self, job: PublishJob, blocks: Sequence[FullBlock]) -> None:
        """Remember blocks of a job that are not in the pool; beyond the limit the oldest go.

        A partial block is left out: the one that would go on from it has computed it by then.
        """
        for block in blocks:
            if not block.tokens:
                self._jobs.pop(block.key, None)
                self._jobs[block.key] = replace(
                    job, seq_id=NO_SEQUENCE, blocks=(block,), must=False, handoff=False
                )
        for key in list(self._jobs)[: max(0, len(self._jobs) - self._limit)]:
            del self._jobs[key]

    def take(self, count: int, page_of: Callable[[BlockKey], int | None]) -> list[PublishJob]:
        """Take up to ``count`` blocks out that L1 still has, and all older ones that it has not.

        Args:
            count: how many blocks.
            page_of: where a block lies in L1 now.

        Returns:
            jobs of one tenant, codec and session each.
        """
        jobs: dict[tuple[object, ...], PublishJob] = {}
        for key in list(self._jobs):
            if count <= 0:
                break
            job, page = self._jobs.pop(key), page_of(key)
            if page is None:
                continue
            count -= 1
            block = replace(job.blocks[0], page=page)
            kind = job.tenant, job.codec, job.session
            known = jobs.get(kind)
            jobs[kind] = replace(job, blocks=(*(known.blocks if known else ()), block))
        return list(jobs.values())

"""L1 misses become loads from L2, L3 or L4, or recomputation: the one place where that is decided.

The engine asks here where blocks are and hands over what to load and publish; worker threads do
it. On the node side CacheError is caught in this file only: counted by kind, never passed on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from compute.batcher import LoadOrder
from compute.block_puts import PublishJob
from compute.config import ComputeConfig, LoadPolicy
from compute.finder import Attempt, BlockFinder, Directory, Source
from compute.loader import Loader, LoadJob, make_job
from compute.meter import ASSUMED_BYTES_PER_S, Rate, TierMeter
from compute.pages import L1Pages
from compute.publisher import Publisher
from compute.sequence import Sequence as EngineSequence
from dmp.pool_node import PoolNode
from kvcore.clock import Clock
from kvcore.errors import CacheError
from kvcore.ids import BlockKey
from kvcore.location import Location, Tier
from kvcore.request import HitTokens

_log = logging.getLogger(__name__)
_FORGET_PESSIMISM = 1.05
"""Each load refused as too slow raises the assumed rate a little, so that it is tried again."""


class Tiers:
    """The memory hierarchy below L1, as the engine uses it.

    Attributes:
        cache_errors: count by kind (``CacheError.code``); each one was a recompute.
        meters: what was looked for in and loaded from each tier.
        finder: knows the pool nodes.
        publisher: the write-behind thread.
    """

    def __init__(
        self,
        config: ComputeConfig,
        pages: L1Pages,
        *,
        clock: Clock,
        directory: Directory | None,
        published: Callable[[PublishJob], None],
        archive: PoolNode | None = None,
    ) -> None:
        self.cache_errors: Counter[str] = Counter()
        self.meters = {tier: TierMeter() for tier in Tier}
        self.finder = BlockFinder(
            host=config.host,
            directory=directory,
            absorb=self.absorb,
            promote=self._promote,
            archive=archive,
        )
        self.publisher = Publisher(
            pages,
            self.finder,
            model=config.model_name,
            queue_blocks=min(config.publish_queue_blocks, max(1, pages.num_pages // 4)),
            absorb=self.absorb,
            clock=clock,
            done=published,
        )
        self._policy = config.load_policy
        self._layout = pages.layout
        self._clock = clock
        self._locate_s = Rate()
        self._decode_rate = Rate()
        self._loader = Loader(
            pages,
            absorb=self.absorb,
            clock=clock,
            measured=self._measured,
            decoded=self._decode_rate.add,
        )
        self._workers = ThreadPoolExecutor(config.load_threads, thread_name_prefix="tierkv-load")

    def start(self) -> None:
        """Start the publisher; loader threads start with the first load."""
        self.publisher.start()

    def stop(self) -> None:
        """Finish what is queued and end all threads."""
        self.publisher.stop()
        self._workers.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def absorb(self) -> Iterator[Attempt]:
        """Guard cache work: a CacheError is counted and means "miss", nothing more."""
        attempt = Attempt()
        try:
            yield attempt
        except CacheError as error:
            attempt.error = error
            self.cache_errors[error.code] += 1
            _log.debug("cache error, recomputing: %s", error)

    def _promote(self, node: PoolNode, keys: Sequence[BlockKey]) -> Sequence[Location | None]:
        """Have a node read blocks from its disk; what that took is what L4 costs."""
        found: Sequence[Location | None] = ()
        began = self._clock.now()
        with self.absorb():
            found = node.promote(keys)
        size = sum(place.length for place in found if place is not None)
        self._measured(Tier.L4, size, self._clock.now() - began)
        return found

    @property
    def reachable(self) -> bool:
        """Whether there is anything below L1."""
        return bool(self.finder.nodes) or self.finder.archive is not None

    def wants_locate(self, missing_tokens: int, prefill_rate: float) -> bool:
        """Whether asking where blocks are can pay off at all."""
        if self._policy is LoadPolicy.NEVER or not self.reachable:
            return False
        if self._policy is LoadPolicy.ALWAYS or not prefill_rate or not self._locate_s.value:
            return True
        return missing_tokens / prefill_rate > 1.0 / self._locate_s.value

    def locate(
        self, seq: EngineSequence, answer: Callable[[list[tuple[Source, ...]]], None]
    ) -> None:
        """Find the blocks that follow a sequence's L1 pages; ``answer`` runs in a worker thread."""
        keys = seq.missing_keys()
        self._workers.submit(self._locate, keys, seq.request.resumed_tokens > 0, answer)

    def _locate(
        self,
        keys: list[BlockKey],
        thorough: bool,
        answer: Callable[[list[tuple[Source, ...]]], None],
    ) -> None:
        found: list[tuple[Source, ...]] = []
        began = self._clock.now()
        try:
            found = self.finder.find(keys, thorough=thorough)
        except Exception:  # noqa: BLE001 - worker's outermost frame; no answer would hang a request.
            self.cache_errors["internal"] += 1
            _log.exception("looking blocks up failed")
        self._locate_s.add(1.0, self._clock.now() - began)
        answer(found)

    def worth_loading(self, sources: Sequence[tuple[Source, ...]], prefill_rate: float) -> bool:
        """Whether loading these blocks is estimated faster than computing them."""
        if not sources or self._policy is LoadPolicy.NEVER:
            return False
        if self._policy is LoadPolicy.ALWAYS or not prefill_rate:
            return True
        blocks = Counter(copies[0].tier for copies in sources)
        load_s = sum(
            n * self._layout.stored_bytes / self._bytes_per_s(tier) for tier, n in blocks.items()
        )
        if self._decode_rate.value:
            load_s += len(sources) * self._layout.stored_bytes / self._decode_rate.value
        if load_s < len(sources) * self._layout.block_tokens / prefill_rate:
            return True
        for tier in blocks:
            self.meters[tier].rate.value *= _FORGET_PESSIMISM
        self._decode_rate.value *= _FORGET_PESSIMISM
        return False

    def _bytes_per_s(self, tier: Tier) -> float:
        return self.meters[tier].rate.value or ASSUMED_BYTES_PER_S[tier]

    def load(
        self,
        order: LoadOrder,
        sources: Sequence[tuple[Source, ...]],
        *,
        arrived: Callable[[], None],
        ended: Callable[[LoadJob], None],
    ) -> LoadJob:
        """Start loading into the order's pages; the callbacks run in a worker thread.

        ``arrived`` is called after each layer, ``ended`` once, when nobody writes any more.
        """
        job = make_job(order.pages, sources, self._layout.layers)
        self._workers.submit(self._load, job, arrived, ended)
        return job

    def _load(
        self, job: LoadJob, arrived: Callable[[], None], ended: Callable[[LoadJob], None]
    ) -> None:
        try:
            self._loader.run(job, arrived=arrived)
        except Exception:  # noqa: BLE001 - worker's outermost frame; the load counts as failed.
            job.good = 0
            self.cache_errors["internal"] += 1
            _log.exception("loading blocks failed")
        job.ended.set()
        ended(job)

    def _measured(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        self.meters[tier].read(size_bytes, seconds)

    def count_prompt(self, prompt_tokens: int, hits: HitTokens) -> None:
        """Count one request's prompt: each tier was asked for what the nearer ones lacked."""
        left = prompt_tokens
        for tier, hit in zip(Tier, (hits.l1, hits.l2, hits.l3, hits.l4), strict=True):
            self.meters[tier].query_tokens += left
            self.meters[tier].hit_tokens += hit
            left -= hit

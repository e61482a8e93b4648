"""L1 misses become loads from L2, L3 or L4, or recomputation: the one place of this decision.

The engine asks here for the places of blocks, and hands over loads and saves; worker threads carry
them out. On the node side CacheError is caught in this file only: counted by kind, never passed on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tierkv.compute.config import ComputeConfig, LoadPolicy
from tierkv.compute.l1.part_index import KnownBlocks
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.tiers.chunk_lookup import FoundChunks, PromptChunk, find_chunks
from tierkv.compute.tiers.finder import Attempt, BlockFinder, Directory, Source
from tierkv.compute.tiers.host_memory import VERIFIERS, DirectReader, HostMemory
from tierkv.compute.tiers.load_decider import LevelPicker, LoadDecider, Wanted, probe
from tierkv.compute.tiers.load_figures import PROBE_PAUSE_S, LoadFigures
from tierkv.compute.tiers.load_log import LoadLog
from tierkv.compute.tiers.loader import Loader, LoadJob, make_job
from tierkv.compute.tiers.prompt_lookup import PoolPart, PromptLookup, find_part, worth_loading
from tierkv.compute.tiers.publisher import Publisher
from tierkv.costing.fit import Rate, TierMeter
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore.block import Location, Tier
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import GenerateRequest, HitTokens

_log = logging.getLogger(__name__)
LocateAnswer = Callable[[list[tuple[Source, ...]], PoolPart | None], None]
"""Takes whole blocks in a row, and perhaps a further block that counts in part."""


class Tiers:
    """The memory hierarchy below L1, as used by the engine.

    Attributes:
        cache_errors: count by kind (``CacheError.code``); each error was a recompute.
        figures: measured costs of loading and computing.
        decider: chooses from the figures what is loaded and what is computed.
        log: decisions of the decider.
        finder: knows the pool nodes.
        publisher: the write-behind thread.
        known: blocks by tokens, to be taken in part by prompts.
    """

    def __init__(
        self,
        config: ComputeConfig,
        pages: L1Pages,
        *,
        clock: Clock,
        directory: Directory | None,
        archive: PoolNode | None = None,
        host_memory: HostMemory | None = None,
    ) -> None:
        self.cache_errors: Counter[str] = Counter()
        self.figures = LoadFigures(
            pages.layout, host=config.host, clock=clock, read_bytes=config.load_read_bytes
        )
        self.decider = LoadDecider(config, pages.layout, self.figures)
        self.log = LoadLog()
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
            queue_blocks=min(config.publish_queue_blocks, max(1, pages.num_pages // 4)),
            alone_blocks=min(config.publish_queue_blocks, pages.num_pages // 2),
            absorb=self.absorb,
            clock=clock,
        )
        self.known = KnownBlocks()
        self._policy = config.load_policy
        self._layout = pages.layout
        self._pages = pages
        self._budget_s = config.ttft_budget_s
        self._levels = LevelPicker(self.finder, self.figures, pages.layout)
        self._refused_codecs: set[KvCodec] = set()
        self._clock = clock
        self._locate_s = Rate()
        self._locate_again_s = 0.0
        self._verifiers = ThreadPoolExecutor(VERIFIERS, thread_name_prefix="tierkv-verify")
        self._loader = Loader(
            pages,
            absorb=self.absorb,
            clock=clock,
            figures=self.figures,
            direct=DirectReader(pages, host_memory, self._verifiers) if host_memory else None,
        )
        self._workers = ThreadPoolExecutor(config.load_threads, thread_name_prefix="tierkv-load")

    def stop(self) -> None:
        """Finish queued saves and running loads, and end all threads."""
        self.publisher.stop()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._verifiers.shutdown()

    @contextmanager
    def absorb(self) -> Iterator[Attempt]:
        """Guard cache work: a CacheError is counted and means a miss, nothing more."""
        attempt = Attempt()
        try:
            yield attempt
        except CacheError as error:
            attempt.error = error
            self.cache_errors[error.code] += 1
            _log.debug("cache error, recomputing: %s", error)

    def _promote(self, node: PoolNode, keys: Sequence[BlockKey]) -> Sequence[Location | None]:
        """Have a node read blocks from disk; the measured time is the cost of L4."""
        found: Sequence[Location | None] = ()
        began = self._clock.now()
        with self.absorb():
            found = node.promote(keys)
        size = sum(place.length for place in found if place is not None)
        self.figures.promoted(size, self._clock.now() - began)
        return found

    @property
    def meters(self) -> dict[Tier, TierMeter]:
        """Tokens looked up in, and bytes loaded from, each tier."""
        return self.figures.meters

    @property
    def reachable(self) -> bool:
        """Whether any tier exists below L1."""
        return bool(self.finder.nodes) or self.finder.archive is not None

    def wants_locate(self, missing_tokens: int, prefill_rate: float) -> bool:
        """Return whether a lookup can pay off at all."""
        if self._policy is LoadPolicy.NEVER or not self.reachable:
            return False
        if self._policy is LoadPolicy.ALWAYS or not prefill_rate or not self._locate_s.value:
            return True
        if missing_tokens / prefill_rate > 1.0 / self._locate_s.value:
            return True
        now = self._clock.now()
        if now < self._locate_again_s:
            return False
        self._locate_again_s = now + PROBE_PAUSE_S  # Asks all the same: lookups may be faster now.
        return True

    def codec_of(self, request: GenerateRequest) -> KvCodec | None:
        """Return how a request's KV is stored below L1; None if the KV cannot be stored.

        None means an entropy codec on a node without tables: logged once, and the answers stay
        exact.
        """
        codec = request.kv_codec or self._layout.codec
        if self._pages.codecs.has(codec):
            return codec
        if codec not in self._refused_codecs:
            self._refused_codecs.add(codec)
            self.cache_errors["codec_unavailable"] += 1
            _log.warning(
                "KV of a namespace with codec %s is not cached: this model has no calibration; "
                "run tierkv calibrate",
                codec,
            )
        return None

    def locate(self, lookup: PromptLookup, answer: LocateAnswer) -> None:
        """Find the blocks behind a prompt's L1 pages; ``answer`` runs in a worker thread."""
        wanted = Wanted(lookup.keys, lookup.start, self._left_s(lookup.arrived_s))
        self._workers.submit(self._locate, lookup, wanted, answer)

    def _left_s(self, arrived_s: float | None) -> float | None:
        """Return the time left to the first token; None without a budget."""
        if not self._budget_s:
            return None
        return self._budget_s - (0.0 if arrived_s is None else self._clock.now() - arrived_s)

    def _locate(self, lookup: PromptLookup, wanted: Wanted, answer: LocateAnswer) -> None:
        found: list[tuple[Source, ...]] = []
        more: PoolPart | None = None
        began = self._clock.now()
        try:
            found = self._find(wanted, lookup)
            if lookup.part is not None:
                more = find_part(
                    lookup.part,
                    len(found),
                    known=self.known,
                    find=lambda keys, start: self._find(Wanted(keys, start, wanted.left_s), lookup),
                    worth_asking=self._worth_asking,
                )
        except Exception:  # noqa: BLE001 - worker's outermost frame; no answer would hang a request.
            self.cache_errors["internal"] += 1
            _log.exception("looking blocks up failed")
        self._locate_s.add(1.0, self._clock.now() - began)
        self._locate_again_s = self._clock.now() + PROBE_PAUSE_S
        answer(found, more)

    def _find(self, wanted: Wanted, lookup: PromptLookup) -> list[tuple[Source, ...]]:
        found = self.finder.find(wanted.keys, thorough=lookup.thorough)
        if lookup.codec is not KvCodec.ADAPTIVE:
            return found
        return self._levels.pick(wanted, found, thorough=lookup.thorough)

    def _worth_asking(self, tokens: int, start: int) -> bool:
        """Return whether computing these tokens takes longer than a lookup."""
        cost, per_s = self.figures.steps.cost, self._locate_s.value
        if self._policy is LoadPolicy.ALWAYS or cost is None or not per_s:
            return True
        return cost.spared_s(1.0 / per_s, start=start, tokens=tokens) > 0.0

    def worth_loading(self, part: PoolPart, codec: KvCodec, *, start: int, alone: bool) -> bool:
        """Return whether a partly matching block is worth loading."""
        if self._policy is LoadPolicy.ALWAYS:
            return True
        return worth_loading(part, codec, self.figures, start=start, alone=alone)

    def locate_chunks(
        self, chunks: Sequence[PromptChunk], answer: Callable[[FoundChunks], None]
    ) -> None:
        """Find chunks stored completely in the pool; ``answer`` runs in a worker thread."""
        self._workers.submit(self._locate_chunks, chunks, answer)

    def _locate_chunks(
        self, chunks: Sequence[PromptChunk], answer: Callable[[FoundChunks], None]
    ) -> None:
        found: FoundChunks = {}
        try:
            found = find_chunks(chunks, lambda keys: self.finder.find(keys, thorough=False))
        except Exception:  # noqa: BLE001 - worker's outermost frame; no answer would hang a request.
            self.cache_errors["internal"] += 1
            _log.exception("looking chunks up failed")
        answer(found)

    def worth_saving(self, tokens: int, context_tokens: int, codec: KvCodec) -> bool:
        """Return whether loading a block later is faster than computing these tokens again."""
        return self.decider.worth_saving(
            self._saves_to, codec, tokens=tokens, context_tokens=context_tokens
        )

    def saving_patience_s(self, context_tokens: int, codec: KvCodec) -> float:
        """Return how long to wait for room to save a full block: the time spared by one load."""
        return self.decider.spared_s(
            self._saves_to,
            codec,
            tokens=self._layout.block_tokens,
            context_tokens=context_tokens,
        )

    @property
    def _saves_to(self) -> Tier:
        return Tier.L2 if self.finder.home is not None else Tier.L3

    def avoided(self, sources: Sequence[tuple[Source, ...]]) -> None:
        """Record blocks that were found but not worth loading; probe the path when due."""
        if self._policy is LoadPolicy.AUTO and sources and self.figures.refused(sources):
            self._workers.submit(self._probe, list(sources))

    def _probe(self, sources: list[tuple[Source, ...]]) -> None:
        try:
            probe(sources, self.figures, absorb=self.absorb, clock=self._clock)
        except Exception:  # noqa: BLE001 - worker's outermost frame; no request waits for a probe.
            self.cache_errors["internal"] += 1
            _log.exception("probing a tier failed")
        self.figures.probe_ended(sources[0][0])

    def load(
        self,
        request: GenerateRequest,
        pages: Sequence[int],
        sources: Sequence[tuple[Source, ...]],
        *,
        arrived: Callable[[], None],
        ended: Callable[[LoadJob], None],
        ahead: bool = False,
    ) -> LoadJob:
        """Start loading blocks of a request into pages; the callbacks run in a worker thread.

        Args:
            request: the request; its namespace says how blocks are stored.
            pages: one page per block.
            sources: per block, copies to try.
            arrived: called after each layer.
            ended: called once, when no thread writes into the pages any more.
            ahead: the blocks are not awaited yet; pool nodes serve awaited blocks first.
        """
        # Blocks found for a request whose KV can't be stored here do not have this codec's size.
        codec = self.codec_of(request) or KvCodec.NONE
        job = make_job(pages, sources, self._layout.layers, codec=codec, ahead=ahead)
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

    def count_prompt(self, prompt_tokens: int, hits: HitTokens) -> None:
        """Count a request's prompt: each tier was asked for the tokens missing in nearer tiers."""
        left = prompt_tokens
        for tier, hit in zip(Tier, (hits.l1, hits.l2, hits.l3, hits.l4), strict=True):
            self.meters[tier].query_tokens += left
            self.meters[tier].hit_tokens += hit
            left -= hit

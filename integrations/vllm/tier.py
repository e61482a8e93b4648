"""The pool as a tier below vLLM's own offloading: ``TierKvTier``.

vLLM loads it by name (docs/engines.md) into its scheduler's process and calls it under its
manager's lock, so nothing waits. What it does stands in integrations/vllm/tier_core.py; here are
vLLM's types.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.settings import EngineSettings
from tierkv.integrations.vllm import tier_options, tier_stats
from tierkv.integrations.vllm.own_config import find_config
from tierkv.integrations.vllm.tier_chains import ChainEnds, parents_of
from tierkv.integrations.vllm.tier_core import Chunks, TierCore
from tierkv.integrations.vllm.tier_format import identity_of
from tierkv.integrations.vllm.tier_options import TierOptions
from tierkv.integrations.vllm.tier_seed import Seed, is_random
from tierkv.integrations.vllm.tier_transfers import Done
from tierkv.kvcore.clock import SystemClock


class TierKvTier(SecondaryTierManager):  # type: ignore[misc]  # base class is the engine's
    """vLLM's chunks in TierKV's pool."""

    medium: ClassVar[Medium | None] = Medium.CPU
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **tier_config: Any,
    ) -> None:
        """Make a tier; the pool is reached in the background.

        Args:
            offloading_spec: what vLLM offloads, and how.
            primary_kv_view: all chunks in CPU memory, one per row.
            tier_type: our name in vLLM's metrics.
            backpressure_detector: vLLM's own, if configured.
            tier_config: settings of integrations/settings.py and integrations/vllm/tier_options.py.

        Raises:
            ConfigError: a setting is unknown or can't be used.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = EngineSettings.read(
            tier_config, also=tier_options.NAMES, where=tier_options.WHERE
        )
        options = TierOptions.read(tier_config)
        self.locality = Locality(options.locality) if options.locality else None
        config = offloading_spec.config
        whole = find_config(config.engine_id)
        identity = identity_of(
            config,
            version=vllm_version,
            chunk_bytes=self.block_size_bytes,
            revision=options.revision or None,
            whole=whole,
        )
        door = PoolDoor(settings, identity, part="tier")
        if whole is not None and whole.lora_config is not None:
            door.complain(
                "adapters",
                "vLLM names chunks by an adapter's name and path, so weights that change under the "
                "same path are not noticed, not even behind a restart",
                hint="give an adapter that was trained again another name or path",
            )
        door.start()
        tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
        self._core = TierCore(
            door,
            Chunks(primary_kv_view.cast("B"), self.block_size_bytes, tokens / len(config.groups)),
            seed=_hash_seed,
            forget_on_reset=options.reset == "forget",
            clock=SystemClock(),
        )
        self._events: deque[OffloadingEvent] | None = None
        if options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = deque()

    @property
    def door(self) -> PoolDoor:
        """The way to the pool; its counters say what happened."""
        return self._core.door

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether the pool has a chunk: RETRY until it has answered; HIT is held from then."""
        there = self._core.look(key, req_context.req_id)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to copy chunks into the pool."""
        job = job_metadata
        context = job.req_context
        chain = context.get_state(ChainEnds)
        if chain is None:
            context.set_state(chain := ChainEnds())
        parents = parents_of(job.keys, context.get_offload_key_position, chain)
        self._core.store(job.job_id, list(job.keys), job.chunk_ids, parents)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to copy chunks out of the pool."""
        job = job_metadata
        self._core.load(job.job_id, list(job.keys), job.chunk_ids)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what ended since the last call."""
        finished = self._core.take_finished()
        for done in finished:
            if self._events is not None and not done.is_load and done.done:
                self._events.append(
                    OffloadingEvent(
                        keys=list(done.done),
                        medium=Medium.CPU,
                        removed=False,
                        locality=self.locality,
                        ownership=self.tier_type,
                    )
                )
        return [_result(done) for done in finished]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Have all chunks of a request offered where the pool could not take some of late."""
        if self._core.wants_all:
            return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Let go of what is held for a request."""
        self._core.end_request(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the pool what this step wanted to know; let go of what nobody waits for."""
        for request in context.new_req_ids:  # What it can get it has by now.
            self._core.end_request(request)
        self._core.end_step()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Tell the pool now and then of chunks that vLLM has itself, so that they stay."""
        self._core.touch(keys)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Tell of chunks that are in the pool now, where that is wanted."""
        while self._events:
            yield self._events.popleft()

    def drain_jobs(self) -> None:
        """Wait until no thread touches vLLM's memory; forget what was stored before."""
        self._core.drain()

    def shutdown(self) -> None:
        """Let go of everything; what is in the pool stays."""
        self._core.close()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Describe the metrics of ``get_stats``."""
        return tier_stats.definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what vLLM's own metrics of tiers don't say."""
        door = self._core.door
        return tier_stats.collect(up=door.up, held=self._core.held, counts=door.counts())


def _hash_seed() -> Seed | None:
    """Return from what vLLM's hashes begin; known once it has made a hasher, before requests."""
    value = getattr(kv_cache_utils, "NONE_HASH", None)
    if value is None:
        return None
    return Seed(bytes(value), is_random(kv_cache_utils.get_none_hash_seed()))


def _result(done: Done) -> JobResult:
    return JobResult(
        done.job_id,
        success=done.whole,
        successful_keys=None if done.whole or not done.is_load else tuple(done.done),
        transfer_time=done.took_s,
        transfer_bytes=done.moved_bytes,
    )

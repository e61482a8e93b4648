"""The pool as a connector of vLLM's: ``TierKvConnector``.

vLLM loads it by name (docs/engines.md), once in its scheduler's process and once in each worker.
What it does stands in connector_scheduler.py and connector_worker.py; here are vLLM's types, and
the way in which an engine goes on without us where its KV can't be shared.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from platform import machine
from typing import Any, Final

from torch.backends.cpu import get_cpu_capability
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.settings import PoolAccess
from tierkv.integrations.vllm.connector_plan import StepPlan, StepReport
from tierkv.integrations.vllm.connector_scheduler import SchedulerSide
from tierkv.integrations.vllm.connector_settings import (
    BETWEEN_STEPS,
    LAYER_BY_LAYER,
    ConnectorSettings,
)
from tierkv.integrations.vllm.connector_stats import Difference, TierKvPromMetrics, TierKvStats
from tierkv.integrations.vllm.connector_worker import StepResults, WorkerSide
from tierkv.integrations.vllm.kv_memory import UnfitMemoryError, open_memory
from tierkv.integrations.vllm.model_facts import (
    WorkerFacts,
    engine_identity,
    same_layout,
    why_unsupported,
    worker_facts,
)
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.layout import BlockLayout

_WHERE: Final = "kv_connector_extra_config"


@dataclass
class TierKvMetadata(KVConnectorMetadata):  # type: ignore[misc]  # base class is the engine's
    """A step's plan on its way to the workers."""

    plan: StepPlan


@dataclass
class TierKvWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """A worker's report on its way to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join two workers' reports."""
        assert isinstance(other, TierKvWorkerMetadata)
        return TierKvWorkerMetadata(self.report.merged(other.report))


@dataclass
class TierKvHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """What a worker saw of its memory, on its way to the scheduler."""

    facts: WorkerFacts


class TierKvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """vLLM's KV in TierKV's pool, block by block and layer by layer.

    It claims support of several groups of KV (HMA), though it shares only one: without that claim
    vLLM gives hybrid models more memory than they need, or does not start them.
    """

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make one half; the pool is reached in the background.

        Raises:
            ConfigError: a setting is unknown or can't be used.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        self._pool_settings = PoolAccess.read(
            extra, also=(*ConnectorSettings.names(), "revision"), where=_WHERE
        )
        self._settings = _usable(
            ConnectorSettings.read(
                extra, saves=transfer.is_kv_producer, loads=transfer.is_kv_consumer
            ),
            vllm_config,
        )
        self._revision: str | None = extra.get("revision")
        self._clock = SystemClock()
        self._difference = Difference()
        self._door: PoolDoor | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._results = StepResults()
        self._facts = WorkerFacts(None, why_unsupported(vllm_config, kv_cache_config) or "")
        if role is KVConnectorRole.SCHEDULER and self._facts.reason:
            self._stay_out(self._facts.reason)

    @property
    def door(self) -> PoolDoor | None:
        """The way to the pool; None where the engine's KV can't be shared."""
        return self._door

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss, so nothing is computed again for its sake."""
        return False

    # Both

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are awaited and saved one by one, which a full CUDA graph would skip."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Take any: the layout is part of the blocks' names."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler how this worker's KV lies."""
        return TierKvHandshake(self._facts)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn how the workers' KV lies, which names the blocks; begin."""
        if self._door is not None:  # Already out.
            return
        facts = same_layout(m.facts for m in metadata.values() if isinstance(m, TierKvHandshake))
        if facts.layout is None:
            self._stay_out(facts.reason)
            return
        self._door = self._open_door(facts.layout, rank=0, part="scheduler")
        self._complain_of_config(self._door)
        self._scheduler = SchedulerSide(
            self._door,
            self._settings,
            block_tokens=facts.layout.block_tokens,
            hash_tokens=self._kv_cache_config.hash_block_size or facts.layout.block_tokens,
            ranks=self._door.identity.ranks,
            now=self._clock.now,
        )

    def get_kv_connector_stats(self) -> TierKvStats | None:
        """Return what was counted since the last call."""
        return None if self._door is None else self._difference.take(self._door.counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierKvStats:
        """Make the class of our counters from their values."""
        return TierKvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierKvPromMetrics:
        """Register our counters with vLLM's own."""
        return TierKvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End; what is in the pool stays there."""
        if self._worker is not None:
            self._worker.close()
        if self._door is not None:
            self._door.close()

    # Scheduler's half

    def on_new_request(self, request: Any) -> None:
        """Ask for a request's blocks in the background."""
        if self._scheduler is not None:
            self._scheduler.arrived(request, self._local_tokens(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens behind the computed ones the pool holds for us; never waits."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.loadable(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._settings.in_step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of where blocks shall be loaded to."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Plan a step."""
        if self._scheduler is None:
            return TierKvMetadata(StepPlan())
        return TierKvMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear what workers did; blocks computed behind a failed load leave vLLM's own cache."""
        if self._scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        poisoned = self._scheduler.heard(
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids,
            meta.report if isinstance(meta, TierKvWorkerMetadata) else None,
        )
        for request_id, place in poisoned.items():
            self._evict_behind(request_id, place)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; its blocks are kept while they are being saved."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.over(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model that may have several groups, of which we share none."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """Use nothing that was stored before; vLLM asks for it when weights were replaced."""
        if self._scheduler is not None and self._door is not None:
            self._scheduler.reset(secrets.token_bytes(16))
            self._door.complain(
                "cache_reset",
                "the cache was reset, so from now on this engine shares nothing with others",
                hint="start the engine again, once its weights are those of its model's folder",
            )
        return True

    # Workers' half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where the KV lies."""
        if self._facts.reason:
            return
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        try:
            memory = open_memory(
                kv_caches, blocks=self._kv_cache_config.num_blocks, block_tokens=spec.block_size
            )
        except UnfitMemoryError as error:
            self._facts = WorkerFacts(None, str(error))
            return
        self._facts = worker_facts(
            self._vllm_config,
            self._kv_cache_config,
            memory,
            version=vllm_version,
            processor=f"{machine()}-{get_cpu_capability()}",
        )
        if self._facts.layout is None:
            return
        rank = get_tensor_model_parallel_rank()
        self._door = self._open_door(self._facts.layout, rank=rank, part=f"rank{rank}")
        self._worker = WorkerSide(
            self._door,
            self._settings,
            memory,
            block_tokens=spec.block_size,
            now=self._clock.now,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait until nothing reads blocks that are about to be overwritten."""
        if self._worker is not None and isinstance(kv_connector_metadata, TierKvMetadata):
            self._worker.vacate(kv_connector_metadata.plan.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: the first hook that comes before the forward pass in every case."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, TierKvMetadata):
            self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer of what this step loads."""
        if self._worker is not None:
            self._worker.layer_needed(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Let one layer of what this step computes be saved."""
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """End a step; saves go on in the background."""
        if self._worker is not None:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Tell whose saves and loads have ended."""
        if self._worker is None:
            return None, None
        self._results = self._worker.results()
        return self._results.sent or None, self._results.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell where loads failed; follows ``get_finished`` in the same step."""
        failed, self._results.failed = self._results.failed, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell what was not saved, that the step is over, and how long loads took."""
        report = self._results.report
        said = report.unsaved or report.step or report.load_s
        return TierKvWorkerMetadata(report) if said else None

    # Inside

    def _open_door(self, layout: BlockLayout | None, *, rank: int, part: str) -> PoolDoor:
        identity = engine_identity(
            self._vllm_config, layout, version=vllm_version, rank=rank, revision=self._revision
        )
        door = PoolDoor(self._pool_settings, identity, part=part)
        door.start()
        return door

    def _stay_out(self, reason: str) -> None:
        """Go on without the pool, and say why."""
        self._door = self._open_door(None, rank=0, part="scheduler")
        self._door.complain(
            "unsupported", reason, hint="the engine serves on; docs/engines.md lists what works"
        )

    def _complain_of_config(self, door: PoolDoor) -> None:
        transfer = self._vllm_config.kv_transfer_config
        if self._settings.loads and transfer.kv_load_failure_policy != "recompute":
            door.complain(
                "load_failure_policy",
                "kv_load_failure_policy is not recompute: a request whose load fails would fail",
                hint='set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            )
        asked = transfer.kv_connector_extra_config.get("load_mode")
        if asked == LAYER_BY_LAYER and not self._settings.in_step:
            door.complain(
                "load_mode",
                "load_mode layer_by_layer does not go with asynchronous scheduling or speculative "
                "decoding, so requests wait for their blocks between steps",
                hint="--no-async-scheduling, and no --speculative-config",
            )

    def _local_tokens(self, request: Any) -> int:
        """Return how many leading tokens vLLM's own cache has, so that nobody asks for those."""
        manager = self._kv_cache_manager
        if manager is None or getattr(request, "kv_cache_report_mode", "") == "full":
            return 0  # The latter would have vLLM publish events.
        return int(manager.get_computed_blocks(request)[1])

    def _evict_behind(self, request_id: str, place: int) -> None:
        manager = self._kv_cache_manager
        if manager is None:
            return
        block_ids = manager.get_block_ids(request_id)[0]
        if place in block_ids:
            manager.evict_blocks(set(block_ids[block_ids.index(place) :]))


def _usable(settings: ConnectorSettings, vllm_config: Any) -> ConnectorSettings:
    """Return settings that are safe: what a load spoilt must be taken back in its own step.

    Steps that overlap can't, and with speculation vLLM asks what failed before the step is over.
    """
    overlaps = vllm_config.scheduler_config.async_scheduling
    if settings.in_step and (overlaps or vllm_config.speculative_config is not None):
        return replace(settings, load_mode=BETWEEN_STEPS)
    return settings

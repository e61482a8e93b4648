"""The pool as a KV connector of vLLM: ``TierKvConnector``.

vLLM loads the class by name (docs/engines.md), once in the scheduler's process and once in each
worker. The work is done in connector_scheduler.py and connector_worker.py. This file converts
vLLM's types, and lets an engine with unsupported KV run without the pool.
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
from tierkv.integrations.vllm.connector_book import StepPlan, StepReport
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
    """A step's plan, sent to the workers."""

    plan: StepPlan


@dataclass
class TierKvWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """A worker's report, sent to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the reports of two workers."""
        assert isinstance(other, TierKvWorkerMetadata)
        return TierKvWorkerMetadata(self.report.merged(other.report))


@dataclass
class TierKvHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """A worker's facts about its memory, sent to the scheduler."""

    facts: WorkerFacts


class TierKvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """vLLM's KV in TierKV's pool, block by block and layer by layer.

    The class claims support of several groups of KV (HMA), but shares only models with one group.
    Without the claim vLLM gives hybrid models more memory than needed, or does not start them.
    """

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Create one half; the pool is connected in the background.

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
        """The door to the pool; None before the layout is known, or in an unsupported worker."""
        return self._door

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost save is a later miss, and needs no recomputation."""
        return False

    # Both

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: layers are awaited and saved one by one, which a full CUDA graph would skip."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Accept any layout: the layout is part of the blocks' names."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the form of this worker's KV for the scheduler."""
        return TierKvHandshake(self._facts)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn the form of the workers' KV, which is part of the blocks' names, and begin."""
        if self._door is not None:  # The scheduler has given up the pool already.
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
        """Return the counts since the last call."""
        return None if self._door is None else self._difference.take(self._door.counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierKvStats:
        """Create TierKvStats from the values of counters."""
        return TierKvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierKvPromMetrics:
        """Register the connector's counters with vLLM's own."""
        return TierKvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End; blocks in the pool stay there."""
        if self._worker is not None:
            self._worker.close()
        if self._door is not None:
            self._door.close()

    # Scheduler's half

    def on_new_request(self, request: Any) -> None:
        """Look up a request's blocks in the background."""
        if self._scheduler is not None:
            self._scheduler.arrived(request, self._local_tokens(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of loadable tokens after the computed ones; waits only if idle."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.loadable(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._settings.in_step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks to load into."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Finish the plan of a step."""
        if self._scheduler is None:
            return TierKvMetadata(StepPlan())
        return TierKvMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' results; drop blocks behind a failed load from vLLM's cache."""
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
        """End a request; vLLM keeps the request's blocks while they are being saved."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.over(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request of a model with several groups, which are not shared."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """Stop using stored blocks; vLLM calls ``reset_cache`` after the weights were replaced."""
        if self._scheduler is not None and self._door is not None:
            self._scheduler.reset(secrets.token_bytes(16))
            self._door.complain(
                "cache_reset",
                "the cache was reset, so from now on this engine shares nothing with others",
                hint="Restart the engine with the weights of its model folder.",
            )
        return True

    # Workers' half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn the location of the KV."""
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
        """Wait until no thread reads blocks that are about to be overwritten."""
        if self._worker is not None and isinstance(kv_connector_metadata, TierKvMetadata):
            self._worker.vacate(kv_connector_metadata.plan.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: the first hook that always precedes the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, TierKvMetadata):
            self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer of this step's loads."""
        if self._worker is not None:
            self._worker.layer_needed(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Start saving one computed layer of this step."""
        if self._worker is not None:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """End a step; saves continue in the background."""
        if self._worker is not None:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose saves and the requests whose loads have ended."""
        if self._worker is None:
            return None, None
        self._results = self._worker.results()
        return self._results.sent or None, self._results.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks with failed loads; follows ``get_finished`` in the same step."""
        failed, self._results.failed = self._results.failed, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report failed saves, the end of the step, and the durations of loads."""
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
        """Run without the pool, and complain with the reason."""
        self._door = self._open_door(None, rank=0, part="scheduler")
        self._door.complain(
            "unsupported", reason, hint="The engine continues; docs/engines.md lists what works."
        )

    def _complain_of_config(self, door: PoolDoor) -> None:
        transfer = self._vllm_config.kv_transfer_config
        if self._settings.loads and transfer.kv_load_failure_policy != "recompute":
            door.complain(
                "load_failure_policy",
                "kv_load_failure_policy is not recompute: a request whose load fails would fail",
                hint='Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
            )
        asked = transfer.kv_connector_extra_config.get("load_mode")
        if asked == LAYER_BY_LAYER and not self._settings.in_step:
            door.complain(
                "load_mode",
                "load_mode layer_by_layer does not work with asynchronous scheduling or "
                "speculative decoding, so requests wait for their blocks between steps",
                hint="Start with --no-async-scheduling and without --speculative-config.",
            )

    def _local_tokens(self, request: Any) -> int:
        """Return the number of leading tokens in vLLM's own cache, which need no lookup."""
        manager = self._kv_cache_manager
        if manager is None or getattr(request, "kv_cache_report_mode", "") == "full":
            return 0  # With "full", the call would make vLLM publish events.
        return int(manager.get_computed_blocks(request)[1])

    def _evict_behind(self, request_id: str, place: int) -> None:
        manager = self._kv_cache_manager
        if manager is None:
            return
        block_ids = manager.get_block_ids(request_id)[0]
        if place in block_ids:
            manager.evict_blocks(set(block_ids[block_ids.index(place) :]))


def _usable(settings: ConnectorSettings, vllm_config: Any) -> ConnectorSettings:
    """Return safe settings: blocks spoilt by a load must be taken back within the same step.

    Overlapping steps prevent a correction, and with speculation vLLM asks for failures before the
    step is over.
    """
    overlaps = vllm_config.scheduler_config.async_scheduling
    if settings.in_step and (overlaps or vllm_config.speculative_config is not None):
        return replace(settings, load_mode=BETWEEN_STEPS)
    return settings

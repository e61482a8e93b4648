"""Metrics of the tier for vLLM's own ``/metrics``, beside those vLLM keeps of every tier."""

from __future__ import annotations

from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingGaugeMetadata, OffloadingMetricMetadata

UP: Final = "vllm:kv_offload_tierkv_up"
HELD: Final = "vllm:kv_offload_tierkv_held_chunks"
EVENTS: Final = "vllm:kv_offload_tierkv_events"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Describe the metrics that ``collect`` fills."""
    return {
        UP: OffloadingGaugeMetadata(
            documentation="Whether TierKV's pool is in use: 1, or 0 while it is away."
        ),
        HELD: OffloadingGaugeMetadata(
            documentation="Chunks that TierKV's pool holds for requests that will load them."
        ),
        EVENTS: OffloadingGaugeMetadata(
            documentation="What happened between this engine and TierKV's pool so far, by kind; "
            "complaints_ are what tierkv.nodes says in words.",
            labelnames=("kind",),
        ),
    }


def collect(*, up: bool, held: int, counts: dict[str, int]) -> OffloadingConnectorStats:
    """Put the figures of now together."""
    stats = OffloadingConnectorStats()
    stats.set_gauge(UP, int(up))
    stats.set_gauge(HELD, held)
    for kind, count in counts.items():
        stats.set_gauge(EVENTS, count, (kind,))
    return stats

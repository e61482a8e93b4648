"""The connector's counters in vLLM's own log and ``/metrics``: ``vllm:tierkv_events_total``."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

_SHOWN: Final = (
    "query_tokens",
    "hit_tokens",
    "load_failed_tokens",
    "computed_instead_tokens",
    "lookup_late",
    "promise_late",
    "stored_tokens",
    "read_bytes",
    "write_bytes",
)


class TierKvStats(KVConnectorStats):  # type: ignore[misc]  # base class is the engine's
    """Counts since the last look, by name; see docs/engines.md."""

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another process's counters."""
        return TierKvStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Return the counters."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not self.data


class Difference:
    """Computes the counts since the previous call."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def take(self, counts: dict[str, int]) -> TierKvStats | None:
        """Return the new counts; None without new counts."""
        shown: dict[str, int] = {name: counts[name] for name in _SHOWN if name in counts}
        new = {k: n - self._before.get(k, 0) for k, n in shown.items() if n != self._before.get(k)}
        self._before = shown
        return TierKvStats(data=new) if new else None


class TierKvPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """One counter for Prometheus, by kind."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counter."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = self._counter_cls(
            name="vllm:tierkv_events",
            documentation="Tokens, bytes and events between this engine and TierKV's pool, by kind",
            labelnames=[*labelnames, "kind"],
        )
        self._by_kind = {
            kind: create_metric_per_engine(
                counter, {i: [*values, kind] for i, values in per_engine_labelvalues.items()}
            )
            for kind in _SHOWN
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add new counts."""
        for kind, count in transfer_stats_data.items():
            if kind in self._by_kind:
                self._by_kind[kind][engine_idx].inc(count)

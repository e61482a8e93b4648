"""/metrics: counters of all AI calls (SQL and REST), and of the scheduler, for Prometheus.

Series exist at 0 before the first call. Label values come from registered sets only: served models,
tiers, outcomes, kinds of cache errors. A label never contains a tenant's text, a session or a
request id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from tierkv.dbfront.accounts.ended_call import CallEnd, ModelRequest
from tierkv.kvcore import errors
from tierkv.kvcore.block import Tier
from tierkv.scheduler.routing_stats import SchedulerStats
from tierkv.scheduler.scale_signals import ScaleSignals

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
MODELS_KEPT = 256
OTHER_MODEL = "other"
_NODES: Final = "tierkv_nodes"
"""The nodes are the same for all workers of a front."""

_SCALE: Final = "tierkv_scale_"
"""Gauges of all nodes, of which each worker has its own view."""

Family = tuple[str, str, str, list[Any]]
"""Name, documentation, type, and the samples: name, labels, value."""


class Metrics:
    """Counters of one front, in a separate registry.

    Attributes:
        registry: rendered by /metrics; other components may add collectors.
        scale: the signals of autoscaling; None without a scheduler.
    """

    def __init__(
        self,
        scheduler: Callable[[], SchedulerStats] | None = None,
        scale: Callable[[], ScaleSignals] | None = None,
    ) -> None:
        """Create the metrics.

        Args:
            scheduler: the dispatcher's ``snapshot``; None omits the scheduler's series.
            scale: the dispatcher's ``scale``; None omits the signals of autoscaling.
        """
        self.registry = CollectorRegistry()
        self.scale = scale
        self._models: set[str] = set()
        self._requests = self._counter("requests", "AI calls by how they ended", "outcome")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished calls")
        self._completion = self._counter("completion_tokens", "Tokens generated")
        self._cached = self._counter("cached_answers", "Answers from the answer cache")
        self._hits = self._counter("hit_tokens", "Prompt tokens loaded, not computed", "tier")
        self._written = self._counter("written_tokens", "Tokens whose KV went to the pool")
        self._blended = self._counter("blended_tokens", "Hit tokens reused out of place")
        self._recomputed = self._counter("recomputed_tokens", "Reused tokens computed again")
        self._ttft = self._histogram("time_to_first_token_seconds", "From call to first token")
        self._duration = self._histogram("call_duration_seconds", "From call to last token")
        if scheduler is not None:
            self.registry.register(_SchedulerCollector(scheduler))
        if scale is not None:
            self.registry.register(_ScaleCollector(scale))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tierkv_{name}", text, ("model", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"tierkv_{name}", text, ("model",), buckets=TTFT_BUCKETS_S, registry=self.registry
        )

    def register_models(self, names: Iterable[str]) -> None:
        """Create all series of the models."""
        for name in names:
            if name in self._models or len(self._models) >= MODELS_KEPT:
                continue
            self._models.add(name)
            for end in CallEnd:
                self._requests.labels(name, end.value)
            for tier in Tier:
                self._hits.labels(name, tier.value)
            for counter in (self._prompt, self._completion, self._written):
                counter.labels(name)
            for counter in (self._blended, self._recomputed, self._cached):
                counter.labels(name)
            for histogram in (self._ttft, self._duration):
                histogram.labels(name)

    def take(self, request: ModelRequest) -> None:
        """Count an ended request; a reducer of the events of dbfront/generation/generation.py."""
        self.register_models((request.model,))
        model = request.model if request.model in self._models else OTHER_MODEL
        self._requests.labels(model, request.end.value).inc()
        if request.cached:  # No model worked for it.
            self._cached.labels(model).inc()
            return
        if request.ttft_s:
            self._ttft.labels(model).observe(request.ttft_s)
        self._duration.labels(model).observe(request.total_s)
        usage = request.usage
        if usage is None:
            return
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._completion.labels(model).inc(usage.completion_tokens)
        self._written.labels(model).inc(usage.written_tokens)
        self._blended.labels(model).inc(usage.blended_tokens)
        self._recomputed.labels(model).inc(usage.recomputed_tokens)
        hits = usage.hit_tokens
        for tier, tokens in zip(Tier, (hits.l1, hits.l2, hits.l3, hits.l4), strict=True):
            self._hits.labels(model, tier.value).inc(tokens)

    def families(self) -> list[Family]:
        """Return all series as values of JSON, for another worker of the front."""
        return [
            (each.name, each.documentation, each.type, [list(one[:3]) for one in each.samples])
            for each in self.registry.collect()
        ]

    def render(self, others: Sequence[list[Family]] = ()) -> tuple[bytes, str]:
        """Return the text of all series, and the content type.

        Args:
            others: ``families`` of the other workers, which are added.
        """
        if not others:
            return generate_latest(self.registry), CONTENT_TYPE_LATEST
        joined = CollectorRegistry()
        joined.register(_JoinedCollector([self.families(), *others]))
        return generate_latest(joined), CONTENT_TYPE_LATEST


class _JoinedCollector(Collector):
    """Series of several workers as one: sums, except where workers count the same things."""

    def __init__(self, workers: Sequence[list[Family]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """Yield each family once."""
        joined: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, ...], tuple[dict[str, str], list[float]]]] = {}
        for name, text, kind, samples in chain.from_iterable(self._workers):
            joined.setdefault(name, Metric(name, text, kind))
            known = values.setdefault(name, {})
            for sample, labels, value in samples:
                key = (sample, *chain.from_iterable(labels.items()))
                known.setdefault(key, (labels, []))[1].append(value)
        for name, metric in joined.items():
            for (sample, *_), (labels, found) in values[name].items():
                metric.add_sample(sample, labels, _join(sample, found))
            yield metric


def _join(sample: str, values: Sequence[float]) -> float:
    if sample == _NODES or sample.startswith(_SCALE):
        return max(values)
    return min(values) if sample.endswith("_created") else sum(values)


class _ScaleCollector(Collector):
    """Reads the signals of autoscaling when Prometheus asks."""

    def __init__(self, scale: Callable[[], ScaleSignals]) -> None:
        self._scale = scale

    def collect(self) -> Iterator[Metric]:
        """Yield gauges by model, and the pool's."""
        signals = self._scale()
        for name, text, value in (
            ("queue_seconds", "Mean time of the prompts queued at a node", "queue_s"),
            ("ttft_seconds", "Predicted time to first token, p90 of a minute", "ttft_s"),
            ("kv_usage_ratio", "Mean share of KV pages in use", "kv_usage"),
            ("hit_ratio", "Prompt tokens not to be computed, of a minute", "hit_ratio"),
        ):
            gauge = GaugeMetricFamily(f"{_SCALE}{name}", text, labels=("model",))
            for model in signals.models[:MODELS_KEPT]:
                if (known := getattr(model, value)) is not None:
                    gauge.add_metric((model.model,), known)
            yield gauge
        for name, text, count in (
            ("pool_capacity_bytes", "Memory of the pool", signals.pool.capacity_bytes),
            ("pool_used_bytes", "Memory of the pool that holds KV", signals.pool.used_bytes),
        ):
            yield GaugeMetricFamily(f"{_SCALE}{name}", text, count)


class _SchedulerCollector(Collector):
    """Reads the scheduler when Prometheus asks."""

    def __init__(self, snapshot: Callable[[], SchedulerStats]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of the scheduler's counters."""
        stats = self._snapshot()
        yield GaugeMetricFamily(
            "tierkv_requests_in_flight", "Requests at nodes", stats.live - stats.waiting
        )
        yield GaugeMetricFamily(
            "tierkv_requests_queued", "Requests that wait for a node", stats.waiting
        )
        nodes = GaugeMetricFamily(_NODES, "Compute nodes", labels=("state",))
        nodes.add_metric(("alive",), stats.nodes_alive)
        nodes.add_metric(("suspended",), stats.nodes_suspended)
        yield nodes
        for name, text, value in (
            ("dispatched", "Requests sent to a node", stats.dispatched),
            ("resent", "Requests sent again after a loss", stats.resent),
            ("handoffs", "Answers continued at a decode node", stats.handoffs),
            (
                "prefetches",
                "Prompts loaded by a decode node while being computed",
                stats.prefetches,
            ),
            ("located", "Chains the directory was asked for", stats.located),
            ("waits", "Times a request had to wait for room at a node", stats.queued),
            ("rejected", "Requests refused when they came: too many, or too late", stats.rejected),
            ("leases_reserved", "Chains kept for requests of this front", stats.leases_reserved),
            ("leases_committed", "Leases ended by use", stats.leases_committed),
            ("leases_aborted", "Leases ended without use", stats.leases_aborted),
            ("leases_lost", "Leases the directory knew nothing of", stats.leases_lost),
        ):
            yield CounterMetricFamily(f"tierkv_{name}", text, value)
        family = CounterMetricFamily(
            "tierkv_front_cache_errors", "Failures that became a miss", labels=("kind",)
        )
        counts = dict.fromkeys(_cache_error_kinds(), 0) | dict(stats.cache_errors)
        for kind, count in counts.items():
            family.add_metric((kind,), count)
        yield family


def _cache_error_kinds() -> list[str]:
    return [errors.CacheError.code, *(kind.code for kind in errors.CacheError.__subclasses__())]

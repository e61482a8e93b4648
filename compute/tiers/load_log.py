"""Decisions of the loading controller, with predictions and outcomes.

The engine's thread writes; reports and people read. The last decisions are kept, all are counted.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field

from tierkv.costing.correction import Beside, FirstTokenFit
from tierkv.kvcore.node import LoadChoiceStats

_log = logging.getLogger(__name__)
_KEPT = 256


@dataclass(slots=True)
class LoadRecord:
    """One decision.

    Attributes:
        request_id: the request.
        kind: ``load``, ``part`` or ``compute``; ``blend`` when chunks are blended.
        choice: the plan, as in ``alternatives``.
        found_blocks: blocks that could have been loaded.
        planned_s: seconds from the decision to the first token, by the measured costs; 0.0 before
            any measurement.
        predicted_s: ``planned_s``, corrected by what recent plans of the same kind took.
        alternatives: predictions for the rejected plans.
        decided_at_s: the engine's clock.
        beside: what stood beside the prompt.
        actual_s: measured seconds; NaN until known, and for good without a first token.
    """

    request_id: str
    kind: str
    choice: str
    found_blocks: int
    planned_s: float
    predicted_s: float
    alternatives: tuple[tuple[str, float], ...]
    decided_at_s: float
    beside: Beside
    actual_s: float = math.nan


@dataclass(slots=True)
class _LoadSums:
    decisions: int = 0
    measured: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    error_s: float = 0.0


@dataclass(slots=True)
class LoadLog:
    """A bounded log of decisions with sums over all of them.

    Attributes:
        recent: the last decisions, oldest first.
    """

    recent: deque[LoadRecord] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _sums: dict[str, _LoadSums] = field(default_factory=dict)
    _fits: dict[str, FirstTokenFit] = field(default_factory=dict)

    def decided(
        self,
        request_id: str,
        *,
        kind: str,
        choice: str,
        found_blocks: int,
        planned_s: float,
        alternatives: tuple[tuple[str, float], ...],
        now: float,
        beside: Beside,
    ) -> LoadRecord:
        """Record a decision, and predict the time of the first token."""
        fit = self._fits.setdefault(kind, FirstTokenFit())
        predicted_s = fit.predict_s(planned_s, beside) if planned_s else 0.0
        record = LoadRecord(
            request_id,
            kind,
            choice,
            found_blocks,
            planned_s,
            predicted_s,
            alternatives,
            now,
            beside,
        )
        self.recent.append(record)
        self._sums.setdefault(kind, _LoadSums()).decisions += 1
        return record

    def ended(self, record: LoadRecord, first_token_s: float) -> None:
        """Record the time of the first token; negative: never."""
        if first_token_s >= 0.0:
            record.actual_s = first_token_s - record.decided_at_s
        if record.predicted_s > 0.0 and not math.isnan(record.actual_s):
            self._fits[record.kind].learn(record.planned_s, record.beside, record.actual_s)
            sums = self._sums[record.kind]
            sums.measured += 1
            sums.predicted_s += record.predicted_s
            sums.actual_s += record.actual_s
            sums.error_s += abs(record.predicted_s - record.actual_s)
        others = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in record.alternatives)
        _log.info(
            "request %s: found %d blocks, chose %s, predicted %.4f s, took %.4f s (%s)",
            record.request_id,
            record.found_blocks,
            record.choice,
            record.predicted_s,
            record.actual_s,
            others,
        )

    def stats(self) -> tuple[LoadChoiceStats, ...]:
        """Return the sums by kind."""
        return tuple(
            LoadChoiceStats(kind, s.decisions, s.measured, s.predicted_s, s.actual_s, s.error_s)
            for kind, s in sorted(self._sums.copy().items())
        )

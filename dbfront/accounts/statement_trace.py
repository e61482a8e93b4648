"""The trace of a statement's AI calls, round by round, for EXPLAIN ANALYZE and the views.

dbfront/statement/ai_statement.py fills the trace while a statement runs; dbfront/explain/plan.py
reads the trace. The engine cannot distinguish calls of equal text, so calls are counted by form
(sql/calls/ai_call.py). Each distinct call is charged to one form, of the lowest stage among the
asking forms, and the sum over all forms equals AiStats.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.dbfront.accounts.ended_call import EndedCall
from tierkv.dbfront.accounts.statistics import FilterOrder
from tierkv.dbfront.contracts import PlanSummary
from tierkv.kvcore.request import HitTokens

MOST_ROUNDS = 256
"""Maximum number of separate rounds; later rounds are added to the last round."""


@dataclass(slots=True)
class CascadeTrace:
    """What a cascade did (dbfront/statement/cascade.py): distinct calls of one form.

    Attributes:
        asked: agreement asked for.
        by_model: calls answered by the model, the sample included.
        by_classifier: calls answered by the classifier.
        vectors: vectors asked for.
        checked: rows on which the answers of both were compared; only of checks that were passed.
        agreed: checked rows with equal answers.
        bound: lower bound of the share of agreement, with 95 % confidence.
        unused: why the model answered all rows of the last batch without a classifier.
    """

    asked: float
    by_model: int = 0
    by_classifier: int = 0
    vectors: int = 0
    checked: int = 0
    agreed: int = 0
    bound: float = 0.0
    unused: str = ""

    @property
    def is_used(self) -> bool:
        """True if a classifier passed its check."""
        return self.checked > 0


@dataclass(slots=True)
class FormTrace:
    """Counters of calls with the same form.

    Attributes:
        rows: calls with a prompt made by the engine for the final rows.
        distinct: distinct calls, answered or failed, over all rounds.
        asked: distinct calls charged to the form; the remaining calls were asked earlier by other
            forms.
        requests: requests to models for the charged calls.
        cached_answers: answers from the answer cache for the charged calls.
        errors: charged calls that failed.
        retries: requests sent again after a failure.
        prompt_tokens: of answered requests, like ``completion_tokens`` and ``hit_tokens``.
        ttft_s: times to first token of answered requests.
        wall_s: sum over batches of the time from the batch's start to the last answer for the form.
        cascade: None if the calls ask for no cascade.
    """

    rows: int = 0
    distinct: int = 0
    asked: int = 0
    requests: int = 0
    cached_answers: int = 0
    errors: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    hit_tokens: HitTokens = field(default_factory=HitTokens)
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    wall_s: float = 0.0
    cascade: CascadeTrace | None = None

    @property
    def dedup_ratio(self) -> float:
        """Share of the rows without a call of their own."""
        return max(0.0, 1.0 - self.distinct / self.rows) if self.rows else 0.0

    def ttft_quantile_s(self, quantile: float) -> float:
        """Return a quantile of the times to first token, as an observed value; 0.0 without any."""
        if not self.ttft_s:
            return 0.0
        return sorted(self.ttft_s)[math.ceil(quantile * len(self.ttft_s)) - 1]

    def take(self, call: EndedCall) -> None:
        """Count a call of the form."""
        cost = call.cost
        self.requests += len(cost.nodes)
        self.cached_answers += cost.cached_answers
        self.errors += call.failed and not call.is_vector
        self.retries += call.retries
        self.prompt_tokens += cost.usage.prompt_tokens
        self.completion_tokens += cost.usage.completion_tokens
        self.hit_tokens = self.hit_tokens + cost.usage.hit_tokens
        self.ttft_s.extend(cost.first_tokens_s)


@dataclass(slots=True)
class RoundTrace:
    """One run of the engine, and the calls evaluated after the run.

    Attributes:
        lookups: calls with a prompt made by the engine, by form key.
        asked: distinct calls evaluated after the run, by form key.
        engine_s: seconds in the engine.
        model_s: seconds waiting for answers.
        plan: summary of the call plan.
        runs: number of engine runs in this entry.
    """

    lookups: Counter[int]
    engine_s: float
    asked: Counter[int] = field(default_factory=Counter)
    model_s: float = 0.0
    plan: PlanSummary = field(default_factory=PlanSummary)
    runs: int = 1


class StatementTrace:
    """The trace of a statement's calls; a reducer of ended calls.

    Mutated only by the AiStatement that owns the trace.

    Attributes:
        forms: counters by form key, in the order of the text.
        rounds: traces of the rounds, in order.
        nodes: answered requests by node.
        executor: ``replay``, or ``stream``.
        filter_order: observations and order of several AI filters.
        why_not_stream: reason for replaying a statement whose text allows streaming.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        self.forms: dict[int, FormTrace] = {key: FormTrace() for key in keys}
        self.rounds: list[RoundTrace] = []
        self.nodes: Counter[str] = Counter()
        self.executor = "replay"
        self.why_not_stream = ""
        self.filter_order: FilterOrder | None = None
        self._batch_began_s = 0.0
        self._batch_walls: dict[int, float] = {}

    def ran(self, lookups: Mapping[int, int], engine_s: float) -> None:
        """Record one run of the engine."""
        if len(self.rounds) < MOST_ROUNDS:
            self.rounds.append(RoundTrace(Counter(lookups), engine_s))
            return
        last = self.rounds[-1]
        last.lookups.update(lookups)
        last.engine_s += engine_s
        last.runs += 1

    def settled(self, lookups: Mapping[int, int], answered: Mapping[int, int]) -> None:
        """Record the last run's rows as final; ``answered`` counts distinct calls since the start.

        A statement run in pieces settles several times.
        """
        for key, form in self.forms.items():
            form.rows += lookups[key]
            form.distinct = answered[key]

    def discard_rows(self) -> None:
        """Discard the rows of collecting runs; the statement itself makes these calls again."""
        for form in self.forms.values():
            form.rows = 0

    def batch_begins(self, keys: Sequence[int], now_s: float) -> None:
        """Record the start of a batch after the last run; each call is charged to one form."""
        self._batch_began_s, self._batch_walls = now_s, {}
        if self.rounds:
            self.rounds[-1].asked.update(keys)
        for key in keys:
            self.forms[key].asked += 1

    def take(self, call: EndedCall) -> None:
        """Count an ended call."""
        self.forms[call.form].take(call)
        self.nodes.update(call.cost.nodes)
        self._batch_walls[call.form] = call.ended_s - self._batch_began_s

    def batch_ended(self, plan: PlanSummary, model_s: float) -> None:
        """Record the end of the batch."""
        for key, wall_s in self._batch_walls.items():
            self.forms[key].wall_s += wall_s
        if self.rounds:
            last = self.rounds[-1]
            last.model_s += model_s
            last.plan += plan

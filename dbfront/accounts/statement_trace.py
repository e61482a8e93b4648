"""What became of each AI call as written, round by round, for EXPLAIN ANALYZE and the views.

Filled by dbfront/statement/ai_statement.py while a statement runs, read by dbfront/explain/plan.py.
The engine can't tell calls of equal text apart, so what is counted is a form
(sql/calls/ai_call.py); each distinct call is on the account of one form, of the lowest stage that
asked, and the forms add up to AiStats.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.dbfront.accounts.ended_call import EndedCall
from tierkv.dbfront.accounts.filter_order import FilterOrder
from tierkv.dbfront.contracts import PlanSummary
from tierkv.kvcore.request import HitTokens

MOST_ROUNDS = 256
"""Rounds that are told one by one; what comes after is added to the last."""


@dataclass(slots=True)
class FormTrace:
    """Counters of the calls that are written alike.

    Attributes:
        rows: calls with a prompt that the engine made for the final rows.
        distinct: different calls among all it ever made that were answered, or failed.
        asked: of those, how many were on its account; others had asked for the rest before.
        requests: what models were asked for these.
        errors: of those asked, how many failed.
        retries: requests that were sent again after a failure.
        prompt_tokens: of answered requests; so are ``completion_tokens`` and ``hit_tokens``.
        ttft_s: times to first token of answered requests.
        wall_s: from the beginning of each batch with its calls to the last answer to them.
    """

    rows: int = 0
    distinct: int = 0
    asked: int = 0
    requests: int = 0
    errors: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    hit_tokens: HitTokens = field(default_factory=HitTokens)
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    wall_s: float = 0.0

    @property
    def dedup_ratio(self) -> float:
        """Share of the rows that needed no call of their own."""
        return max(0.0, 1.0 - self.distinct / self.rows) if self.rows else 0.0

    def ttft_quantile_s(self, quantile: float) -> float:
        """Return a quantile of the times to first token, one that occurred; 0.0 without any."""
        if not self.ttft_s:
            return 0.0
        return sorted(self.ttft_s)[math.ceil(quantile * len(self.ttft_s)) - 1]

    def take(self, call: EndedCall) -> None:
        """Count one of its calls."""
        cost = call.cost
        self.requests += len(cost.nodes)
        self.errors += call.failed
        self.retries += call.retries
        self.prompt_tokens += cost.usage.prompt_tokens
        self.completion_tokens += cost.usage.completion_tokens
        self.hit_tokens = self.hit_tokens + cost.usage.hit_tokens
        self.ttft_s.extend(cost.first_tokens_s)


@dataclass(slots=True)
class RoundTrace:
    """One run of the engine, and what was asked after it.

    Attributes:
        lookups: calls with a prompt that the engine made, by form key.
        asked: distinct calls that were evaluated then, by form key.
        engine_s: seconds in the engine.
        model_s: seconds waiting for answers.
        plan: what the order of the questions was like.
        runs: how many runs of the engine it stands for.
    """

    lookups: Counter[int]
    engine_s: float
    asked: Counter[int] = field(default_factory=Counter)
    model_s: float = 0.0
    plan: PlanSummary = field(default_factory=PlanSummary)
    runs: int = 1


class StatementTrace:
    """What became of a statement's calls; a reducer of them.

    Mutated only by the AiStatement it belongs to.

    Attributes:
        forms: counters by form key, in the order of the text.
        rounds: in order.
        nodes: requests answered, by node.
        executor: ``replay``, or ``stream``.
        filter_order: what was learned of several AI filters, and in which order they were asked.
        why_not_stream: what kept it from being streamed although its text did not.
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
        """The engine ran once."""
        if len(self.rounds) < MOST_ROUNDS:
            self.rounds.append(RoundTrace(Counter(lookups), engine_s))
            return
        last = self.rounds[-1]
        last.lookups.update(lookups)
        last.engine_s += engine_s
        last.runs += 1

    def settled(self, lookups: Mapping[int, int], answered: Mapping[int, int]) -> None:
        """The rows of the last run are final; ``answered`` counts distinct calls since the start.

        A statement that is run piece by piece settles several times.
        """
        for key, form in self.forms.items():
            form.rows += lookups[key]
            form.distinct = answered[key]

    def discard_rows(self) -> None:
        """What ran so far only collected; the statement itself makes its calls again."""
        for form in self.forms.values():
            form.rows = 0

    def batch_begins(self, keys: Sequence[int], now_s: float) -> None:
        """Calls are evaluated after the last run, each on the account of one form."""
        self._batch_began_s, self._batch_walls = now_s, {}
        if self.rounds:
            self.rounds[-1].asked.update(keys)
        for key in keys:
            self.forms[key].asked += 1

    def take(self, call: EndedCall) -> None:
        """Count a call that ended."""
        self.forms[call.form].take(call)
        self.nodes.update(call.cost.nodes)
        self._batch_walls[call.form] = call.ended_s - self._batch_began_s

    def batch_ended(self, plan: PlanSummary, model_s: float) -> None:
        """All of them were."""
        for key, wall_s in self._batch_walls.items():
            self.forms[key].wall_s += wall_s
        if self.rounds:
            last = self.rounds[-1]
            last.model_s += model_s
            last.plan += plan

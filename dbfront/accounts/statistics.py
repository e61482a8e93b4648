"""Counters of the AI calls of a statement or a session, and the order of filters by these counters.

Statements fill the counters; sessions, the statement log and EXPLAIN read them. The AI filters of a
statement are asked in the order of largest saving per cost: by cost / (1 - selectivity), the
cheapest order if filters are independent. This module never asks a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tierkv.dbfront.accounts.ended_call import EndedCall
from tierkv.dbfront.contracts import PlanSummary
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.request import HitTokens


@dataclass(slots=True)
class AiStats:
    """Counters of AI calls, filled while a statement runs; a reducer of its calls.

    Attributes:
        calls: AI calls with a prompt made by the engine in its last round, counted per row and
            call; plus distinct calls asked earlier to learn an order of filters, if absent from the
            last round.
        distinct_calls: calls answered by models or by a classifier, or failed.
        classified_calls: calls answered by a classifier (``tierkv.cascade``).
        vectors: vectors computed for the classifier; their requests and tokens are in the sums.
        requests: requests to models for these calls; a call may need none or several.
        cached_answers: answers from the answer cache; the sums of tokens leave them out.
        errors: number of failed distinct calls.
        prompt_tokens: prompt tokens of answered calls.
        completion_tokens: completion tokens of answered calls.
        hit_tokens: prompt tokens not computed, by tier.
        blended_tokens: hit tokens from chunks computed elsewhere; any such token makes answers
            approximate.
        recomputed_tokens: reused chunk tokens that were computed again.
        ttft_sum_s: sum of times to first token; see ``mean_ttft_s``.
        planned_runs: number of pieces of the prefix trees of all batches.
        shared_tokens: prompt tokens shared with another call of the same batch.
        rounds: number of engine runs of the statement.
        engine_s: seconds in the engine.
        llm_s: seconds waiting for answers.
        wall_s: total seconds.
    """

    calls: int = 0
    distinct_calls: int = 0
    classified_calls: int = 0
    vectors: int = 0
    requests: int = 0
    cached_answers: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    hit_tokens: HitTokens = field(default_factory=HitTokens)
    blended_tokens: int = 0
    recomputed_tokens: int = 0
    ttft_sum_s: float = 0.0
    planned_runs: int = 0
    shared_tokens: int = 0
    rounds: int = 0
    engine_s: float = 0.0
    llm_s: float = 0.0
    wall_s: float = 0.0

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to first token of answered requests; 0.0 without requests."""
        return self.ttft_sum_s / self.requests if self.requests else 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.hit_tokens.total / self.prompt_tokens if self.prompt_tokens else 0.0

    def take(self, call: EndedCall) -> None:
        """Count an ended call; an answered call of a local function is not counted."""
        if call.is_local and not call.failed:
            return
        cost = call.cost
        if call.is_vector:
            self.vectors += 1
        else:
            self.distinct_calls += 1
            self.errors += call.failed
        self.classified_calls += call.is_classified
        self.requests += len(cost.nodes)
        self.cached_answers += cost.cached_answers
        self.prompt_tokens += cost.usage.prompt_tokens
        self.completion_tokens += cost.usage.completion_tokens
        self.hit_tokens = self.hit_tokens + cost.usage.hit_tokens
        self.blended_tokens += cost.usage.blended_tokens
        self.recomputed_tokens += cost.usage.recomputed_tokens
        self.ttft_sum_s += sum(cost.first_tokens_s)

    def add_plan(self, summary: PlanSummary) -> None:
        """Count one planned batch."""
        self.planned_runs += summary.runs
        self.shared_tokens += summary.shared_tokens

    def add(self, other: AiStats) -> None:
        """Add another statement's counters."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class StatementProgress:
    """Progress of a statement, for progress bars.

    Attributes:
        phase: ``collect`` (the engine runs), ``llm`` (waiting for answers) or ``done``.
        round: engine rounds so far.
        calls_done: distinct calls answered.
        calls_total: distinct calls known so far.
        stats: the statement's live counters.
        notice: notice for the client, also included in the result's notices.
    """

    phase: str
    round: int
    calls_done: int
    calls_total: int
    stats: AiStats
    notice: Notice | None = None


_SAMPLED_ROWS: Final = 16
"""Number of rows each filter is asked about before an order is chosen."""

_TOKEN_DECODED: Final = 8.0
"""Cost of decoding a token, in prompt tokens. Prompt tokens are cheaper because many are computed
at once.
"""


def cost_tokens(stats: AiStats) -> float:
    """Return the cost of all answers so far, in computed prompt tokens."""
    computed = stats.prompt_tokens - stats.hit_tokens.total
    return computed + _TOKEN_DECODED * stats.completion_tokens


@dataclass(slots=True)
class FilterRecord:
    """Observations of one filter: rows asked about, rows passed, and the cost in tokens."""

    rows: int = 0
    passed: int = 0
    cost: float = 0.0

    @property
    def rank(self) -> float:
        """Cost per dropped row; with few rows the selectivity is shrunk towards one half."""
        dropped = (self.rows - self.passed + 0.5) / (self.rows + 1)
        return (self.cost / self.rows if self.rows else 0.0) / dropped


class FilterOrder:
    """The filters of one statement, by number.

    Attributes:
        records: observations of each filter.
    """

    def __init__(self, count: int) -> None:
        self.records = [FilterRecord() for _ in range(count)]

    @property
    def measuring(self) -> bool:
        """True if every filter should be asked about every row, to measure all filters."""
        return len(self.records) > 1 and any(record.rows < _SAMPLED_ROWS for record in self.records)

    def order(self) -> list[int]:
        """Return the filters' numbers in the order of asking; ties keep the written order."""
        return sorted(range(len(self.records)), key=lambda number: self.records[number].rank)

    def ran(self, number: int, *, rows: int, passed: int, cost: float) -> None:
        """Record the result of a filter on some rows."""
        record = self.records[number]
        record.rows += rows
        record.passed += passed
        record.cost += cost

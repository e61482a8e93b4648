"""The plan of a statement's calls: adapts a StatementRun to CallPlan.

Created by dbfront/generation/generation.py; dbfront/calls/question_runner.py takes calls from the
plan. The scheduler decides the order (scheduler/plans/statement_run.py); this module converts its
turns to calls ready for streaming.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.dbfront.contracts import CallTurn, PlanSummary, PreparedCall
from tierkv.scheduler.plans.statement_run import PlannedCall, StatementRun


def planned_calls(calls: Sequence[PreparedCall]) -> list[PlannedCall]:
    """Convert prepared calls to the scheduler's planned calls."""
    return [PlannedCall(call.request, call.model) for call in calls]


class PlannedCalls:
    """Implements CallPlan over a StatementRun; ``close`` closes the run."""

    def __init__(self, calls: Sequence[PreparedCall], run: StatementRun) -> None:
        self._calls = calls
        self._run = run

    @property
    def summary(self) -> PlanSummary:
        """Runs and shared tokens; the number of runs is known from the first turn on."""
        summary = self._run.summary
        return PlanSummary(summary.runs, summary.shared_tokens)

    async def take(self) -> CallTurn | None:
        """See CallPlan."""
        turn = await self._run.take()
        if turn is None:
            return None
        call = self._calls[turn.call]
        # Explicit constructor: dataclasses.replace takes five times as long, for every call.
        prepared = PreparedCall(
            call.call, call.model, turn.request, call.blend_refusal, turn.preferred_node
        )
        return CallTurn(turn.call, prepared)

    def prefilled(self, index: int) -> None:
        """See CallPlan."""
        self._run.prefilled(index)

    def ended(self, index: int, *, answered: bool) -> None:
        """See CallPlan."""
        if answered:
            self._run.finished(index)
        else:
            self._run.failed(index)

    async def close(self) -> None:
        """See CallPlan."""
        await self._run.close()

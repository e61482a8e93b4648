"""The plan of a statement's calls, in the front's words: a StatementRun over PreparedCalls.

Made by dbfront/generation/generation.py; dbfront/calls/evaluation.py takes calls from the plan. The
scheduler decides the order (scheduler/plans/statement_run.py); this module turns its turns into
calls that can be streamed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.dbfront.contracts import CallTurn, PlanSummary, PreparedCall
from tierkv.scheduler.plans.statement_run import PlannedCall, StatementRun


def planned_calls(calls: Sequence[PreparedCall]) -> list[PlannedCall]:
    """Say about prepared calls what a plan needs to know."""
    return [PlannedCall(call.request, call.model) for call in calls]


class PlannedCalls:
    """Implements CallPlan over a StatementRun, which it closes."""

    def __init__(self, calls: Sequence[PreparedCall], run: StatementRun) -> None:
        self._calls = calls
        self._run = run

    @property
    def summary(self) -> PlanSummary:
        """Runs and shared tokens; runs are known with the first turn."""
        summary = self._run.summary
        return PlanSummary(summary.runs, summary.shared_tokens)

    async def take(self) -> CallTurn | None:
        """See CallPlan."""
        turn = await self._run.take()
        if turn is None:
            return None
        call = self._calls[turn.call]
        # Written out: dataclasses.replace would take five times as long, for every call.
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

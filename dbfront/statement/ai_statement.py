"""One statement with AI calls, independent of the engine: rounds, evaluation, error policy,
counters.

The executor (DuckDB) and the relay (PostgreSQL) each implement EngineRounds.
``AiStatement.until_answered`` runs the engine repeatedly until no answer is missing. This module
never sees rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tierkv.dbfront.accounts.ended_call import CallCost, CallEnd, CallReducer, EndedCall, end_of
from tierkv.dbfront.accounts.statement_entry import CallNames, StatementEntry
from tierkv.dbfront.accounts.statement_trace import StatementTrace
from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress
from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.calls.evaluation import CallBatch, CallOutcome
from tierkv.dbfront.calls.field_order import ContextFields
from tierkv.dbfront.calls.functions import failed_detail, start_recipe
from tierkv.dbfront.calls.recipe import CountTokens
from tierkv.dbfront.contracts import (
    CallDefaults,
    PlanSummary,
    PreparedCall,
    SessionCall,
    TextGenerator,
)
from tierkv.dbfront.explain.estimate import (
    MOST_SAMPLED,
    Estimate,
    announce_batch,
    announce_stream,
    estimate,
)
from tierkv.dbfront.statement.cascade import EMBED, Cascade
from tierkv.dbfront.statement.error_policy import (
    ErrorPolicy,
    Failures,
    ReturningWatch,
    Spending,
    blame,
)
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import (
    FeatureNotSupportedError,
    NoNodeError,
    SqlError,
    TierKVError,
    UserError,
)
from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.functions import AI_FUNCTIONS, Returns
from tierkv.sql.plan.plan import Explain, StatementPlan

Result_co = TypeVar("Result_co", covariant=True)
Result = TypeVar("Result")

FIRST_BUDGET = 64
"""Filter calls in the first round of a statement whose LIMIT may stop it early; doubled each round.
"""


class EngineRounds(Protocol[Result_co]):
    """Repeated runs of one statement on an engine.

    1. ``run`` runs the statement once and answers AI calls from ``AiStatement.book``. ``run``
       returns None if the engine failed on a NULL in place of a missing answer, and raises any
       other failure.
    2. ``undo`` reverts the last ``run``. ``undo`` is called before answers are awaited if the
       statement will run again.
    3. ``enough`` returns True if the last result is final although filters are unanswered.
    4. ``behind`` is True if the last ``run`` missed answers already present in the book.
    """

    @property
    def behind(self) -> bool: ...

    async def run(self) -> Result_co | None: ...

    async def undo(self) -> None: ...

    def enough(self) -> bool: ...


class AiStatement:
    """Collects calls, evaluates calls and replays the statement, in the same way for every engine.

    Attributes:
        plan: plan of the statement.
        book: known answers and missed calls.
        stats: live counters.
        trace: live counters by call and round.
        cascade: the classifiers that answer rows, if the session asks for them.
    """

    def __init__(
        self,
        plan: StatementPlan,
        generator: TextGenerator,
        defaults: CallDefaults,
        policy: ErrorPolicy,
        clock: Clock,
        stats: AiStats,
        on_progress: Callable[[StatementProgress], None] | None = None,
        account: StatementEntry | None = None,
    ) -> None:
        self.plan = plan
        self.book = AnswerBook(plan.forms, plan.dialect)
        self.stats = stats
        self.trace = StatementTrace([form.key for form in plan.forms])
        self._generator = generator
        self._defaults = defaults
        self._policy = policy
        self._spending = Spending(policy)
        self._failures = Failures(policy, writes=plan.writes)
        self._clock = clock
        self._on_progress = on_progress
        self._contexts = ContextFields(defaults.field_reorder)
        self._stopped_at_default_length = 0
        self._returning = ReturningWatch(plan)
        self._blend_refusal = ""
        self._announced: Notice | None = None
        self._names = CallNames(plan.forms, defaults)
        self._account = account
        self.cascade = Cascade(
            plan.forms, defaults, self, trace=self.trace, book=self.book, spending=self._spending
        )
        reducers: list[CallReducer] = [self.trace, stats, self._spending, self._failures]
        self._reducers = reducers if account is None else [account, *reducers]

    async def check_constants(self) -> None:
        """Refuse missing rights, unknown models and invalid options before the statement runs.

        A table without rows makes no difference.

        Raises:
            RightMissingError: the user may not call one of the functions, or use a model.
            UserError: an invalid argument, or a dry run of a statement that writes.
            NoNodeError: no node can check the arguments. EXPLAIN ignores the error, since EXPLAIN
                asks no node.
        """
        if self._policy.dry_run and self.plan.writes:
            raise FeatureNotSupportedError(
                "tierkv.dry_run is on, and this statement would write NULL for AI answers",
                hint="EXPLAIN shows its calls; to run it, RESET tierkv.dry_run.",
            )
        functions = dict.fromkeys(form.function.granted_as for form in self.plan.forms)
        self._generator.rights.check_functions(self._defaults.tenant, functions)
        checked: set[AiCall] = set()
        for form in self.plan.forms:
            example = form.example
            if example is None or example in checked:
                continue
            checked.add(example)
            try:
                await self._check(example)
            except NoNodeError:
                if self.plan.explain is not Explain.PLAN:
                    raise
            except UserError as error:
                blame(error, self.plan, [form.key])
                raise

    async def _check(self, example: AiCall) -> None:
        """Prepare the first requests of a call without sending a request."""
        step = next(start_recipe(example, self._defaults))
        if isinstance(step, CountTokens):
            await self._generator.count_tokens((), step.model)
        else:
            for question in (step.call,) if isinstance(step, SessionCall) else step:
                self._names.prepared(await self._generator.prepare(question))

    async def until_answered(
        self, rounds: EngineRounds[Result], *, may_stop: bool = False, partly: bool = False
    ) -> Result:
        """Run the statement and evaluate missed calls, until a run misses no answer; return its
        result.

        Args:
            rounds: the engine's side.
            may_stop: True to stop as soon as ``rounds.enough`` holds, and to answer filters in
                small batches.
            partly: True if these are not all of the statement's rows.
        """
        budget = FIRST_BUDGET if may_stop else None
        round_number = 0
        while round_number < limits.MAX_REPLAY_ROUNDS:
            self.book.start_round(budget, may_cut=True)
            result = await self._round(rounds)
            round_number += not self.book.is_cut
            if self.book.fatal is not None:
                blame(self.book.fatal, self.plan, [self.book.fatal_form])
                raise self.book.fatal
            # A cut round may have left out other calls of these rows.
            enough = may_stop and result is not None and rounds.enough() and not self.book.is_cut
            batch = self.book.next_batch(without_filters=enough)
            if not batch and result is not None and not rounds.behind:
                self.settled()
                return result
            await rounds.undo()
            if batch:
                self._returning.check(self.book.missed_forms(call)[0] for call in batch)
                await self.evaluate(batch, partly=partly or may_stop)
            budget = None if budget is None else 2 * budget
        raise SqlError(
            f"the AI calls of this statement did not settle in {limits.MAX_REPLAY_ROUNDS} rounds",
            sqlstate="54001",
            hint="Store the inner calls' answers in a table first; give aggregates that build a "
            "prompt, such as string_agg, an ORDER BY without ties; store the results of functions "
            "that differ each time.",
        )

    async def estimate(self, rounds: EngineRounds[object]) -> Estimate:
        """Run the statement once and estimate the cost of the missed calls; no model is asked."""
        self.book.start_round()
        await self._round(rounds)
        if self.book.fatal is not None:
            raise self.book.fatal
        return await estimate(self.book, self.plan, self._generator, self._defaults, self._contexts)

    def settled(self) -> None:
        """Count the engine's calls for rows of the final result."""
        self.stats.calls += self.book.total_lookups
        if self._account is not None:
            self._account.rows.update(self._names.rows(self.book.lookups))
        self.trace.settled(self.book.lookups, self.book.answered)

    def discard_rows(self) -> None:
        """Discard the counts of calls from a collecting run; the statement itself makes these calls
        again.
        """
        self.stats.calls = 0
        self.book.set_aside()
        if self._account is not None:
            self._account.rows.clear()
        self.trace.discard_rows()

    async def _round(self, rounds: EngineRounds[Result]) -> Result | None:
        self.report("collect")
        started = self._clock.now()
        try:
            return await rounds.run()
        finally:
            engine_s = self._clock.now() - started
            self.stats.rounds += 1
            self.stats.engine_s += engine_s
            self.trace.ran(self.book.lookups, engine_s)

    async def evaluate(self, batch: list[AiCall], *, partly: bool) -> None:
        """Answer one batch of distinct calls and record the answers in the book.

        Args:
            batch: the calls.
            partly: rows to come will need further calls.
        """
        local = sum(AI_FUNCTIONS[call.function].local for call in batch)
        self._spending.partly = partly
        self._spending.add_calls(len(batch) - local, local=local)
        if self._spending.is_large and self._announced is None:
            await self._announce(all_known=len(batch) - local == self._spending.calls)
        self.report("llm")
        started = self._clock.now()
        summary = PlanSummary()
        self.trace.batch_begins([self.book.missed_forms(call)[0] for call in batch], started)
        try:
            if self.cascade.is_asked and not self._policy.dry_run:
                forms = {call: self.book.missed_forms(call)[0] for call in batch}
                summary = await self.cascade.answer(batch, forms)
            else:
                summary = await self.ask(batch)
            self.stats.add_plan(summary)
        finally:
            model_s = self._clock.now() - started
            self.stats.llm_s += model_s
            self.trace.batch_ended(summary, model_s)

    async def ask(self, calls: Sequence[AiCall]) -> PlanSummary:
        """Send the requests of the calls, wave by wave; a dry run sends none."""
        batch, summary = CallBatch(self._generator, self._defaults, self._ended), PlanSummary()
        try:
            await batch.start(calls, await self._contexts.written(calls))
            while await batch.next_wave():
                self._check_wave(batch.wave)
                if self._policy.dry_run:
                    batch.abandon()
                    continue
                summary += await batch.ask()
        except UserError as error:
            if batch.refused is not None:
                blame(error, self.plan, self.book.missed_forms(batch.refused))
            raise
        return summary

    async def embed(
        self, form: int, calls: Sequence[AiCall], take: Callable[[AiCall, Any], None]
    ) -> PlanSummary:
        """See CascadeHost."""

        def ended(call: AiCall, outcome: CallOutcome) -> None:
            event = self._event(call, outcome, form)
            for reducer in self._reducers:
                reducer.take(event)
            take(call, outcome.value)

        self._generator.rights.check_functions(self._defaults.tenant, (EMBED,))
        self._spending.vectors += len(calls)
        batch, summary = CallBatch(self._generator, self._defaults, ended), PlanSummary()
        await batch.start(calls, {})
        while await batch.next_wave():
            self._check_wave(batch.wave)
            summary += await batch.ask()
        return summary

    def classified(self, call: AiCall, answer: Any) -> None:
        """See CascadeHost."""
        event = replace(self._event(call, CallOutcome(answer)), is_classified=True)
        for reducer in self._reducers:
            reducer.take(event)
        self.book.add(call, answer)
        self.report("llm")

    async def _announce(self, *, all_known: bool) -> None:
        """Tell the client the size of a large statement before its calls are sent."""
        calls = self._spending.calls
        if all_known:
            weighing = estimate(
                self.book, self.plan, self._generator, self._defaults, self._contexts,
                most=MOST_SAMPLED,
            )  # fmt: skip
            self._announced = await announce_batch(calls, weighing, cascaded=self.cascade.is_asked)
        else:
            self._announced = announce_stream(calls, self.stats)
        self.report("llm", self._announced)

    def report(self, phase: str, notice: Notice | None = None) -> None:
        """Report the statement's progress to the listener, if there is one."""
        if self._on_progress is not None:
            self._on_progress(
                StatementProgress(
                    phase=phase,
                    round=self.stats.rounds,
                    calls_done=self.stats.distinct_calls,
                    calls_total=self._spending.calls,
                    stats=self.stats,
                    notice=notice,
                )
            )

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices for the client."""
        notices = self._failures.notices(self._spending.calls + self._spending.local_calls)
        if self._announced is not None:
            notices.insert(0, self._announced)
        notices += self.cascade.notices()
        if self._policy.dry_run:
            notices.append(self._spending.rehearsed())
        if self._stopped_at_default_length:
            notices.append(
                Notice(
                    "NOTICE",
                    f"{self._stopped_at_default_length} of {self._spending.calls} answers were "
                    f"cut at tierkv.max_tokens = {self._defaults.options.max_tokens}",
                )
            )
        if self._blend_refusal:
            notices.append(
                Notice(
                    "NOTICE",
                    f"documents were not blended: {self._blend_refusal}",
                    detail="The answers are exact.",
                    hint="View tierkv.namespaces shows what is allowed. `tierkv namespace set NAME "
                    "--blend on` allows blending; in one process, set namespace.blend.",
                )
            )
        return tuple(notices)

    def _check_wave(self, wave: Sequence[PreparedCall]) -> None:
        """Record the requests of a wave; raise an error if the wave exceeds a limit."""
        for prepared in wave:
            self._blend_refusal = self._blend_refusal or prepared.blend_refusal
            self._names.prepared(prepared)
        self._spending.add_wave(wave)

    def _ended(self, call: AiCall, outcome: CallOutcome) -> None:
        """Publish the end of a call; raise an error if the statement has to fail."""
        ended = self._event(call, outcome)
        for reducer in self._reducers:
            reducer.take(ended)
        value = outcome.value
        if ended.error is not None:
            value = self._value_of_failure(call, ended.error)
        elif ended.end is CallEnd.LENGTH:
            self._stopped_at_default_length += call.options.max_tokens is None
        self.book.add(call, value)
        self.report("llm")

    def _event(self, call: AiCall, outcome: CallOutcome, vector_of: int | None = None) -> EndedCall:
        """Return the event of a call's end; ``vector_of`` is the form that a vector is for."""
        function, failed = AI_FUNCTIONS[call.function], outcome.error is not None
        gives_null = function.returns is not Returns.RESULT if failed else outcome.value is None
        return EndedCall(
            statement="" if self._account is None else self._account.query_id,
            function=function.name,
            model=self._names.model_of(call),
            end=CallEnd.FAILED if failed else end_of(outcome.answers),
            cost=CallCost.of(outcome.answers),
            form=self.book.missed_forms(call)[0] if vector_of is None else vector_of,
            error=outcome.error,
            is_null=gives_null and vector_of is None,
            is_local=function.local,
            is_vector=vector_of is not None,
            retries=outcome.retries,
            ended_s=self._clock.now(),
        )

    def _value_of_failure(self, call: AiCall, error: TierKVError) -> Any:
        """Return the value of a failed call; raise an error if the statement has to fail."""
        if AI_FUNCTIONS[call.function].returns is Returns.RESULT:
            return failed_detail(call, self._defaults, error)
        if isinstance(error, UserError):
            blame(error, self.plan, self.book.missed_forms(call))
        self._failures.check(error, self._spending.calls + self._spending.local_calls)
        return None


def refuse_replay(execution: str, reason: str) -> None:
    """Refuse to replay a statement if ``tierkv.execution`` requires streaming.

    Raises:
        FeatureNotSupportedError: with ``reason``.
    """
    if execution == "stream":
        raise FeatureNotSupportedError(
            f"this statement can't be streamed: {reason}",
            hint="To have such statements replayed, SET tierkv.execution = auto.",
        )

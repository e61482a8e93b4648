"""Estimates the cost of a statement's missing AI calls, for EXPLAIN (AI_ESTIMATE) and for a NOTICE.

dbfront/statement/ai_statement.py calls this module after one collecting round. Prompts are prepared
and counted as if they were to be sent, and the scheduler predicts their time. The NOTICE before a
large statement estimates from a sample of its calls; a streaming statement reports measured costs
instead. No model is asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.calls.field_order import ContextFields
from tierkv.dbfront.calls.functions import start_recipe
from tierkv.dbfront.calls.recipe import CountTokens
from tierkv.dbfront.contracts import (
    CallDefaults,
    PreparedCall,
    Prospect,
    SessionCall,
    TextCall,
    TextGenerator,
)
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.errors import ContextTooLongError, RowLevelError, TierKVError
from tierkv.kvcore.request import HitTokens
from tierkv.scheduler.plans.forecast import CallForecast
from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.functions import AI_FUNCTIONS
from tierkv.sql.plan.plan import StatementPlan

MOST_PREPARED: Final = 20_000
"""Maximum number of calls with prepared prompts. Of more calls an even sample is prepared and
scaled up.
"""

_PREPARED_BETWEEN_YIELDS: Final = 64
_OUTPUTS: Final = frozenset({"SELECT", "VALUES", "SET", "RETURNING", "GROUP BY", "ORDER BY"})
"""Clauses in which a call's answer does not decide about other rows."""

_ROW_ERRORS: Final = (ContextTooLongError, RowLevelError)


@dataclass(slots=True)
class FormEstimate:
    """The estimated cost of one form's calls.

    Attributes:
        rows: calls with a prompt made by the engine in the collecting round.
        known: True if the calls are complete; False if further calls depend on answers.
        at_least: True if some of the calls ask again after their first answers.
        distinct: distinct calls charged to the form.
        requests: requests to models for the calls.
        too_long: calls whose prompt exceeds the context.
        prompt_tokens: prompt tokens of the requests.
        shared_tokens: leading tokens shared with an earlier request.
        found: tokens in the cache now, by the tier nearest to the best node.
        hits: tokens that would not be computed, including tokens left by earlier requests.
        answer_tokens: expected or maximum answer tokens.
    """

    rows: int = 0
    known: bool = True
    at_least: bool = False
    distinct: float = 0.0
    requests: float = 0.0
    too_long: float = 0.0
    prompt_tokens: float = 0.0
    shared_tokens: float = 0.0
    found: HitTokens = field(default_factory=HitTokens)
    hits: HitTokens = field(default_factory=HitTokens)
    answer_tokens: float = 0.0

    def add(self, call: CallForecast, answer_tokens: float) -> None:
        """Count one request."""
        self.requests += 1
        self.prompt_tokens += call.prompt_tokens
        self.shared_tokens += call.shared_tokens
        self.found = self.found + call.found
        self.hits = self.hits + call.hits
        self.answer_tokens += answer_tokens

    def scaled(self, factor: float) -> FormEstimate:
        """Scale the estimate of a sample by ``factor``; rows were all counted and stay."""
        return replace(
            self,
            distinct=factor * self.distinct,
            requests=factor * self.requests,
            too_long=factor * self.too_long,
            prompt_tokens=factor * self.prompt_tokens,
            shared_tokens=factor * self.shared_tokens,
            found=_times(self.found, factor),
            hits=_times(self.hits, factor),
            answer_tokens=factor * self.answer_tokens,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated cost of a statement's known AI calls.

    Attributes:
        forms: estimates by form key.
        prospect: forecast of the prepared requests.
        factor: number of calls per prepared call; 1.0 without sampling.
        rows: maximum number of rows with calls that depend on answers; None if unknown.
    """

    forms: dict[int, FormEstimate]
    prospect: Prospect
    factor: float = 1.0
    rows: int | None = None

    @property
    def total(self) -> FormEstimate:
        """Sum over all forms."""
        total = FormEstimate()
        for one in self.forms.values():
            total.rows += one.rows
            total.known &= one.known
            total.at_least |= one.at_least
            total.distinct += one.distinct
            total.requests += one.requests
            total.too_long += one.too_long
            total.prompt_tokens += one.prompt_tokens
            total.shared_tokens += one.shared_tokens
            total.found = total.found + one.found
            total.hits = total.hits + one.hits
            total.answer_tokens += one.answer_tokens
        return total

    @property
    def seconds(self) -> float:
        """Seconds until the last known answer."""
        return self._seconds(sum(self.prospect.answer_tokens))

    @property
    def shortest_s(self) -> float:
        """Seconds until the last known answer if all answers are empty."""
        return self._seconds(0.0)

    def _seconds(self, answer_tokens: float) -> float:
        forecast = self.prospect.forecast
        return forecast.wait_s + self.factor * (forecast.total_s(answer_tokens) - forecast.wait_s)


async def estimate(
    book: AnswerBook,
    plan: StatementPlan,
    generator: TextGenerator,
    defaults: CallDefaults,
    contexts: ContextFields,
    *,
    most: int | None = None,
) -> Estimate:
    """Estimate the cost of a book's next batch.

    Args:
        book: the book after a collecting round.
        plan: plan of the statement.
        generator: prepares and forecasts requests; no request is sent.
        defaults: the session's settings.
        contexts: writes the calls' contexts.
        most: approximate number of calls to prepare (MOST_PREPARED by default); of more calls an
            even sample is prepared.

    Raises:
        UserError: a call that would end the statement.
    """
    batch = book.next_batch()
    known = _known(book, plan)
    found = {
        form.key: FormEstimate(book.lookups[form.key], known=form.key in known)
        for form in plan.forms
    }
    step = -(-len(batch) // (most or MOST_PREPARED)) or 1
    questions = _Questions(generator, defaults)
    written = await contexts.written(batch)
    for number, call in enumerate(batch[::step]):
        if number % _PREPARED_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)
        one = found[book.missed_forms(call)[0]]
        one.distinct += not AI_FUNCTIONS[call.function].local
        await questions.ask(written.get(call, call), one)
    prospect = await generator.forecast(questions.prepared, max_in_flight=defaults.max_concurrency)
    for one, forecast, tokens in zip(
        questions.owners, prospect.forecast.calls, prospect.answer_tokens, strict=True
    ):
        one.add(forecast, tokens)
    factor = len(batch) / len(batch[::step]) if batch else 1.0
    scaled = found if step == 1 else {key: one.scaled(factor) for key, one in found.items()}
    return Estimate(scaled, prospect, factor)


def _known(book: AnswerBook, plan: StatementPlan) -> set[int]:
    """Return the forms with complete calls, where no missing answer could hide a call.

    The engine may evaluate filters in another order than written, below a join, or not at all once
    a filter was NULL. Therefore only missing answers in output clauses leave the calls of other
    forms complete.
    """
    filtering = {site.form.key for site in plan.sites if site.clause not in _OUTPUTS}
    missed = set(book.missed_keys)
    stage = min((form.stage for form in plan.forms if form.key in missed), default=None)
    guarded = {site.form.key for site in plan.sites if stage is not None and site.stage > stage}
    return {
        form.key
        for form in plan.forms
        if form.key not in guarded and missed & filtering <= {form.key}
    }


class _Questions:
    """The first questions of calls, without duplicates.

    Attributes:
        prepared: the prepared questions.
        owners: for each question the form that is charged.
    """

    def __init__(self, generator: TextGenerator, defaults: CallDefaults) -> None:
        self.prepared: list[PreparedCall] = []
        self.owners: list[FormEstimate] = []
        self._generator = generator
        self._defaults = defaults
        self._asked: Counter[TextCall] = Counter()

    async def ask(self, call: AiCall, owner: FormEstimate) -> None:
        """Add the first questions of a call."""
        try:
            asked = await self._first_questions(call)
            owner.at_least |= AI_FUNCTIONS[call.function].aggregate and len(asked) > 1
            for question in self._new(asked):
                self.prepared.append(await self._generator.prepare(question))
                self.owners.append(owner)
        except _ROW_ERRORS:
            owner.too_long += 1

    def _new(self, asked: Iterable[TextCall]) -> list[TextCall]:
        new = [question for question in dict.fromkeys(asked) if not self._asked[question]]
        self._asked.update(new)
        return new

    async def _first_questions(self, call: AiCall) -> tuple[TextCall, ...]:
        recipe = start_recipe(call, self._defaults)
        try:
            step = next(recipe)
            while isinstance(step, CountTokens):
                step = recipe.send(await self._generator.count_tokens(step.texts, step.model))
            return (step.call,) if isinstance(step, SessionCall) else step
        except StopIteration:
            return ()
        finally:
            recipe.close()


def _times(tokens: HitTokens, factor: float) -> HitTokens:
    return HitTokens(*(round(factor * n) for n in (tokens.l1, tokens.l2, tokens.l3, tokens.l4)))


MOST_SAMPLED: Final = 64
"""Maximum number of calls prepared for the NOTICE; the remaining calls are assumed to be alike."""

_HINT: Final = (
    "Setting tierkv.max_calls limits the calls of a statement; tierkv.notice_calls = 0 turns off "
    "this notice."
)


async def announce_batch(
    calls: int, weighing: Awaitable[Estimate], *, cascaded: bool = False
) -> Notice:
    """Return the NOTICE for a statement whose calls are all known.

    With ``cascaded``, a classifier may answer some of the calls.
    """
    makes = "without its cascade makes" if cascaded else "makes at least"
    try:
        estimate = await weighing
    except TierKVError:
        # The calls themselves will meet the same error and report it.
        return _notice(f"this statement {makes} {calls:,} AI calls")
    tokens, seconds = round(estimate.total.prompt_tokens), _time(estimate.seconds)
    shortest = _time(estimate.shortest_s)
    if not estimate.prospect.learned and shortest != seconds:
        # No answer was seen yet. Most answers are much shorter than max_tokens allows.
        seconds = f"{shortest} for prompts, up to {seconds} if answers are as long as max_tokens"
    return _notice(
        f"this statement {makes} {calls:,} AI calls: about {tokens:,} prompt tokens, {seconds}"
    )


def announce_stream(calls: int, stats: AiStats) -> Notice:
    """Return the NOTICE for a stream: the cost so far, since the remaining rows are unknown."""
    seconds = stats.engine_s + stats.llm_s
    return _notice(
        f"this statement has reached {calls:,} AI calls and continues; so far "
        f"{stats.prompt_tokens:,} prompt tokens in {_time(seconds)}"
    )


def _notice(message: str) -> Notice:
    return Notice("NOTICE", message, detail="Cancel (Ctrl-C) stops the statement.", hint=_HINT)


def _time(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} minutes"

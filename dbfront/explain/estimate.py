"""What the missing AI calls of a statement would cost: EXPLAIN (AI_ESTIMATE), and the NOTICE.

dbfront/statement/ai_statement.py calls this module after one collecting round. Prompts are made and
counted as if they were to be sent, and the scheduler predicts their time. The NOTICE before a large
statement estimates from a sample of its calls; a streaming statement reports measured costs
instead. No model is asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.call_defaults import CallDefaults
from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.calls.context_fields import ContextFields
from tierkv.dbfront.calls.recipe import CallOrder, CountTokens, ModelQuestions
from tierkv.dbfront.calls.recipe_table import start_recipe
from tierkv.dbfront.contracts import Notice, PreparedCall, Prospect, TextCall, TextGenerator
from tierkv.kvcore.errors import ContextTooLongError, RowLevelError, TierKVError
from tierkv.kvcore.request import HitTokens
from tierkv.scheduler.plans.forecast import CallForecast
from tierkv.sql.calls.functions import AI_FUNCTIONS
from tierkv.sql.plan.plan import StatementPlan

MOST_PREPARED: Final = 20_000
"""Calls whose prompts are made; of more, so many are taken evenly, and the others are like them."""

_PREPARED_BETWEEN_YIELDS: Final = 64
_OUTPUTS: Final = frozenset({"SELECT", "VALUES", "SET", "RETURNING", "GROUP BY", "ORDER BY"})
"""Clauses in which the answer to a call decides about no other row."""

_ROW_ERRORS: Final = (ContextTooLongError, RowLevelError)


@dataclass(slots=True)
class FormEstimate:
    """What the calls that are written alike would take.

    Attributes:
        rows: calls with a prompt that the engine made in the collecting round.
        known: all rows that need an answer are among them; else the calls depend on answers.
        at_least: some of these calls ask again once their first questions are answered.
        distinct: distinct calls on its account.
        requests: what models would be asked for them.
        too_long: calls whose prompt does not fit.
        prompt_tokens: of the requests.
        shared_tokens: leading tokens that an earlier request has, too.
        found: tokens in the cache now, by the tier that is nearest to the best node.
        hits: tokens that would not be computed, with what earlier requests leave.
        answer_tokens: as long as answers were, or may be.
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
        """Take it for a sample of ``factor`` times as much; rows were all counted."""
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
    """What the known AI calls of a statement would take.

    Attributes:
        forms: by form key.
        prospect: of the requests that were weighed.
        factor: how many calls each weighed one stands for; 1.0 without sampling.
        rows: most rows that calls which depend on answers can be made for; None: nobody knows.
    """

    forms: dict[int, FormEstimate]
    prospect: Prospect
    factor: float = 1.0
    rows: int | None = None

    @property
    def total(self) -> FormEstimate:
        """All forms together."""
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
        forecast = self.prospect.forecast
        tokens = sum(self.prospect.answer_tokens)
        return forecast.wait_s + self.factor * (forecast.total_s(tokens) - forecast.wait_s)


async def estimate(
    book: AnswerBook,
    plan: StatementPlan,
    generator: TextGenerator,
    defaults: CallDefaults,
    contexts: ContextFields,
    *,
    most: int | None = None,
) -> Estimate:
    """Estimate what the next batch of a book would take.

    Args:
        book: after a collecting round.
        plan: the statement's.
        generator: makes prompts and weighs them; nothing is streamed from it.
        defaults: the session's settings.
        contexts: writes the calls' contexts.
        most: calls whose prompts are made, about (MOST_PREPARED); of more, some are taken evenly.

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
        order = CallOrder(call, defaults, written.get(call, ""))
        one.distinct += not AI_FUNCTIONS[call.function].local
        await questions.ask(order, one)
    prospect = await generator.forecast(questions.prepared, max_in_flight=defaults.max_concurrency)
    for one, forecast, tokens in zip(
        questions.owners, prospect.forecast.calls, prospect.answer_tokens, strict=True
    ):
        one.add(forecast, tokens)
    factor = len(batch) / len(batch[::step]) if batch else 1.0
    scaled = found if step == 1 else {key: one.scaled(factor) for key, one in found.items()}
    return Estimate(scaled, prospect, factor)


def _known(book: AnswerBook, plan: StatementPlan) -> set[int]:
    """Say of which forms all calls were met: no missing answer stood before any of them.

    The engine may evaluate filters in another order than they are written, below a join, or not at
    all once one of them was NULL; so only outputs leave others alone.
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
    """What calls ask first, each question once.

    Attributes:
        prepared: the questions, ready to be sent.
        owners: on whose account each of them is.
    """

    def __init__(self, generator: TextGenerator, defaults: CallDefaults) -> None:
        self.prepared: list[PreparedCall] = []
        self.owners: list[FormEstimate] = []
        self._generator = generator
        self._defaults = defaults
        self._asked: Counter[TextCall] = Counter()

    async def ask(self, order: CallOrder, owner: FormEstimate) -> None:
        """Take in what a call asks first."""
        try:
            asked = await self._first_questions(order)
            owner.at_least |= AI_FUNCTIONS[order.call.function].aggregate and len(asked) > 1
            for question in self._new(asked):
                self.prepared.append(await self._generator.prepare(question))
                self.owners.append(owner)
        except _ROW_ERRORS:
            owner.too_long += 1

    def _new(self, asked: Iterable[TextCall]) -> list[TextCall]:
        new = [question for question in dict.fromkeys(asked) if not self._asked[question]]
        self._asked.update(new)
        return new

    async def _first_questions(self, order: CallOrder) -> tuple[TextCall, ...]:
        recipe = start_recipe(order)
        try:
            step = next(recipe)
            while isinstance(step, CountTokens):
                step = recipe.send(await self._generator.count_tokens(step.texts, step.model))
            return step.calls if isinstance(step, ModelQuestions) else ()
        except StopIteration:
            return ()
        finally:
            recipe.close()


def _times(tokens: HitTokens, factor: float) -> HitTokens:
    return HitTokens(*(round(factor * n) for n in (tokens.l1, tokens.l2, tokens.l3, tokens.l4)))


MOST_SAMPLED: Final = 200
"""Calls whose prompts are made and weighed; the others are taken to be like them."""

_HINT: Final = (
    "SET tierkv.max_calls refuses large statements; SET tierkv.notice_calls = 0 says nothing."
)


async def announce_batch(calls: int, weighing: Awaitable[Estimate]) -> Notice:
    """Say what the calls of a statement take that are all known now."""
    try:
        estimate = await weighing
    except TierKVError:
        # Whatever it is, the calls themselves run into it and say so.
        return _notice(f"this statement makes at least {calls:,} AI calls")
    tokens = round(estimate.total.prompt_tokens)
    return _notice(
        f"this statement makes at least {calls:,} AI calls: about {tokens:,} prompt tokens, "
        f"{_time(estimate.seconds)}"
    )


def announce_stream(calls: int, stats: AiStats) -> Notice:
    """Say what a stream took so far; how many rows are left is not known."""
    seconds = stats.engine_s + stats.llm_s
    return _notice(
        f"this statement has come to {calls:,} AI calls and goes on; so far "
        f"{stats.prompt_tokens:,} prompt tokens in {_time(seconds)}"
    )


def _notice(message: str) -> Notice:
    return Notice("NOTICE", message, detail="A cancel (Ctrl-C) stops it.", hint=_HINT)


def _time(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} minutes"

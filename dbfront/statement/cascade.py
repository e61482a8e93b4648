"""Cascade: a small classifier answers the rows of a statement that it is sure of, if asked to.

Theory of operation. With ``tierkv.cascade = 0.95``, the distinct calls of one ``ai_filter`` or
``ai_classify`` in a batch are the rows of a cascade:

    all rows --+-- sample, the first rows by hash of their text
               |     the model answers all of them
               |     learned rows: the classifier is fitted to vectors (``ai_embed``) and answers,
               |                   and a threshold of confidence is chosen for each answer
               |     checked rows: answers at or above the thresholds are compared with the model's
               |
               +-- other rows, if the share of equal answers is at least 0.95 with confidence
                     at or above the thresholds: the classifier answers
                     below: the model answers, like all rows in any other case

The checked rows have no part in the fit and the thresholds, and are looked at once, so the bound of
the agreement holds for all rows answered by the classifier. Below the bound asked for, with too few
rows, with one answer for all, or without vectors, the model answers all rows; the trace says why.

Nothing depends on chance: the sample depends on the texts alone, and two questions about the same
rows have the same sample, whose vectors may come from the answer cache. The vectors are of the
row's own text, without instruction and labels. The classifier lives as long as one batch. The
classifier's answers never pass a TextGenerator, and no cache keeps them as answers of the model.

ai_statement.py asks and embeds; executor.py collects all rows first. This module sends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.dbfront.accounts.statement_trace import CascadeTrace, StatementTrace
from tierkv.dbfront.calls.agreement import (
    Classes,
    Numbers,
    asked_agreement,
    choose_thresholds,
    lower_bound,
)
from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.calls.row_classifier import RowClassifier, fit_classifier
from tierkv.dbfront.calls.row_sample import (
    LEAST_OF_ANSWER,
    ROW_TEXT,
    SampleSize,
    UnusedError,
    known_answers,
    row_text,
    sample_order,
)
from tierkv.dbfront.contracts import CallDefaults, PlanSummary
from tierkv.dbfront.statement.error_policy import Spending
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.errors import CancelledByUserError, TierKVError
from tierkv.sql.calls.ai_call import AiCall, CallForm, make_call

EMBED: Final = "ai_embed"
Vector = NDArray[np.float32]

WHY_NOT_STREAM: Final = "a cascade learns from all rows"
"""Reason for collecting all rows of a statement that could be streamed."""


_EMBEDDED_AT_ONCE: Final = 4_096
_KEPT_NUMBERS: Final = 16_000_000
"""Most numbers of a statement's vectors that are kept for a second call over the same rows: 64 MB.
"""


class CascadeHost(Protocol):
    """The statement whose rows a cascade answers.

    1. ``ask`` has the model answer calls, and records their answers.
    2. ``embed`` computes vectors for a form, and passes each to ``take``; None is a row that has no
       vector. ``embed`` raises any error not specific to one row.
    3. ``classified`` records an answer of the classifier.
    """

    async def ask(self, calls: Sequence[AiCall]) -> PlanSummary: ...

    async def embed(
        self, form: int, calls: Sequence[AiCall], take: Callable[[AiCall, Any], None]
    ) -> PlanSummary: ...

    def classified(self, call: AiCall, answer: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _CascadeRows:
    """The rows of one form in a batch, ordered by the hash of their text.

    Attributes:
        embeds: the call of each row's vector.
        size: the sample, which is at the beginning.
    """

    form: int
    calls: Sequence[AiCall]
    embeds: Sequence[AiCall]
    size: SampleSize
    told: CascadeTrace


@dataclass(frozen=True, slots=True)
class _Judge:
    """A classifier that passed its check, and the answers by class."""

    classifier: RowClassifier
    thresholds: Numbers
    answers: Sequence[Any]

    def answer(self, vectors: Numbers) -> list[Any]:
        """Return for each vector the answer, or None for a row to ask the model about."""
        predicted = self.classifier.predict(vectors)
        sure = predicted.sure >= self.thresholds[predicted.classes]
        return [
            self.answers[one] if certain else None
            for one, certain in zip(predicted.classes.tolist(), sure.tolist(), strict=True)
        ]


class Cascade:
    """The cascades of one statement.

    Attributes:
        _vectors: vectors of earlier rows, by embedding call.
    """

    def __init__(
        self,
        forms: Sequence[CallForm],
        defaults: CallDefaults,
        host: CascadeHost,
        *,
        trace: StatementTrace,
        book: AnswerBook,
        spending: Spending,
    ) -> None:
        self._asked = {
            form.key: (form, asked)
            for form in forms
            if (asked := asked_agreement(form, defaults)) and not form.always_null
        }
        self._defaults = defaults
        self._trace = trace
        self._host = host
        self._book = book
        self._spending = spending
        self._vectors: dict[AiCall, Vector] = {}
        self._kept = 0
        for key, (_, asked) in self._asked.items():
            trace.forms[key].cascade = CascadeTrace(asked)

    @property
    def is_asked(self) -> bool:
        """True if a form asks for a cascade."""
        return bool(self._asked)

    async def answer(self, calls: Sequence[AiCall], forms: Mapping[AiCall, int]) -> PlanSummary:
        """Answer a batch of distinct calls.

        Args:
            calls: the batch.
            forms: key of the form of each call.

        Raises:
            TierKVError: an error of the statement.
        """
        cascades = self._cascades(calls, forms)
        later = {call for rows in cascades for call in rows.calls[rows.size.total :]}
        summary = await self._host.ask([call for call in calls if call not in later])
        left: list[AiCall] = []
        for rows in cascades:
            unsure = rows.calls[rows.size.total :]
            try:
                judge = await self._judge(rows)
                unsure = await self._classified(rows, judge)
            except UnusedError as reason:
                rows.told.unused = str(reason)
            rows.told.by_model += rows.size.total + len(unsure)
            left += unsure
        return summary + await self._host.ask(left) if left else summary

    def notices(self) -> list[Notice]:
        """Return the notice about cascades that were asked for and not used."""
        unused: dict[str, None] = {}
        for key, (form, _) in self._asked.items():
            told = self._trace.forms[key].cascade
            if told is not None and told.unused and not told.is_used:
                unused[f"{form.function.name}: {told.unused}"] = None
        if not unused:
            return []
        return [
            Notice(
                "NOTICE",
                f"tierkv.cascade was not used for {'; '.join(unused)}",
                detail="The model answered all rows.",
            )
        ]

    def _cascades(self, calls: Sequence[AiCall], forms: Mapping[AiCall, int]) -> list[_CascadeRows]:
        by_form: dict[int, list[AiCall]] = {}
        for call in calls:
            if forms[call] in self._asked:
                by_form.setdefault(forms[call], []).append(call)
        found: list[_CascadeRows] = []
        for key, rows in by_form.items():
            form, asked = self._asked[key]
            told = self._trace.forms[key].cascade
            assert told is not None
            try:
                found.append(self._rows(form, rows, asked, told))
            except UnusedError as reason:
                told.unused = str(reason)
                told.by_model += len(rows)
        return found

    def _rows(
        self, form: CallForm, calls: Sequence[AiCall], asked: float, told: CascadeTrace
    ) -> _CascadeRows:
        other = [name for name in form.row_parameters if name not in ROW_TEXT]
        if other:
            raise UnusedError(f"argument {other[0]} differs from row to row")
        size = SampleSize.of(len(calls), asked)
        if len(calls) < size.least_rows:
            rows = f"{len(calls)} distinct row{'s' * (len(calls) != 1)}"
            raise UnusedError(f"{rows}, at least {size.least_rows} are needed")
        refusal = self._spending.refusal_of_vectors(len(calls))
        if refusal:
            raise UnusedError(refusal)
        texts = {call: row_text(call, form.row_parameters) for call in calls}
        ordered = sorted(calls, key=lambda call: sample_order(texts[call]))
        model = self._defaults.options.cascade_model or ordered[0].model
        embeds = [_embed_call(texts[call], model) for call in ordered]
        return _CascadeRows(form.key, ordered, embeds, size, told)

    async def _judge(self, rows: _CascadeRows) -> _Judge:
        """Fit a classifier to the sample and check the classifier.

        Raises:
            UnusedError: the classifier can't be used.
            TierKVError: an error of the statement.
        """
        size = rows.size
        answers = [self._book.value_of(call) for call in rows.calls[: size.total]]
        known = known_answers(answers[: size.learned])
        vectors = await self._embedded(rows, 0, size.total)
        numbers = {answer: number for number, answer in enumerate(known)}
        usable = [at for at in range(size.total) if answers[at] is not None and at in vectors]
        learned = [at for at in usable if at < size.learned]
        checked = [at for at in usable if at >= size.learned]
        actual = np.array([numbers.get(answers[at], -1) for at in learned], np.int64)
        if any((actual == number).sum() < LEAST_OF_ANSWER for number in range(len(known))):
            raise UnusedError("too few rows of an answer have a vector")
        stacked = np.stack([vectors[at] for at in learned])
        judge = await asyncio.to_thread(
            _fitted, stacked, actual, known, asked=rows.told.asked, checked=len(checked)
        )
        given = judge.answer(np.stack([vectors[at] for at in checked])) if checked else []
        compared = [
            answer == answers[at]
            for at, answer in zip(checked, given, strict=True)
            if answer is not None
        ]
        self._check(rows.told, sum(compared), len(compared), len(checked))
        return judge

    def _check(self, told: CascadeTrace, agreed: int, compared: int, checked: int) -> None:
        """Record the check of a classifier.

        Raises:
            UnusedError: the agreement is not reached.
        """
        if not compared:
            raise UnusedError(f"the classifier was sure of none of {checked} checked rows")
        bound = lower_bound(agreed, compared)
        if bound < told.asked:
            raise UnusedError(
                f"it agreed on {agreed} of the {compared} checked rows it was sure of, which shows "
                f"an agreement of at least {bound:.3f}"
            )
        told.agreed += agreed
        told.checked += compared
        told.bound = lower_bound(told.agreed, told.checked)

    async def _classified(self, rows: _CascadeRows, judge: _Judge) -> list[AiCall]:
        """Answer the rows behind the sample that the classifier is sure of; return the others."""
        unsure: list[AiCall] = []
        for start in range(rows.size.total, len(rows.calls), _EMBEDDED_AT_ONCE):
            end = min(start + _EMBEDDED_AT_ONCE, len(rows.calls))
            try:
                vectors = await self._embedded(rows, start, end)
            except UnusedError as reason:
                rows.told.unused = str(reason)
                return [*unsure, *rows.calls[start:]]
            given: dict[int, Any] = {}
            if vectors:
                answers = judge.answer(np.stack(list(vectors.values())))
                given = dict(zip(vectors, answers, strict=True))
            for at in range(start, end):
                answer = given.get(at)
                if answer is None:
                    unsure.append(rows.calls[at])
                else:
                    rows.told.by_classifier += 1
                    self._host.classified(rows.calls[at], answer)
        return unsure

    async def _embedded(self, rows: _CascadeRows, start: int, end: int) -> dict[int, Numbers]:
        """Return the vectors of rows by place; rows without a vector are missing.

        Raises:
            UnusedError: no vectors can be computed.
        """
        found: dict[AiCall, Vector] = {}
        known = self._vectors

        def take(call: AiCall, vector: Any) -> None:
            if vector is None:
                return
            numbers = np.asarray(vector, np.float32)
            if np.isfinite(numbers).all():
                found[call] = numbers

        wanted = dict.fromkeys(rows.embeds[start:end])
        found |= {call: known[call] for call in wanted if call in known}
        missing = [call for call in wanted if call not in known]
        try:
            if missing:
                await self._host.embed(rows.form, missing, take)
        except CancelledByUserError:
            raise
        except TierKVError as error:
            if error.sqlstate == _LIMIT_REACHED:
                raise
            raise UnusedError(f"no vectors: {error.message}") from error
        rows.told.vectors += len(missing)
        self._keep({call: found[call] for call in missing if call in found})
        return {
            at: found[rows.embeds[at]].astype(np.float64)
            for at in range(start, end)
            if rows.embeds[at] in found
        }

    def _keep(self, vectors: Mapping[AiCall, Vector]) -> None:
        if len(self._asked) < 2:  # No other form could want them.
            return
        for call, vector in vectors.items():
            if self._kept + len(vector) > _KEPT_NUMBERS:
                return
            self._kept += len(vector)
            self._vectors[call] = vector


_LIMIT_REACHED: Final = "53400"
"""SQLSTATE of an error about a limit of the statement."""


def _embed_call(text: str, model: str | None) -> AiCall:
    return make_call(EMBED, {"input": text, "model": model or None})


def _fitted(
    vectors: Numbers, actual: Classes, answers: Sequence[Any], *, asked: float, checked: int
) -> _Judge:
    fitted = fit_classifier(vectors, actual, len(answers))
    thresholds = choose_thresholds(
        fitted.unseen.sure,
        fitted.unseen.classes,
        actual,
        classes=len(answers),
        asked=asked,
        checked=checked,
    )
    return _Judge(fitted.classifier, thresholds, answers)

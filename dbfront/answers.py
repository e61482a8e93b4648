"""The memo of one statement: which answers are known, and which calls the engine missed.

The engine's AI functions call ``look_up`` for every row, from its own threads; the executor takes
the misses between rounds and adds answers. It never talks to a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dbfront.chunked_prompt import clean_documents
from kvcore.errors import UserError
from sql.options import parse_options
from sql.plan import CallForm, CallParams

_UNKNOWN: Final = "\0 no answer yet"
"""Stands for a missing memo entry; compared by identity, so that no answer can equal it."""


@dataclass(frozen=True, slots=True)
class AiCall:
    """One distinct AI call: equal calls have one answer in a statement."""

    params: CallParams
    prompt: str
    documents: tuple[str, ...] = ()


Question = str | tuple[str, ...]
"""What comes with a row: the prompt, or with documents the prompt and then those."""


class AnswerBook:
    """Answers and misses of one statement.

    Attributes:
        lookups: calls with a prompt that the engine made in this round.
        fatal: the first per-row argument that can't be used; the statement must fail with it.
    """

    def __init__(self, forms: Iterable[CallForm]) -> None:
        self.lookups = 0
        self.fatal: UserError | None = None
        self._forms = {form.key: form for form in forms}
        self._memos: dict[CallParams, dict[Question, str | None]] = {}
        self._memo_of = {key: self._memo(form.params) for key, form in self._forms.items()}
        # Prompts missed, by form and arguments; a million rows may miss the same few prompts, so
        # a known miss must cost no more than a dictionary lookup.
        self._missed: dict[int, dict[CallParams, dict[Question, None]]] = {}
        self._missed_of: dict[int, dict[Question, None]] = {}
        self._params_of: dict[tuple[int, str | None, str | None, str | None], CallParams] = {}
        self._budget: int | None = None
        self.start_round()

    def look_up(
        self, key: int, prompt: str | None, documents: Sequence[str | None] | None = None
    ) -> str | None:
        """Answer a call with constant arguments; an unknown one is recorded and answered NULL."""
        if prompt is None:
            return None
        self.lookups += 1
        question = self._question(prompt, documents)
        if question is None:
            return None
        answer = self._memo_of[key].get(question, _UNKNOWN)
        if answer is not _UNKNOWN:
            return answer
        missed = self._missed_of[key]
        if question not in missed:
            self._miss(self._forms[key], missed, question)
        return None

    def look_up_row(
        self,
        key: int,
        prompt: str | None,
        model: str | None,
        system_prompt: str | None,
        options: str | None,
        documents: Sequence[str | None] | None = None,
    ) -> str | None:
        """Answer a call whose other arguments come with the row."""
        if prompt is None or self.fatal is not None:
            return None
        self.lookups += 1
        form = self._forms[key]
        params = self._row_params(form, model, system_prompt, options)
        question = self._question(prompt, documents)
        if params is None or question is None:
            return None
        answer = self._memo(params).get(question, _UNKNOWN)
        if answer is not _UNKNOWN:
            return answer
        self._miss(form, self._missed[key].setdefault(params, {}), question)
        return None

    def start_round(self, budget: int | None = None) -> None:
        """Forget the misses; record at most ``budget`` of each filtering form in this round."""
        self.lookups = 0
        self._budget = budget
        self._missed = {key: {form.params: {}} for key, form in self._forms.items()}
        self._missed_of = {key: self._missed[key][form.params] for key, form in self._forms.items()}

    @property
    def has_misses(self) -> bool:
        """Whether the engine was answered NULL for want of an answer."""
        return any(map(self._has_missed, self._forms))

    def next_batch(self, *, without_filters: bool = False) -> list[AiCall]:
        """Return the distinct missed calls of the lowest stage that has any.

        Calls of higher stages are guarded by these, and may turn out not to be needed.

        Args:
            without_filters: leave calls aside that only decide about further rows.
        """
        waiting = [
            form
            for key, form in self._forms.items()
            if self._has_missed(key) and not (without_filters and form.filters)
        ]
        stage = min((form.stage for form in waiting), default=0)
        return list(
            dict.fromkeys(
                _call(params, question)
                for form in waiting
                if form.stage == stage
                for params, questions in self._missed[form.key].items()
                for question in questions
            )
        )

    def add(self, answers: Mapping[AiCall, str | None]) -> None:
        """Note answers; None is a failed call's NULL."""
        for call, text in answers.items():
            question = (call.prompt, *call.documents) if call.documents else call.prompt
            self._memo(call.params)[question] = text

    def _memo(self, params: CallParams) -> dict[Question, str | None]:
        return self._memos.setdefault(params, {})

    def _has_missed(self, key: int) -> bool:
        return any(self._missed[key].values())

    def _miss(self, form: CallForm, missed: dict[Question, None], question: Question) -> None:
        if not form.filters or self._budget is None or len(missed) < self._budget:
            missed[question] = None

    def _question(self, prompt: str, documents: Sequence[str | None] | None) -> Question | None:
        if documents is None:
            return prompt
        try:
            kept = clean_documents(documents)
        except UserError as error:
            self.fatal = self.fatal or error
            return None
        return (prompt, *kept) if kept else prompt

    def _row_params(
        self, form: CallForm, model: str | None, system_prompt: str | None, options: str | None
    ) -> CallParams | None:
        key = (form.key, model, system_prompt, options)
        params = self._params_of.get(key)
        if params is None:
            try:
                parsed = parse_options(_decoded(options))
            except UserError as error:
                self.fatal = error
                return None
            params = CallParams(form.params.function, model, system_prompt, parsed)
            self._params_of[key] = params
        return params


def _call(params: CallParams, question: Question) -> AiCall:
    if isinstance(question, str):
        return AiCall(params, question)
    return AiCall(params, question[0], question[1:])


def _decoded(options: str | None) -> str | None:
    """Undo to_json's quoting of an options argument that was text, not JSON."""
    if options is None or not options.startswith('"'):
        return options
    decoded: str = json.loads(options)
    return decoded

"""The memo of one statement: which answers are known, and which calls the engine missed.

The engine's AI functions call ``look_up`` for every row, from its own threads; the executor takes
the misses between rounds and adds answers. It never talks to a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcore.errors import UserError
from sql.options import parse_options
from sql.plan import CallForm, CallParams


@dataclass(frozen=True, slots=True)
class AiCall:
    """One distinct AI call: equal calls have one answer in a statement."""

    params: CallParams
    prompt: str


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
        self._memos: dict[CallParams, dict[str, str | None]] = {}
        self._memo_of = {key: self._memo(form.params) for key, form in self._forms.items()}
        self._missed: dict[int, dict[AiCall, None]] = {key: {} for key in self._forms}
        self._params_of: dict[tuple[int, str | None, str | None, str | None], CallParams] = {}
        self._budget: int | None = None

    def look_up(self, key: int, prompt: str | None) -> str | None:
        """Answer a call with constant arguments; an unknown one is recorded and answered NULL."""
        if prompt is None:
            return None
        self.lookups += 1
        try:
            return self._memo_of[key][prompt]
        except KeyError:
            form = self._forms.get(key)
            if form is not None:
                self._miss(form, form.params, prompt)
            return None

    def look_up_row(
        self,
        key: int,
        prompt: str | None,
        model: str | None,
        system_prompt: str | None,
        options: str | None,
    ) -> str | None:
        """Answer a call whose other arguments come with the row."""
        form = self._forms.get(key)
        if prompt is None or form is None or self.fatal is not None:
            return None
        self.lookups += 1
        params = self._row_params(form, model, system_prompt, options)
        if params is None:
            return None
        try:
            return self._memo(params)[prompt]
        except KeyError:
            self._miss(form, params, prompt)
            return None

    def start_round(self, budget: int | None = None) -> None:
        """Forget the misses; record at most ``budget`` of each filtering form in this round."""
        self.lookups = 0
        self._budget = budget
        for missed in self._missed.values():
            missed.clear()

    @property
    def has_misses(self) -> bool:
        """Whether the engine was answered NULL for want of an answer."""
        return any(self._missed.values())

    def next_batch(self, *, without_filters: bool = False) -> list[AiCall]:
        """Return the distinct missed calls of the lowest stage that has any.

        Calls of higher stages are guarded by these, and may turn out not to be needed.

        Args:
            without_filters: leave calls aside that only decide about further rows.
        """
        waiting = [
            form
            for key, form in self._forms.items()
            if self._missed[key] and not (without_filters and form.filters)
        ]
        stage = min((form.stage for form in waiting), default=0)
        chosen = [self._missed[form.key] for form in waiting if form.stage == stage]
        return list(dict.fromkeys(call for missed in chosen for call in missed))

    def add(self, answers: Mapping[AiCall, str | None]) -> None:
        """Note answers; None is a failed call's NULL."""
        for call, text in answers.items():
            self._memo(call.params)[call.prompt] = text

    def _memo(self, params: CallParams) -> dict[str, str | None]:
        return self._memos.setdefault(params, {})

    def _miss(self, form: CallForm, params: CallParams, prompt: str) -> None:
        missed = self._missed[form.key]
        if not form.filters or self._budget is None or len(missed) < self._budget:
            missed[AiCall(params, prompt)] = None

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


def _decoded(options: str | None) -> str | None:
    """Undo to_json's quoting of an options argument that was text, not JSON."""
    if options is None or not options.startswith('"'):
        return options
    decoded: str = json.loads(options)
    return decoded

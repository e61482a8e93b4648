"""The answers of one statement: which calls are answered, and which ones the engine missed.

The engine's AI functions call ``look_up`` for every row, from the engine's own threads. The
executor takes the misses between two rounds and adds their answers, as text that the engine casts
to the function's type. This module never talks to a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tierkv.kvcore.errors import UserError
from tierkv.sql.calls.ai_call import AiCall, CallForm, resolve_call
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import Returns
from tierkv.sql.text.exact_json import exact_text

_REPLACEMENT: Final = "\ufffd"


def answer_text(value: Any, returns: Returns, dialect: Dialect) -> str | None:
    """Write an answer for the engine.

    What a model may say and an engine can't hold (NUL, half a surrogate pair) becomes U+FFFD.

    Args:
        value: text, bool, a number, a list, or what JSON may hold; None is NULL.
        returns: the function's type.
        dialect: of the engine that casts the text.
    """
    if value is None:
        return None
    if returns is Returns.TEXT:
        return _clean(str(value))
    if returns in (Returns.VECTOR, Returns.TEXTS) and dialect is Dialect.POSTGRES:
        return _array(value)
    return exact_text(_clean_json(value), comma=", ", colon=": ")


def _clean(text: str) -> str:
    """Replace what is no text to an engine."""
    if "\0" in text:
        text = text.replace("\0", _REPLACEMENT)
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _clean_json(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean_json(item) for item in value]
    return value


def _array(items: list[Any]) -> str:
    """Write PostgreSQL's array text; every item of text is quoted."""
    return f"{{{','.join(_item(item) for item in items)}}}"


def _item(item: Any) -> str:
    if isinstance(item, int | float):
        return repr(item)
    escaped = _clean(str(item)).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_UNKNOWN: Final = "\0 no answer yet"
"""Stands for a missing memo entry; compared by identity, so that no answer can equal it."""


class AnswerBook:
    """Answers and misses of one statement.

    Attributes:
        fatal: the first per-row argument that can't be used; the statement must fail with it.
        fatal_form: key of the form that got it.
        lookups: calls that the engine made in this round, by form key.
        answered: distinct calls among all it made whose answer is known, by form key.
        aside: texts that were asked about before ``set_aside``, by form key.
        unmet: those of them that the engine has not met in this round.
        unanswered: calls of this round whose answer was not known; with a LIMIT that is reached,
            some are never asked.
    """

    def __init__(self, forms: Iterable[CallForm], dialect: Dialect = Dialect.DUCKDB) -> None:
        self.fatal: UserError | None = None
        self.fatal_form = -1
        self.lookups: dict[int, int] = {}
        self._dialect = dialect
        self._forms = {form.key: form for form in forms}
        # By form and the row's text: a million rows may ask for the same few answers, so that a
        # row must cost no more than a dictionary lookup, missed or not.
        self._memos: dict[int, dict[str, str | None]] = {key: {} for key in self._forms}
        self.answered: dict[int, int] = dict.fromkeys(self._forms, 0)
        self._missed: dict[int, dict[str, AiCall]] = {}
        self._values: dict[AiCall, Any] = {}
        self._texts: dict[AiCall, list[tuple[int, str]]] = {}
        self._gathered: dict[AiCall, AiCall] = {}
        self._budget: int | None = None
        self.aside: dict[int, frozenset[str]] = {}
        self.unmet: dict[int, set[str]] = {}
        self.unanswered = 0
        self.start_round()

    def look_up(self, key: int, text: str | None) -> str | None:
        """Answer a call; an unknown one is recorded and answered NULL."""
        if text is None:
            return None
        self.lookups[key] += 1
        answer = self._memos[key].get(text, _UNKNOWN)
        if answer is not _UNKNOWN:
            if self.unmet:
                self.unmet[key].discard(text)
            return answer
        answer = None
        if text not in self._missed[key] and self.fatal is None:
            answer = self._first_seen(self._forms[key], text)
        self.unanswered += answer is None
        return answer

    @property
    def first_key(self) -> int | None:
        """Key of the first form; all forms of a statement have keys of one number."""
        return next(iter(self._forms), None)

    def start_round(self, budget: int | None = None) -> None:
        """Forget the misses; record at most ``budget`` of each filtering form in this round."""
        self._budget = budget
        self.lookups = dict.fromkeys(self._forms, 0)
        self._missed = {key: {} for key in self._forms}
        self.unmet = {key: set(texts) for key, texts in self.aside.items()}
        self.unanswered = 0

    def set_aside(self) -> None:
        """What was asked so far was asked to learn something: the statement itself comes now."""
        self.aside = {
            key: frozenset() if self._forms[key].function.local else frozenset(texts)
            for key, texts in self._memos.items()
        }

    @property
    def has_misses(self) -> bool:
        """Whether the engine was answered NULL for want of an answer."""
        return any(self._missed.values())

    @property
    def missed_keys(self) -> tuple[int, ...]:
        """Forms of which calls were missed in this round."""
        return tuple(key for key, missed in self._missed.items() if missed)

    @property
    def total_lookups(self) -> int:
        """Answered calls that the engine made: in this round, or only before it."""
        before = sum(map(len, self.unmet.values()))
        return sum(self.lookups.values()) - self.unanswered + before

    def next_batch(self, *, without_filters: bool = False) -> list[AiCall]:
        """Return the distinct missed calls of the lowest stage that has any.

        Calls of higher stages are guarded by these, and may turn out not to be needed. Where a
        LIMIT may stop early it is the other way round for filters: a row that passed one is asked
        about by the next before further rows are by the first.

        Args:
            without_filters: leave calls aside that only decide about further rows.
        """
        waiting = [
            form
            for key, form in self._forms.items()
            if self._missed[key] and not (without_filters and form.filters)
        ]
        stage = min((form.stage for form in waiting), default=0)
        if self._budget is not None and all(f.filters for f in waiting if f.stage == stage):
            waiting = [form for form in waiting if form.filters]
            stage = max((form.stage for form in waiting), default=0)
        return list(
            dict.fromkeys(
                call
                for form in waiting
                if form.stage == stage
                for call in self._missed[form.key].values()
            )
        )

    def answers(
        self, questions: Iterable[tuple[int, str]]
    ) -> Iterator[tuple[int, str, str | None]]:
        """Give those questions, by form key and the row's text, that have an answer."""
        for key, text in questions:
            answer = self._memos[key].get(text, _UNKNOWN)
            if answer is not _UNKNOWN:
                yield key, text, answer

    def missed_forms(self, call: AiCall) -> tuple[int, ...]:
        """Return the keys of the forms that missed a call, by stage.

        The first is what it is asked for: one of a higher stage may have made the same call only
        because another's answer was missing.
        """
        keys = dict.fromkeys(key for key, _ in self._texts.get(call, ()))
        return tuple(sorted(keys, key=lambda key: self._forms[key].stage))

    def add(self, call: AiCall, value: Any) -> None:
        """Note an answer as a Python value; None is NULL."""
        self._values[call] = value
        for key, text in self._texts.pop(call, ()):
            self._memos[key][text] = self._text(key, value)
            self.answered[key] += 1

    def forget_oldest(self, most: int) -> None:
        """Keep the latest ``most`` answers of each kind; the others may be missed again."""
        kept: list[dict[Any, Any]] = [self._values, *self._memos.values()]
        for answers in kept:
            for _ in range(len(answers) - most):
                del answers[next(iter(answers))]

    def _first_seen(self, form: CallForm, text: str) -> str | None:
        """Resolve a text the form has not sent before; answer it if another form was answered."""
        limited = form.filters and self._budget is not None
        if limited and len(self._missed[form.key]) >= (self._budget or 0):
            return None
        try:
            call = resolve_call(form, text)
        except UserError as error:
            if self.fatal is None:
                self.fatal, self.fatal_form = error, form.key
            return None
        if call is not None and form.unordered:
            # The engine may gather the same rows in another order in each round.
            call = self._gathered.setdefault(call.with_sorted_rows(), call)
        if call is None or call in self._values:
            answer = None if call is None else self._text(form.key, self._values[call])
            self.answered[form.key] += call is not None
            self._memos[form.key][text] = answer
            return answer
        self._missed[form.key][text] = call
        waiting = self._texts.setdefault(call, [])
        if (form.key, text) not in waiting:
            waiting.append((form.key, text))
        return None

    def _text(self, key: int, value: Any) -> str | None:
        return answer_text(value, self._forms[key].function.returns, self._dialect)

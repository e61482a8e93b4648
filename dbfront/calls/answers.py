"""The answers of one statement: answered calls, and calls the engine missed.

The engine's AI functions call ``look_up`` for every row, from the engine's own threads. Between two
rounds the executor reads the missed calls and adds their answers as text, which the engine casts to
the function's type. This module never calls a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from tierkv.kvcore.errors import UserError
from tierkv.sql.calls.ai_call import AiCall, CallForm, resolve_call
from tierkv.sql.calls.arguments import Value
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import Returns
from tierkv.sql.text.exact_values import exact_text

_REPLACEMENT: Final = "\ufffd"


def answer_text(value: Any, returns: Returns, dialect: Dialect) -> str | None:
    """Convert an answer to text for the engine.

    Characters that a model may generate but an engine cannot store (NUL, half a surrogate pair)
    become U+FFFD.

    Args:
        value: text, bool, a number, a list, or any JSON value; None is NULL.
        returns: return type of the function.
        dialect: dialect of the engine that casts the text.
    """
    if value is None:
        return None
    if returns is Returns.TEXT:
        return _clean(str(value))
    if returns in (Returns.VECTOR, Returns.TEXTS) and dialect is Dialect.POSTGRES:
        return _array(value)
    return exact_text(_clean_json(value), comma=", ", colon=": ")


def _clean(text: str) -> str:
    """Replace characters that the engine does not accept."""
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
    """Return PostgreSQL's array text; every text item is quoted."""
    return f"{{{','.join(_item(item) for item in items)}}}"


def _item(item: Any) -> str:
    if isinstance(item, int | float):
        return repr(item)
    escaped = _clean(str(item)).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_LONG: Final = 256
_MOST_CHARS: Final = 1 << 27
"""Characters of all texts that a round may miss. Further misses wait for the next round, which runs
the statement once more, so a table of any size is asked within bounded memory.
"""


def _brief(text: str) -> str | bytes:
    """Return a short stand-in for a text: itself, or 128 bits of BLAKE2 (RFC 7693) of a long one.

    Answers are remembered by this key, so the texts of answered rows need no memory.
    """
    if len(text) <= _LONG:
        return text
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _identity(call: AiCall) -> AiCall | bytes:
    """Return a short stand-in for a call, by the same rule."""
    if all(_is_short(value) for _, value in call.arguments):
        return call
    return blake2b(repr(call).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _is_short(value: Value) -> bool:
    return len(value) <= _LONG if isinstance(value, str) else not isinstance(value, tuple)


_UNKNOWN: Final = "\0 no answer yet"
"""Sentinel for a missing memo entry, compared by identity, so no answer can equal the sentinel."""


@dataclass(slots=True)
class _Waiting:
    """A call without an answer: its stand-in, and the forms and texts of the rows that wait."""

    identity: AiCall | bytes
    texts: list[tuple[int, str]] = field(default_factory=list)


class AnswerBook:
    """Answers and misses of one statement.

    Attributes:
        fatal: error about the first invalid per-row argument; the statement must fail with the
            error.
        fatal_form: key of the form with the invalid argument.
        lookups: calls made by the engine in this round, by form key.
        answered: distinct calls with a known answer, over all rounds, by form key.
        aside: texts asked before ``set_aside``, by form key.
        unmet: texts of ``aside`` not yet called by the engine in this round.
        unanswered: calls of this round without a known answer. If a LIMIT stops the statement
            early, some of the calls are never asked.
        is_cut: True if this round left misses out, because the texts of all would be too long.
    """

    def __init__(self, forms: Iterable[CallForm], dialect: Dialect = Dialect.DUCKDB) -> None:
        self.fatal: UserError | None = None
        self.fatal_form = -1
        self.lookups: dict[int, int] = {}
        self._dialect = dialect
        self._forms = {form.key: form for form in forms}
        # By form and the row's text. A million rows may need the same few answers, so a row must
        # cost no more than a dictionary lookup, hit or miss.
        self._memos: dict[int, dict[str | bytes, str | None]] = {key: {} for key in self._forms}
        self.answered: dict[int, int] = dict.fromkeys(self._forms, 0)
        self._missed: dict[int, dict[str, AiCall]] = {}
        self._values: dict[AiCall | bytes, Any] = {}
        self._waiting: dict[AiCall, _Waiting] = {}
        self._gathered: dict[AiCall, AiCall] = {}
        self._budget: int | None = None
        self.aside: dict[int, frozenset[str | bytes]] = {}
        self.unmet: dict[int, set[str | bytes]] = {}
        self.unanswered = 0
        self.is_cut = False
        self._chars = 0
        self._may_cut = False
        self.start_round()

    def look_up(self, key: int, text: str | None) -> str | None:
        """Return the answer to a call; an unknown call is recorded and answered NULL."""
        if text is None:
            return None
        self.lookups[key] += 1
        known = _brief(text)
        answer = self._memos[key].get(known, _UNKNOWN)
        if answer is not _UNKNOWN:
            if self.unmet:
                self.unmet[key].discard(known)
            return answer
        answer = None
        if text not in self._missed[key] and self.fatal is None:
            answer = self._first_seen(self._forms[key], text)
        self.unanswered += answer is None
        return answer

    @property
    def first_key(self) -> int | None:
        """Key of the first form; all forms of a statement have keys from one base number."""
        return next(iter(self._forms), None)

    def start_round(self, budget: int | None = None, *, may_cut: bool = False) -> None:
        """Clear the misses of the round before.

        Args:
            budget: most misses to record per filtering form; None is no bound.
            may_cut: misses may be left out once their texts are long (``is_cut``); the caller runs
                the statement again.
        """
        self._budget = budget
        self._may_cut = may_cut
        self.lookups = dict.fromkeys(self._forms, 0)
        self._missed = {key: {} for key in self._forms}
        self.unmet = {key: set(texts) for key, texts in self.aside.items()}
        self.unanswered = 0
        self.is_cut = False
        self._chars = 0

    def set_aside(self) -> None:
        """Mark all calls so far as preparatory; the statement itself runs next."""
        self.aside = {
            key: frozenset() if self._forms[key].function.local else frozenset(texts)
            for key, texts in self._memos.items()
        }

    @property
    def has_misses(self) -> bool:
        """True if the engine got NULL in place of a missing answer."""
        return any(self._missed.values())

    @property
    def missed_keys(self) -> tuple[int, ...]:
        """Keys of the forms with missed calls in this round."""
        return tuple(key for key, missed in self._missed.items() if missed)

    @property
    def total_lookups(self) -> int:
        """Number of answered calls made by the engine, in this round or only before this round."""
        before = sum(map(len, self.unmet.values()))
        return sum(self.lookups.values()) - self.unanswered + before

    def next_batch(self, *, without_filters: bool = False) -> list[AiCall]:
        """Return the distinct missed calls of the lowest stage with misses.

        Calls of higher stages depend on the results of lower stages, and may turn out to be
        unnecessary. For filters with a LIMIT that may stop early, the highest stage comes first: a
        row that passed one filter is asked about by the next filter before further rows reach the
        first filter.

        Args:
            without_filters: True to skip calls that only decide about further rows.
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
        """Yield the questions (form key, the row's text) with known answers, with the answers."""
        for key, text in questions:
            answer = self._memos[key].get(_brief(text), _UNKNOWN)
            if answer is not _UNKNOWN:
                yield key, text, answer

    def value_of(self, call: AiCall) -> Any:
        """Return the recorded answer of a call as a Python value; None for NULL and no answer."""
        return self._values.get(_identity(call))

    def missed_forms(self, call: AiCall) -> tuple[int, ...]:
        """Return the keys of the forms that missed a call in this round, in order of stage.

        The first form is the reason for the call. A form of a higher stage may have made the same
        call only because the answer to another call was missing, and in an earlier round any form
        may have.
        """
        waiting = self._waiting.get(call)
        if waiting is None:
            return ()
        if len(waiting.texts) == 1:
            return (waiting.texts[0][0],)
        keys = dict.fromkeys(key for key, text in waiting.texts if text in self._missed[key])
        keys = keys or dict.fromkeys(key for key, _ in waiting.texts)
        return tuple(sorted(keys, key=lambda key: self._forms[key].stage))

    def add(self, call: AiCall, value: Any) -> None:
        """Record an answer as a Python value; None is NULL."""
        waiting = self._waiting.pop(call, None)
        self._values[_identity(call) if waiting is None else waiting.identity] = value
        for key, text in () if waiting is None else waiting.texts:
            self._memos[key][_brief(text)] = self._text(key, value)
            self.answered[key] += 1

    def forget_oldest(self, most: int) -> None:
        """Keep the latest ``most`` answers of each form; dropped calls may be missed again."""
        kept: list[dict[Any, Any]] = [self._values, *self._memos.values()]
        for answers in kept:
            for _ in range(len(answers) - most):
                del answers[next(iter(answers))]

    def _first_seen(self, form: CallForm, text: str) -> str | None:
        """Resolve a new text of a form; return the answer if another form already has it."""
        limited = form.filters and self._budget is not None
        if limited and len(self._missed[form.key]) >= (self._budget or 0):
            return None
        if self._may_cut and self._chars > _MOST_CHARS:
            self.is_cut = True
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
        if call is None:
            self._memos[form.key][_brief(text)] = None
            return None
        waiting = self._waiting.get(call)
        if waiting is None:
            identity = _identity(call)
            found = self._values.get(identity, _UNKNOWN)
            if found is not _UNKNOWN:
                answer = self._text(form.key, found)
                self.answered[form.key] += 1
                self._memos[form.key][_brief(text)] = answer
                return answer
            waiting = self._waiting[call] = _Waiting(identity)
        self._chars += len(text)
        self._missed[form.key][text] = call
        if (form.key, text) not in waiting.texts:
            waiting.texts.append((form.key, text))
        return None

    def _text(self, key: int, value: Any) -> str | None:
        return answer_text(value, self._forms[key].function.returns, self._dialect)

"""Reads tool calls out of the text of an answer, while the text arrives.

Pure. Text before the first call is passed on. Held back are whitespace and a possible beginning of
a call. Whitespace in a format counts as any whitespace, because tokenizers and models differ.
Without a grammar an answer may break off in the middle of a call's head; the held part is then
text.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.tool_calls.call_format import CallFormat, CallId, Part
from tierkv.dbfront.tool_calls.tool import CallDelta

_NAME_LETTERS: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."
)


@dataclass(frozen=True, slots=True)
class Reading:
    """Text to pass on, then pieces of calls."""

    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class _Literal:
    """Compares letters with a format's parts; an identifier's letters are skipped."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._wanted: list[str | None] = []
        for part in parts:
            self._wanted += [None] if isinstance(part, CallId) else list("".join(part.split()))
        self._at = 0

    def begin(self) -> None:
        self._at = 0

    @property
    def untouched(self) -> bool:
        return self._at == 0

    @property
    def complete(self) -> bool:
        return self._at == len(self._wanted)

    def take(self, letter: str) -> bool:
        """Compare the next letter; return False if it does not fit."""
        if letter.isspace():
            return True
        wanted = self._wanted[self._at]
        if wanted is None:
            if letter.isalnum():
                return True
            self._at += 1
            wanted = self._wanted[self._at] if not self.complete else None
        if letter != wanted:
            return False
        self._at += 1
        return True


class _Object:
    """Finds the end of a JSON object, letter by letter."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._depth = 0
        self._in_text = False
        self._escaped = False

    def take(self, letter: str) -> bool:
        """Take the next letter; return True for the last letter of the object."""
        if self._in_text:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_text = False
        elif letter == '"':
            self._in_text = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class CallReader:
    """Reads one answer.

    Attributes:
        began: at least one call was found.
    """

    def __init__(self, form: CallFormat, names: Container[str], new_id: Callable[[], str]) -> None:
        """Begin an answer.

        Args:
            form: how the model writes calls.
            names: the functions that may be called.
            new_id: makes the identifier of a call.
        """
        self.began = False
        self._names = names
        self._new_id = new_id
        self._marker = form.marker
        self._head = _Literal(form.head)
        self._middle = _Literal(form.middle)
        self._separator = None if form.separator is None else _Literal(form.separator)
        self._object = _Object()
        self._state = self._before
        self._held = ""
        self._name = ""
        self._index = -1
        self._arguments: list[str] = []
        self._text: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> Reading:
        """Add text; return what is certain now."""
        for letter in text:
            self._state(letter)
        self._pass_arguments()
        reading = Reading("".join(self._text), tuple(self._calls))
        self._text.clear()
        self._calls.clear()
        return reading

    def flush(self, *, cut: bool = False) -> Reading:
        """Return the rest, at the end of the answer; a call that was cut off is no text."""
        rest, self._held = self._held, ""
        begun = bool(self._marker) and self._marker in rest
        return Reading("" if self.began or (cut and begun) else rest)

    def _before(self, letter: str) -> None:
        """Look for the head of the first call; ``_held`` is whitespace, or the head's beginning."""
        self._held += letter
        if self._head.take(letter):
            if self._head.complete:
                self._state, self._name = self._in_name, ""
            return
        held, self._held = self._held, ""
        begun = not self._head.untouched
        self._head.begin()
        if not self._marker:
            self._state = self._as_text
        if not (begun and self._marker):
            self._text.append(held)
            return
        # The held letters are no head, but a head may begin within them.
        blank = len(held) - len(held.lstrip()) + 1
        self._text.append(held[:blank])
        for other in held[blank:]:
            self._state(other)

    def _in_name(self, letter: str) -> None:
        if letter in _NAME_LETTERS or (letter.isspace() and not self._name):
            self._name += letter.strip()
            self._held += letter
            return
        self._middle.begin()
        self._state = self._in_middle
        self._in_middle(letter)

    def _in_middle(self, letter: str) -> None:
        self._held += letter
        if self._middle.complete:
            if letter.isspace():
                return
            self._begin_call(letter)
        elif not self._middle.take(letter):
            self._give_up()

    def _begin_call(self, letter: str) -> None:
        if letter != "{" or self._name not in self._names:
            self._give_up()
            return
        self.began, self._held = True, ""
        self._index += 1
        self._calls.append(CallDelta(self._index, self._new_id(), self._name))
        self._object.begin()
        self._state = self._in_arguments
        self._in_arguments(letter)

    def _in_arguments(self, letter: str) -> None:
        self._arguments.append(letter)
        if self._object.take(letter):
            self._pass_arguments()
            self._state = self._ended
            if self._separator is not None:
                self._separator.begin()
                self._state = self._behind

    def _behind(self, letter: str) -> None:
        assert self._separator is not None
        if not self._separator.take(letter):
            self._state = self._ended
        elif self._separator.complete:
            self._state, self._name = self._in_name, ""

    def _ended(self, letter: str) -> None:
        """Ignore what follows the calls."""

    def _give_up(self) -> None:
        """Read the rest as text: what looked like a call is none."""
        held, self._held = self._held, ""
        self._state = self._ended
        if not self.began:
            self._state = self._as_text
            self._text.append(held)

    def _as_text(self, letter: str) -> None:
        self._text.append(letter)

    def _pass_arguments(self) -> None:
        if self._arguments:
            self._calls.append(CallDelta(self._index, arguments="".join(self._arguments)))
            self._arguments.clear()

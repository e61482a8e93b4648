"""Writing engine SQL by copying the user's text and splicing AI calls into lookups.

A RewrittenSql remembers the origin of each copied piece, to map positions of engine errors to the
user's own text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.sql.calls.calls import Argument, FoundCall, FoundTemplate
from tierkv.sql.calls.dialect import (
    VECTOR_OPERATORS,
    Dialect,
    answer,
    argument,
    as_vector,
    collected,
    concatenation,
    engine_function,
    gathered,
    packed,
    texts,
)
from tierkv.sql.calls.functions import ArgumentKind, Returns
from tierkv.sql.text.lexer import Token, TokenKind


@dataclass(frozen=True, slots=True)
class CallText:
    """The text that the call at token ``first`` sends to the engine function."""

    first: int


Piece = str | tuple[int, int] | CallText
"""Literal text, the tokens ``[first, last)`` of the statement, or a call's text."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Names of values that were computed before.

    Attributes:
        call_texts: name of a call's text, by the call's first token.
        columns: end and name of a column reference, by its first token.
    """

    call_texts: Mapping[int, str]
    columns: Mapping[int, tuple[int, str]]


_NOTHING_COMPUTED = Computed({}, {})


@dataclass(frozen=True, slots=True)
class LateItems:
    """Items computed above their SELECT; see sql/plan/late_items.py.

    Attributes:
        openings: text to write in front of a SELECT token.
        cuts: end of an item and its replacement, by the item's first token.
        closings: tokens in front of which an opened part is closed.
        columns: see Computed; for the items in ``openings``.
        behind: text to write after the previous token.
    """

    openings: Mapping[int, tuple[Piece, ...]]
    cuts: Mapping[int, tuple[int, tuple[Piece, ...]]]
    closings: frozenset[int]
    columns: Mapping[int, tuple[int, str]]
    behind: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)

    def joined(self, other: LateItems) -> LateItems:
        """Return the combined items of different SELECTs."""
        return LateItems(
            {**self.openings, **other.openings},
            {**self.cuts, **other.cuts},
            self.closings | other.closings,
            {**self.columns, **other.columns},
            {**self.behind, **other.behind},
        )


NO_LATE_ITEMS = LateItems({}, {}, frozenset(), {})


@dataclass(frozen=True, slots=True)
class RewrittenSql:
    """Text for the engine.

    Attributes:
        text: text for the engine; parameters are ``$name`` throughout.
        marks: (offset in ``text``, offset in the user's text), ascending; for text inserted in
            place of a token, the complement of the token's offset.
        parameters: names of the used parameters, in order of first use.
    """

    text: str
    marks: tuple[tuple[int, int], ...]
    parameters: tuple[str, ...]

    def source_position(self, position: int) -> int:
        """Translate a 1-based position in ``text`` to the user's text; 0 stays unknown."""
        if position <= 0 or not self.marks:
            return max(position, 0)
        at = max(bisect_right(self.marks, (position - 1, 1 << 62)) - 1, 0)
        offset, source = self.marks[at]
        if source < 0:
            return ~source + 1
        return source + (position - 1 - offset) + 1


def joined(parts: Sequence[str | RewrittenSql]) -> RewrittenSql:
    """Concatenate texts; plain strings have no position in the user's text."""
    texts: list[str] = []
    marks: list[tuple[int, int]] = []
    parameters: dict[str, None] = {}
    length = 0
    for part in parts:
        if isinstance(part, RewrittenSql):
            marks += [(length + offset, source) for offset, source in part.marks]
            parameters.update(dict.fromkeys(part.parameters))
        text = part if isinstance(part, str) else part.text
        texts.append(text)
        length += len(text)
    return RewrittenSql("".join(texts), tuple(marks), tuple(parameters))


@dataclass(frozen=True, slots=True)
class CallRendering:
    """How one call is written: the key of the form and the kind of engine function.

    ``around`` is written before and after the call, see sql/plan/call_sites.py.
    """

    key: int
    kept_in_place: bool
    around: tuple[str, str] = ("", "")


def parameter_names(tokens: Sequence[Token], dialect: Dialect = Dialect.DUCKDB) -> dict[int, str]:
    """Name every parameter by token index: ``$1`` is "1", each ``?`` gets the next number.

    In PostgreSQL ``?`` is an operator of jsonb.
    """
    names: dict[int, str] = {}
    marks = 0
    for index, token in enumerate(tokens):
        if token.kind is TokenKind.PARAMETER:
            if token.text == "?":
                if dialect is Dialect.POSTGRES:
                    continue
                marks += 1
                names[index] = str(marks)
            else:
                names[index] = token.text[1:]
    return names


class SqlRewriter:
    """Writes engine SQL for pieces of one statement.

    Attributes:
        text, tokens: the statement; never changed.
        dialect: the target engine.
    """

    def __init__(
        self,
        text: str,
        tokens: Sequence[Token],
        calls: Mapping[int, tuple[FoundCall, CallRendering]],
        templates: Mapping[int, FoundTemplate],
        aliases: Mapping[int, str],
        parameters: Mapping[int, str],
        *,
        dialect: Dialect = Dialect.DUCKDB,
        late: LateItems = NO_LATE_ITEMS,
    ) -> None:
        self._late = late
        self.text = text
        self.tokens = tokens
        self.dialect = dialect
        self._calls = calls
        self._templates = templates
        self._aliases = aliases
        self._parameters = parameters
        self._out: list[str] = []
        self._length = 0
        self._marks: list[tuple[int, int]] = []
        self._used: dict[str, None] = {}
        self._computed = _NOTHING_COMPUTED
        self._named = True

    def rewrite(
        self,
        pieces: Sequence[Piece],
        computed: Computed = _NOTHING_COMPUTED,
        *,
        named: bool = True,
    ) -> RewrittenSql:
        """Write the pieces in sequence; ``named``: with names for unnamed columns."""
        self._named = named
        self._out, self._length, self._marks, self._used = [], 0, [], {}
        self._computed = computed
        for piece in pieces:
            if isinstance(piece, str):
                self._insert(piece)
            elif isinstance(piece, CallText):
                self._call_text(self._calls[piece.first][0])
            else:
                self._range(*piece)
        return RewrittenSql("".join(self._out), tuple(self._marks), tuple(self._used))

    def parameter_name(self, index: int) -> str:
        """Return the name of the parameter at a token; empty for any other token."""
        return self._parameters.get(index, "")

    def _range(self, first: int, last: int, *, inside: bool = False) -> None:
        """Copy tokens; ``inside`` a call, the caller adds a missing column name at the end."""
        if first >= last:
            return
        index, copied = first, self.tokens[first].start
        while index < last:
            token = self.tokens[index]
            if index in self._late.openings:
                self._copy(copied, token.start)
                self._open(self._late.openings[index])
                copied = token.start
            if index in self._late.cuts:
                self._copy(copied, token.start)
                index, instead = self._late.cuts[index]
                self._pieces(instead)
                copied = self.tokens[index - 1].end
                continue
            if index in self._computed.columns:
                self._copy(copied, token.start)
                self._mark(token.start)
                index, name = self._computed.columns[index]
                self._insert(name)
                copied = self.tokens[index - 1].end
            elif index in self._calls:
                call, rendering = self._calls[index]
                self._copy(copied, token.start)
                self._call(call, rendering)
                index, copied = call.last, self.tokens[call.last - 1].end
            elif index in self._templates:
                template = self._templates[index]
                self._copy(copied, token.start)
                self._template(template)
                index, copied = template.last, self.tokens[template.last - 1].end
            elif index in self._parameters:
                self._copy(copied, token.start)
                self._parameter(index)
                index, copied = index + 1, token.end
            else:
                index += 1
            if self._named and index in self._aliases and not (inside and index >= last):
                end = self.tokens[index - 1].end
                self._copy(copied, end)
                self._insert(f" AS {self._aliases[index]}")
                copied = end
            if not inside and (index in self._late.behind or index in self._late.closings):
                end = self.tokens[index - 1].end
                self._copy(copied, end)
                self._pieces(self._late.behind.get(index, (")",)))
                copied = end
        self._copy(copied, self.tokens[last - 1].end)

    def _open(self, pieces: Sequence[Piece]) -> None:
        """Write late items above their SELECT."""
        computed, self._computed = self._computed, Computed({}, self._late.columns)
        late, self._late = self._late, NO_LATE_ITEMS
        for piece in pieces:
            if isinstance(piece, tuple):
                self._range(*piece)
            elif isinstance(piece, str):
                self._insert(piece)
        self._computed, self._late = computed, late

    def _pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, tuple):
                self._range(*piece, inside=True)
            elif isinstance(piece, str):
                self._insert(piece)

    def _call(self, call: FoundCall, rendering: CallRendering) -> None:
        self._mark(~self.tokens[call.first].start)
        before, after = answer(self.dialect, call.function.returns)
        if self._is_compared(call):
            opening, closing = as_vector(self.dialect)
            before, after = f"{opening}{before}", f"{after}{closing}"
        name = engine_function(self.dialect, kept_in_place=rendering.kept_in_place)
        self._insert(f"{rendering.around[0]}{before}{name}({rendering.key}, ")
        computed = self._computed.call_texts.get(call.first)
        if computed is not None:
            self._insert(computed)
        else:
            self._call_text(call)
        self._mark(~self.tokens[call.first].start)
        self._insert(f"){after}{rendering.around[1]}")

    def _is_compared(self, call: FoundCall) -> bool:
        """Return whether a call is an embedding beside a vector operator, without a cast."""
        if call.function.returns is not Returns.VECTOR:
            return False
        before = self.tokens[call.first - 1].text if call.first else ""
        after = self.tokens[call.last].text if call.last < len(self.tokens) else ""
        return after in VECTOR_OPERATORS or (before in VECTOR_OPERATORS and after != "::")

    def _call_text(self, call: FoundCall) -> None:
        opening, closing = packed(self.dialect) if call.packed else ("", "")
        self._insert(opening)
        for position, parameter in enumerate(call.row_parameters):
            self._insert(", " if position else "")
            if call.gathering is not None and parameter == call.function.main.name:
                self._gathered(call, parameter)
            else:
                self._argument(call, parameter)
        self._insert(closing)

    def _argument(self, call: FoundCall, parameter: str) -> None:
        found = call.arguments[parameter]
        untyped = found.last - found.first == 1 and found.first in self._parameters
        kind = call.function.parameter(parameter).kind
        opening, closing = (
            collected(self.dialect)
            if found.collects
            else argument(self.dialect, kind, untyped=untyped)
        )
        self._insert(opening)
        self._range(found.first, found.last)
        self._insert(closing)

    def _gathered(self, call: FoundCall, parameter: str) -> None:
        gathering = call.gathering
        assert gathering is not None, "only aggregates gather"
        # With DISTINCT, ORDER BY has to name the gathered value, which works only without a cast.
        named = gathering.distinct and gathering.order is not None
        opening, closing = texts(self.dialect) if named else ("", "")
        self._insert(f"{opening}{gathered(self.dialect)}({'DISTINCT ' * gathering.distinct}")
        found = call.arguments[parameter]
        if named:
            self._range(found.first, found.last)
        else:
            self._argument(call, parameter)
        if gathering.order is not None:
            self._insert(" ")
            self._range(*gathering.order)
            if not (named or found.constant or self._holds_call(found)):
                # Otherwise equal rows would come in a different order in each round.
                self._insert(", ")
                self._argument(call, parameter)
        self._insert(")")
        if gathering.after[0] < gathering.after[1]:
            self._insert(" ")
            self._range(*gathering.after, inside=True)
        self._insert(closing)

    def _holds_call(self, found: Argument) -> bool:
        return any(index in self._calls for index in range(found.first, found.last))

    def _template(self, found: FoundTemplate) -> None:
        """Write a prompt template as a concatenation; a NULL argument makes the prompt NULL."""
        self._mark(~self.tokens[found.first].start)
        self._insert("(")
        opening, closing = argument(self.dialect, ArgumentKind.TEXT)
        for position, piece in enumerate(found.template.pieces or ("",)):
            self._insert(f" {concatenation(self.dialect)} " if position else "")
            if isinstance(piece, str):
                quoted = piece.replace("'", "''")
                self._insert(f"'{quoted}'")
            else:
                self._insert(opening)
                self._range(*found.arguments[piece])
                self._insert(closing)
        self._insert(")")

    def _parameter(self, index: int) -> None:
        name = self._parameters[index]
        self._used[name] = None
        self._mark(~self.tokens[index].start)
        self._insert(f"${name}")

    def _copy(self, start: int, end: int) -> None:
        if start < end:
            self._mark(start)
            self._insert(self.text[start:end])

    def _mark(self, source: int) -> None:
        self._marks.append((self._length, source))

    def _insert(self, text: str) -> None:
        self._out.append(text)
        self._length += len(text)

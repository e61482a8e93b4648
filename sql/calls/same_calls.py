"""Recognition of AI calls with the same form, independent of spelling.

A database treats ``ai_generate(t.p)`` and ``ai_generate("p")`` as equal expressions in GROUP BY,
DISTINCT and ORDER BY, so both must be looked up under the same key. A form does not include row
arguments, hence expressions may be compared roughly: without qualifiers, quotes, brackets and
casts. Options are compared as values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.text.lexer import Token, TokenKind, has_codes, name_value, string_value

_NAMES: Final = frozenset({TokenKind.WORD, TokenKind.QUOTED})
_CAST_TO: Final = frozenset({"::", "AS"})
_LEFT_OUT: Final = frozenset({"(", ")", "CAST"})


def call_identities(tokens: Sequence[Token], calls: Sequence[FoundCall]) -> list[Hashable]:
    """Return an identity per call; calls of one form have equal identities."""
    relations: defaultdict[str, set[str]] = defaultdict(set)
    for call in calls:
        for index in range(call.first, call.last - 2):
            if _is_qualifier(tokens, index):
                relations[_name(tokens[index + 2])].add(_name(tokens[index]))
    return [_identity(tokens, call, relations) for call in calls]


def _identity(
    tokens: Sequence[Token], call: FoundCall, relations: Mapping[str, set[str]]
) -> Hashable:
    arguments = tuple(
        (name, _row_text(tokens, argument.first, argument.last, relations))
        if name in call.row_parameters
        else (name, repr(argument.value))
        for name, argument in sorted(call.arguments.items())
    )
    gathered = None
    if call.gathering is not None:
        gathered = tuple(token.upper for token in tokens[call.first : call.last])
    return call.function.name, call.row_parameters, arguments, gathered


def _row_text(
    tokens: Sequence[Token], first: int, last: int, relations: Mapping[str, set[str]]
) -> tuple[Hashable, ...]:
    return tuple(_pieces(tokens, first, last, relations))


def _pieces(
    tokens: Sequence[Token], first: int, last: int, relations: Mapping[str, set[str]]
) -> Iterator[Hashable]:
    index = first
    while index < last:
        token = tokens[index]
        if token.upper in _CAST_TO:
            index += 1  # and the name of the type
        elif _is_qualifier(tokens, index) and len(relations[_name(tokens[index + 2])]) == 1:
            index += 1  # and the dot
        elif token.text == "?":
            yield "?", index  # Never equal to another parameter.
        elif token.kind is TokenKind.STRING and not has_codes(token):
            yield "'", string_value(token)
        elif token.upper not in _LEFT_OUT:
            yield _name(token) if token.kind in _NAMES else token.upper
        index += 1


def _is_qualifier(tokens: Sequence[Token], index: int) -> bool:
    """Return whether a name is the qualifier of a column."""
    if index + 2 >= len(tokens) or tokens[index + 1].text != ".":
        return False
    return tokens[index].kind in _NAMES and tokens[index + 2].kind in _NAMES


def _name(token: Token) -> str:
    return name_value(token).lower()

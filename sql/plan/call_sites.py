"""The AI calls of a statement as sites and forms, and the text around calls in FROM.

Called by sql/plan/plan.py. Calls of one form share one set of answers. A database treats
``ai_generate(t.p)`` and ``ai_generate("p")`` as equal expressions in GROUP BY, DISTINCT and ORDER
BY, so both must be looked up under the same key. A form does not include row arguments, hence
expressions may be compared roughly: without qualifiers, quotes, brackets and casts. Options are
compared as values.

A call in FROM gives one row for each row of the preceding relations. PostgreSQL accepts any
function in FROM, DuckDB only table functions; for DuckDB the call becomes a subquery. Without an
alias the relation and its column are named after the function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlglot import exp

from tierkv.kvcore.errors import FeatureNotSupportedError
from tierkv.sql.calls.ai_call import CallForm
from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import DOCUMENTS, Returns
from tierkv.sql.calls.placement import Place, Placement, site_number
from tierkv.sql.calls.prompt_text import static_prefix
from tierkv.sql.text.lexer import Token, TokenKind, has_codes, name_value, string_value

MAX_FORMS: Final = 4096
"""Different AI calls in one statement; the low bits of a form key."""
Around = tuple[str, str]
_MEMBERSHIP: Final = frozenset({"IN", "ANY", "ALL", "SOME"})
_SHARED_TEXT: Final = frozenset({"GROUP", "OVER", "DISTINCT", "WINDOW"})
_NAMES: Final = frozenset({TokenKind.WORD, TokenKind.QUOTED})
_CAST_TO: Final = frozenset({"::", "AS"})
_LEFT_OUT: Final = frozenset({"(", ")", "CAST"})


@dataclass(frozen=True, slots=True)
class CallSite:
    """One AI call as written; positions count characters from 1.

    Attributes:
        arguments: start of each argument's value, by parameter name.
        shared_head: text at the beginning of every row's prompt, as far as known from the
            statement's text; for display (sql/calls/prompt_text.py).
    """

    number: int
    function: str
    clause: str
    stage: int
    position: int
    form: CallForm
    arguments: tuple[tuple[str, int], ...] = ()
    shared_head: str = ""


def call_sites(
    tokens: list[Token], calls: list[FoundCall], placement: Placement, key_base: int
) -> list[tuple[CallSite, bool]]:
    """Group calls into forms; return the site of each call and whether it is kept in place."""
    words = {token.upper for token in tokens}
    shares_text = not words.isdisjoint(_SHARED_TEXT)
    # In an unparsed statement with a membership test any call may be inside the test.
    names_membership = placement.tree is None and not words.isdisjoint(_MEMBERSHIP)
    groups: dict[Hashable, list[int]] = {}
    kept_of: list[bool] = []
    identities = _call_identities(tokens, calls)
    for number, call in enumerate(calls):
        constant = not any(_is_column(tokens, index) for index in range(call.first + 2, call.last))
        place = placement.place(number)
        in_membership = names_membership or place.in_membership
        kept = place.kept_in_place or (constant and not shares_text and not in_membership)
        kept_of.append(kept)
        groups.setdefault((kept, identities[number]), []).append(number)
    if len(groups) > MAX_FORMS:
        number = list(groups.values())[MAX_FORMS][0]
        raise FeatureNotSupportedError(
            f"more than {MAX_FORMS} different AI calls in a statement",
            position=tokens[calls[number].first].start + 1,
            hint="Put the differences into rows of a table, and make one AI call over the table.",
        )
    forms: dict[int, CallForm] = {}
    for order, numbers in enumerate(groups.values()):
        form = _form(key_base + order, calls[numbers[0]], [placement.place(n) for n in numbers])
        forms.update(dict.fromkeys(numbers, form))
    return [
        (
            CallSite(
                number=number + 1,
                function=call.function.name,
                clause=placement.place(number).clause,
                stage=placement.place(number).stage,
                position=tokens[call.first].start + 1,
                form=forms[number],
                arguments=tuple(
                    (name, tokens[argument.first].start + 1)
                    for name, argument in call.arguments.items()
                ),
                shared_head=_shared_head(tokens, call),
            ),
            kept_of[number],
        )
        for number, call in enumerate(calls)
    ]


def _shared_head(tokens: list[Token], call: FoundCall) -> str:
    """Return the common beginning of every row's prompt; documents would come before it."""
    prompt = call.arguments.get("prompt")
    if prompt is None or prompt.constant or DOCUMENTS in call.arguments:
        return ""
    return static_prefix(tokens[prompt.first : prompt.last])


def _form(key: int, call: FoundCall, places: list[Place]) -> CallForm:
    return CallForm(
        key=key,
        function=call.function,
        constants=call.constants(),
        row_parameters=call.row_parameters,
        packed=call.packed,
        always_null=any(
            argument.constant and argument.value is None and call.function.parameter(name).strict
            for name, argument in call.arguments.items()
        ),
        stage=min(place.stage for place in places),
        filters=all(place.filters for place in places),
        collected=tuple(name for name, found in call.arguments.items() if found.collects),
        unordered=call.gathering is not None and not call.gathering.ordered,
    )


def _is_column(tokens: list[Token], index: int) -> bool:
    """Return whether a token may name a column; types and keywords count too, harmlessly."""
    token = tokens[index]
    if token.kind is TokenKind.QUOTED:
        return True
    if token.kind is not TokenKind.WORD or token.upper in ("NULL", "TRUE", "FALSE", "AS"):
        return False
    following = tokens[index + 1].text if index + 1 < len(tokens) else ""
    return following not in ("(", "=>", ":=", ":") and tokens[index - 1].text != "::"


def _call_identities(tokens: Sequence[Token], calls: Sequence[FoundCall]) -> list[Hashable]:
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


@dataclass(frozen=True, slots=True)
class _Source:
    """An AI call as a relation in FROM.

    Attributes:
        function: name of the function.
        alias: alias of the relation; empty without one.
        bare: no further part of the relation follows, so a name may be written after the call.
    """

    function: str
    alias: str
    bare: bool


def row_sources(
    tokens: Sequence[Token], calls: Sequence[FoundCall], placement: Placement, dialect: Dialect
) -> dict[int, Around]:
    """Return the text to write around calls in FROM, by their first token."""
    if placement.tree is None:
        return {}
    found: dict[int, Around] = {}
    for node in placement.tree.find_all(exp.Anonymous):
        number = site_number(node)
        if number is None or not isinstance(node.parent, exp.Table | exp.Lateral):
            continue
        call = calls[number]
        source = _source(tokens, call, node.parent)
        found[call.first] = _around(source, call.function.returns, dialect)
    return found


def _source(tokens: Sequence[Token], call: FoundCall, relation: exp.Expr) -> _Source:
    following = tokens[call.last].upper if call.last < len(tokens) else ""
    alias = relation.args.get("alias")
    name = alias.this if isinstance(alias, exp.TableAlias) else None
    text = name.name if isinstance(name, exp.Identifier) else ""
    return _Source(call.function.name, text, bare=not text and following != "WITH")


def _around(source: _Source, returns: Returns, dialect: Dialect) -> Around:
    behind = f" AS {source.function}" if source.bare else ""
    if dialect is Dialect.POSTGRES:
        return "", behind
    if returns is Returns.RESULT:
        return "(SELECT UNNEST(", f")){behind}"
    column = (source.alias or source.function).replace('"', '""')
    return "(SELECT ", f' AS "{column}"){behind}'

"""Finding AI calls in tokens, and checking their arguments before execution.

A call is a known function name followed by an opening parenthesis. Arguments are token ranges.
Literal arguments are also values, so a wrong option is refused with its position when the statement
is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlError, UdfArgumentError
from tierkv.sql.calls.arguments import NotTextError, Value, checked_value
from tierkv.sql.calls.functions import (
    AI_FUNCTIONS,
    ENGINE_PREFIX,
    PROMPT_TEMPLATE,
    AiFunction,
    ArgumentKind,
)
from tierkv.sql.calls.prompt_text import PromptTemplate, parse_template
from tierkv.sql.text.exact_values import NotConstantError, literal_value
from tierkv.sql.text.lexer import (
    Token,
    TokenKind,
    closing_index,
    depth_change,
    has_codes,
    name_value,
    string_value,
)
from tierkv.sql.text.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: tokens ``[first, last)``; ``value`` is meaningful when ``constant``.

    Attributes:
        collects: a bracketed query in place of a list; the rows of the query are the list.
    """

    first: int
    last: int
    constant: bool
    value: Value = None
    collects: bool = False


@dataclass(frozen=True, slots=True)
class Gathering:
    """How an aggregate gathers its input.

    Attributes:
        distinct: the arguments begin with DISTINCT.
        order: tokens of its ORDER BY, including the keywords; None without ORDER BY.
        after: tokens of FILTER (...) and OVER ... after the call; empty range without them.
        ordered: ORDER BY or a window defines the order of rows.
    """

    distinct: bool
    order: tuple[int, int] | None
    after: tuple[int, int]
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call as written: tokens ``[first, last)`` and its arguments by parameter name.

    Attributes:
        row_parameters: parameters whose values are sent with each row, in this order; at least one.
        gathering: input of an aggregate; None for other functions.
    """

    function: AiFunction
    first: int
    last: int
    arguments: dict[str, Argument]
    row_parameters: tuple[str, ...]
    gathering: Gathering | None = None

    @property
    def packed(self) -> bool:
        """Return whether row arguments are sent as one JSON array instead of plain text.

        Plain text is only for a single argument whose NULL makes the answer NULL.
        """
        if self.gathering is not None or len(self.row_parameters) != 1:
            return True
        parameter = self.function.parameter(self.row_parameters[0])
        return parameter.kind is not ArgumentKind.TEXT or not parameter.strict

    def constants(self) -> tuple[tuple[str, Value], ...]:
        """Return the constant arguments not sent with each row, in parameter order."""
        return tuple(
            (name, argument.value)
            for name in self.function.names
            if (argument := self.arguments.get(name)) is not None
            and name not in self.row_parameters
            and argument.value is not None
        )


@dataclass(frozen=True, slots=True)
class FoundTemplate:
    """An ``ai_prompt`` as written: tokens ``[first, last)`` and the ranges of its arguments."""

    first: int
    last: int
    template: PromptTemplate
    arguments: tuple[tuple[int, int], ...]


_BEGINS_QUERY: Final = frozenset({"SELECT", "WITH", "VALUES", "TABLE", "FROM"})
_JOINS_QUERIES: Final = frozenset(
    {"UNION", "INTERSECT", "EXCEPT", "ORDER", "LIMIT", "OFFSET", "FETCH"}
)
_SET_WORDS: Final = ("DISTINCT", "ALL")
_NOT_A_CALL_AFTER: Final = frozenset({".", "INTO", "TABLE", "AS", "FUNCTION", "MACRO"})


def find_calls(tokens: list[Token]) -> list[FoundCall]:
    """Find every AI call, outer before inner, in text order.

    Raises:
        UdfArgumentError: a wrong argument, with its position.
        SqlError: 42501, an internal engine function is called by name.
    """
    calls: list[FoundCall] = []
    for index, name in _named_calls(tokens):
        if name in AI_FUNCTIONS:
            calls.append(_read_call(tokens, index, AI_FUNCTIONS[name]))
    return calls


def find_templates(tokens: list[Token]) -> list[FoundTemplate]:
    """Find every ``ai_prompt``, outer before inner.

    Raises:
        UdfArgumentError: its template is not constant or does not fit its arguments.
    """
    return [
        _read_template(tokens, index)
        for index, name in _named_calls(tokens)
        if name == PROMPT_TEMPLATE
    ]


def _named_calls(tokens: list[Token]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    # The body of a macro stands behind AS, elsewhere an alias does.
    not_after = _NOT_A_CALL_AFTER - ({"AS"} if _makes_macro(tokens) else set())
    for index in range(len(tokens) - 1):
        token = tokens[index]
        if token.kind not in (TokenKind.WORD, TokenKind.QUOTED):
            continue
        name = name_value(token)
        if not name.startswith(("ai_", "tierkv.", ENGINE_PREFIX)):
            continue
        if name.startswith(ENGINE_PREFIX):
            raise SqlError(
                f'names starting with "{ENGINE_PREFIX}" are reserved for TierKV',
                sqlstate="42501",
                position=token.start + 1,
                hint="Call ai_generate(...).",
            )
        if tokens[index + 1].text != "(":
            continue
        if index and tokens[index - 1].upper in not_after:
            continue
        if name in AI_FUNCTIONS or name == PROMPT_TEMPLATE:
            found.append((index, name))
    _refuse_depth(tokens, {index for index, _ in found})
    return found


def _makes_macro(tokens: list[Token]) -> bool:
    words = {token.upper for token in tokens[:5]}
    return "CREATE" in words and not words.isdisjoint(("MACRO", "FUNCTION"))


def _refuse_depth(tokens: list[Token], calls: set[int]) -> None:
    """Refuse calls nested too deeply, before any pass descends through the nesting."""
    depth = 0
    opened: list[int] = []
    for index, token in enumerate(tokens) if len(calls) > limits.MAX_NESTED_CALLS else ():
        depth += depth_change(token)
        if opened and depth < opened[-1]:
            opened.pop()
        if index - 1 in calls:
            opened.append(depth)
        if len(opened) > limits.MAX_NESTED_CALLS:
            raise SqlError(
                f"AI calls are nested more than {limits.MAX_NESTED_CALLS} levels deep",
                sqlstate="54001",
                position=token.start + 1,
                hint="Store the inner calls' answers in a table first.",
            )


def _read_call(tokens: list[Token], index: int, function: AiFunction) -> FoundCall:
    close = closing_index(tokens, index + 1)
    start, end = index + 2, close
    gathering = None
    if function.aggregate:
        gathering = _gathering(tokens, index, close)
        start += tokens[start].upper in _SET_WORDS
        end = gathering.order[0] if gathering.order else close
    else:
        _refuse_modifiers(tokens, index, close, function)
    arguments: dict[str, Argument] = {}
    named = False
    ranges = _split(tokens, start, end)
    _refuse_too_many(tokens, ranges, function)
    for position, (first, last) in enumerate(ranges):
        name, first, is_named = _parameter(tokens, first, last, position, function, named)
        named = named or is_named
        if name in arguments:
            raise _wrong(tokens[first], f'{function.name}: argument "{name}" is given twice')
        arguments[name] = _argument(tokens, first, last, function, name)
    for parameter in function.parameters:
        if parameter.required and parameter.name not in arguments:
            raise _wrong(
                tokens[index],
                f'{function.name} needs the argument "{parameter.name}"',
                f"Its arguments are {', '.join(function.names)}.",
            )
    rows = _row_parameters(function, arguments)
    given = [name for name in function.either if name in arguments]
    if function.either and len(given) != 1:
        wanted = " or ".join(f'"{name}"' for name in function.either)
        message = f"{function.name} needs either the argument {wanted}"
        raise _wrong(tokens[index], message, f"Its arguments are {', '.join(function.names)}.")
    last = gathering.after[1] if gathering is not None else close + 1
    return FoundCall(function, index, last, arguments, rows, gathering)


def _row_parameters(function: AiFunction, arguments: dict[str, Argument]) -> tuple[str, ...]:
    """Return the parameters to send with each row: all varying parameters, or only the data.

    The gathered argument of an aggregate is always sent. The engine may refuse other arguments
    varying within a group.
    """
    strict = (one.name for one in function.parameters if one.strict and one.name in arguments)
    main = next(strict, function.main.name)
    varying = tuple(
        name
        for name in function.names
        if name in arguments
        and (not arguments[name].constant or (function.aggregate and name == main))
    )
    return varying or (main,)


def _gathering(tokens: list[Token], index: int, close: int) -> Gathering:
    distinct = tokens[index + 2].upper == "DISTINCT"
    order: tuple[int, int] | None = None
    depth = 0
    for at in range(index + 2, close):
        depth += depth_change(tokens[at])
        if depth == 0 and tokens[at].upper == "ORDER" and tokens[at + 1].upper == "BY":
            order = (at, close)
            break
    end = close + 1
    ordered = order is not None
    for word in ("FILTER", "OVER"):
        if end + 1 < len(tokens) and tokens[end].upper == word:
            start, named = end + 1, tokens[end + 1].text != "("
            end = start + 1 if named else closing_index(tokens, start) + 1
            if word == "OVER":
                ordered = ordered or named or _has_order(tokens, start, end)
    return Gathering(distinct, order, (close + 1, end), ordered)


def _has_order(tokens: list[Token], first: int, last: int) -> bool:
    """Return whether a window has an ORDER BY, or may inherit an order from a base window."""
    words = [token.upper for token in tokens[first + 1 : last]]
    return "ORDER" in words or words[0] not in ("PARTITION", "ROWS", "RANGE", "GROUPS", ")")


def _refuse_modifiers(tokens: list[Token], index: int, close: int, function: AiFunction) -> None:
    following = tokens[close + 1].upper if close + 1 < len(tokens) else ""
    if following == "OVER" or (following == "FILTER" and tokens[close + 2 : close + 3]):
        raise _wrong(
            tokens[close + 1],
            f"{function.name} is not an aggregate or window function",
            "The aggregates are ai_agg and ai_summarize_agg.",
        )
    if tokens[index + 2].upper in _SET_WORDS or tokens[index + 2].text == "*":
        raise _wrong(tokens[index + 2], f"{function.name} takes values, not a set of rows")


def _read_template(tokens: list[Token], index: int) -> FoundTemplate:
    close = closing_index(tokens, index + 1)
    ranges = _split(tokens, index + 2, close)
    if not ranges:
        raise _wrong(tokens[index], "ai_prompt needs a template")
    first, last = ranges[0]
    if last - first != 1 or tokens[first].kind is not TokenKind.STRING or has_codes(tokens[first]):
        raise _wrong(
            tokens[first],
            "ai_prompt: the template must be a text constant, without characters by number",
            "Write ai_prompt('Summarise {0}', body); concatenate what varies with || instead.",
        )
    try:
        template = parse_template(string_value(tokens[first]), len(ranges) - 1)
    except UdfArgumentError as error:
        raise _wrong(tokens[first], error.message, error.hint) from None
    return FoundTemplate(index, close + 1, template, tuple(ranges[1:]))


def _split(tokens: list[Token], first: int, close: int) -> list[tuple[int, int]]:
    """Cut an argument list at its commas."""
    if first == close:
        return []
    parts: list[tuple[int, int]] = []
    depth = 0
    for index in range(first, close):
        depth += depth_change(tokens[index])
        if depth == 0 and tokens[index].text == ",":
            parts.append((first, index))
            first = index + 1
    parts.append((first, close))
    for start, end in parts:
        if start == end:
            raise _wrong(tokens[end], "an argument is missing here")
    return parts


def _parameter(
    tokens: list[Token],
    first: int,
    last: int,
    position: int,
    function: AiFunction,
    named_before: bool,
) -> tuple[str, int, bool]:
    """Return an argument's parameter name, the start of its value, and True if named."""
    if _is_named(tokens, first, last):
        name = name_value(tokens[first])
        if name not in function.names:
            raise _wrong(
                tokens[first],
                f'{function.name} has no argument "{name}"',
                did_you_mean(name, function.names),
            )
        if first + 2 == last:
            raise _wrong(tokens[first], f'argument "{name}" has no value')
        return name, first + 2, True
    if named_before:
        raise _wrong(tokens[first], "positional argument cannot follow named argument")
    return function.names[position], first, False


def _refuse_too_many(
    tokens: list[Token], ranges: list[tuple[int, int]], function: AiFunction
) -> None:
    """Refuse positional arguments beyond the last parameter, before any of them is checked.

    Otherwise a shifted argument would be blamed for not being the option in its place.
    """
    most = len(function.parameters)
    if len(ranges) <= most:
        return
    named = [_is_named(tokens, first, last) for first, last in ranges]
    given = named.index(True) if True in named else len(named)
    if given > most:
        raise _wrong(
            tokens[ranges[most][0]],
            f"{function.name} takes at most {most} arguments, not {given}",
            f"The arguments are {', '.join(function.names)}.",
        )


def _is_named(tokens: list[Token], first: int, last: int) -> bool:
    return last - first > 1 and tokens[first + 1].text in ("=>", ":=")


def _argument(
    tokens: list[Token], first: int, last: int, function: AiFunction, name: str
) -> Argument:
    try:
        value: Any = literal_value(tokens[first:last])
    except NotConstantError:
        listed = function.parameter(name).kind is ArgumentKind.TEXTS
        return Argument(first, last, False, collects=listed and _is_query(tokens, first, last))
    try:
        return Argument(first, last, True, checked_value(function, name, value))
    except NotTextError:
        return Argument(first, last, False)
    except UdfArgumentError as error:
        raise _wrong(tokens[first], f"{function.name}: {error.message}", error.hint) from None


def _is_query(tokens: list[Token], first: int, last: int) -> bool:
    """Return whether tokens are one query in brackets."""
    if tokens[first].text != "(" or closing_index(tokens, first) != last - 1:
        return False
    first, last = first + 1, last - 1
    if first < last and tokens[first].text == "(":
        end = closing_index(tokens, first) + 1
        joins = end == last or tokens[end].upper in _JOINS_QUERIES
        return joins and _is_query(tokens, first, end)
    return first < last and tokens[first].upper in _BEGINS_QUERY


def _wrong(token: Token, message: str, hint: str = "") -> UdfArgumentError:
    return UdfArgumentError(message, position=token.start + 1, hint=hint)

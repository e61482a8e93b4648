"""Finding AI calls in tokens, and checking their arguments before anything runs.

A call is a known function name followed by an opening parenthesis. Arguments are token ranges;
those that are literals are also values, so that a wrong option is refused with its position when
the statement is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvcore import limits
from kvcore.errors import FeatureNotSupportedError, UdfArgumentError
from sql.functions import AI_FUNCTIONS, DOCUMENTS, ENGINE_PREFIX, AiFunction
from sql.lexer import Token, TokenKind, closing_index, depth_change, name_value
from sql.literals import NotConstantError, literal_value
from sql.options import CallOptions, parse_options
from sql.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: tokens ``[first, last)``; ``value`` is meaningful when ``constant``."""

    first: int
    last: int
    constant: bool
    value: Any = None


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call as written: tokens ``[first, last)`` and its arguments by parameter name.

    Attributes:
        per_row: model, system_prompt or options are not all constant.
        options: the constant options; empty when they are computed per row.
        documents: the call has documents, or may have: a column can be NULL.
        document_count: how many, where they are constant.
    """

    function: AiFunction
    first: int
    last: int
    arguments: dict[str, Argument]
    per_row: bool
    options: CallOptions
    documents: bool = False
    document_count: int | None = None

    def constant(self, parameter: str) -> str | None:
        """Return a constant argument's text, None when it was not given."""
        argument = self.arguments.get(parameter)
        return None if argument is None else argument.value


_NOT_A_CALL_AFTER: Final = frozenset({".", "INTO", "TABLE", "AS", "FUNCTION", "MACRO"})


def find_calls(tokens: list[Token]) -> list[FoundCall]:
    """Find every AI call, outer before inner, in the order of the text.

    Raises:
        UdfArgumentError: a wrong argument, with its position.
        FeatureNotSupportedError: one of our engine functions is called by name.
    """
    calls: list[FoundCall] = []
    for index in range(len(tokens) - 1):
        token = tokens[index]
        if token.kind not in (TokenKind.WORD, TokenKind.QUOTED):
            continue
        name = name_value(token)
        if name.startswith(ENGINE_PREFIX):
            raise FeatureNotSupportedError(
                f'names starting with "{ENGINE_PREFIX}" are reserved', hint="Call ai_generate(...)."
            )
        function = AI_FUNCTIONS.get(name)
        if function is None or tokens[index + 1].text != "(":
            continue
        if index and tokens[index - 1].upper in _NOT_A_CALL_AFTER:
            continue
        calls.append(_read_call(tokens, index, function))
    return calls


def _read_call(tokens: list[Token], index: int, function: AiFunction) -> FoundCall:
    close = closing_index(tokens, index + 1)
    _refuse_modifiers(tokens, index, close, function)
    arguments: dict[str, Argument] = {}
    named = False
    for position, (first, last) in enumerate(_split(tokens, index + 2, close)):
        name, first, is_named = _parameter(tokens, first, last, position, function, named)
        named = named or is_named
        if name in arguments:
            raise _wrong(tokens[first], f'{function.name}: argument "{name}" is given twice')
        arguments[name] = _argument(tokens, first, last)
    if function.parameters[0] not in arguments:
        raise _wrong(tokens[index], f'{function.name} needs a "{function.parameters[0]}"')
    return _checked(tokens, index, close, function, arguments)


def _checked(
    tokens: list[Token],
    index: int,
    close: int,
    function: AiFunction,
    arguments: dict[str, Argument],
) -> FoundCall:
    settings = [name for name in function.parameters[1:] if name != DOCUMENTS]
    extras = {name: arguments[name] for name in settings if name in arguments}
    per_row = not all(argument.constant for argument in extras.values())
    options = CallOptions()
    for name, argument in extras.items():
        if not argument.constant:
            continue
        token = tokens[argument.first]
        if name == "options":
            try:
                options = parse_options(argument.value)
            except UdfArgumentError as error:
                raise _wrong(token, f"{function.name}: {error.message}", error.hint) from None
        elif argument.value is not None and not isinstance(argument.value, str):
            raise _wrong(token, f"{function.name}: {name} must be text")
    count = _document_count(tokens, function, arguments.get(DOCUMENTS))
    has_documents = DOCUMENTS in arguments and count != 0
    return FoundCall(function, index, close + 1, arguments, per_row, options, has_documents, count)


def _document_count(
    tokens: list[Token], function: AiFunction, argument: Argument | None
) -> int | None:
    """Count constant documents; None when only the engine knows them."""
    if argument is None or not argument.constant:
        return None
    token, value = tokens[argument.first], argument.value
    hint = "Write documents => ['...', '...'], or name a column of lists."
    if not isinstance(value, list | None) or any(
        isinstance(item, list | dict) for item in value or ()
    ):
        raise _wrong(token, f"{function.name}: {DOCUMENTS} must be a list of text", hint)
    if value is not None and len(value) > limits.MAX_CHUNKS:
        most = f"at most {limits.MAX_CHUNKS} are allowed"
        raise _wrong(token, f"{function.name}: {len(value)} documents were given, {most}")
    return len(value or ())


def _refuse_modifiers(tokens: list[Token], index: int, close: int, function: AiFunction) -> None:
    following = tokens[close + 1].upper if close + 1 < len(tokens) else ""
    if following == "OVER" or (following == "FILTER" and tokens[close + 2 : close + 3]):
        raise _wrong(tokens[close + 1], f"{function.name} is not an aggregate or window function")
    if tokens[index + 2].upper in ("DISTINCT", "ALL") or tokens[index + 2].text == "*":
        raise _wrong(tokens[index + 2], f"{function.name} takes values, not a set of rows")


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
    """Return an argument's parameter name, where its value starts, and whether it was named."""
    if last - first > 1 and tokens[first + 1].text in ("=>", ":="):
        name = name_value(tokens[first])
        if name not in function.parameters:
            raise _wrong(
                tokens[first],
                f'{function.name} has no argument "{name}"',
                did_you_mean(name, function.parameters),
            )
        if first + 2 == last:
            raise _wrong(tokens[first], f'argument "{name}" has no value')
        return name, first + 2, True
    if named_before:
        raise _wrong(tokens[first], "a positional argument can't follow a named one")
    if position >= len(function.parameters):
        raise _wrong(
            tokens[first],
            f"{function.name} takes at most {len(function.parameters)} arguments",
            f"They are {', '.join(function.parameters)}.",
        )
    return function.parameters[position], first, False


def _argument(tokens: list[Token], first: int, last: int) -> Argument:
    try:
        return Argument(first, last, True, literal_value(tokens[first:last]))
    except NotConstantError:
        return Argument(first, last, False)


def _wrong(token: Token, message: str, hint: str = "") -> UdfArgumentError:
    return UdfArgumentError(message, position=token.start + 1, hint=hint)

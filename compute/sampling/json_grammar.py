"""JSON Schemas as grammars that a matcher can follow: the one place that calls the compiler.

Used by the node (compute/sampling/guides.py) and, through compute/client.py, by the front, which
refuses a schema before any model runs. Never imports torch; the compiler itself is loaded when it
is needed.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tierkv.kvcore import limits
from tierkv.kvcore.errors import FeatureNotSupportedError, UdfArgumentError

_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ ]?",
    "lenient": False,
    "coerce_one_of": False,
}
"""They win over ``x-guidance`` in a schema. One space at most between two signs: small models fill
answers with white space if they may. A keyword that would not be kept is refused."""

_MOST_MULTIPLE = 100_000
"""Product of all ``multipleOf`` of a schema without their points. The compiler makes a state for
each remainder: about a second for so many, and ten for a million, whatever its other limits."""

_ERROR_CHARS = 300


def compiler() -> Any:
    """Return the llguidance module.

    Raises:
        FeatureNotSupportedError: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise FeatureNotSupportedError(
            "answers can't be held to a JSON schema here: llguidance is not installed",
            hint="install tierkv[compute] on the compute nodes",
        ) from error


def grammar_of(schema: str) -> str:
    """Turn a JSON Schema into the compiler's grammar text; it may still not compile.

    Raises:
        UdfArgumentError: it is no JSON object, or too long.
        FeatureNotSupportedError: there is no compiler.
    """
    if len(schema) > limits.MAX_SCHEMA_CHARS:
        raise UdfArgumentError(
            f"the JSON schema has {len(schema)} characters, the limit is {limits.MAX_SCHEMA_CHARS}"
        )
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise UdfArgumentError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UdfArgumentError(
            f"the JSON schema is {_kind(value)}, not an object",
            hint='write it as {"type": "object", "properties": {...}}',
        )
    if math.prod(set(_multiples(value))) > _MOST_MULTIPLE:
        raise UdfArgumentError(
            f"multipleOf in the JSON schema has more digits than can be followed: {_MOST_MULTIPLE} "
            "is the limit for the product of all",
            hint="leave multipleOf out, and check it after the answer",
        )
    llguidance = compiler()
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS))
    except ValueError as error:  # What Python reads and JSON does not have, or 128 levels.
        raise UdfArgumentError(f"the JSON schema is no JSON: {error}") from error


def _multiples(value: Any) -> Iterator[int]:
    """Find the numbers of all ``multipleOf``, without sign and point: 0.25 is 25."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            number = part.get("multipleOf")
            if isinstance(number, (int, float)) and math.isfinite(number):
                yield max(1, int("".join(map(str, Decimal(str(number)).as_tuple().digits))))
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def check_schema(schema: str) -> None:
    """Refuse what can't be followed; takes milliseconds for common schemas.

    Raises:
        UdfArgumentError: it is no JSON object, or uses what is not supported, which is named.
        FeatureNotSupportedError: there is no compiler.
    """
    grammar = grammar_of(schema)
    problem = compiler().LLMatcher.validate_grammar(grammar, limits=parser_limits())
    if problem:
        raise schema_error(problem)


def parser_limits() -> Any:
    """Return what bounds the compiler and a matcher's steps: its defaults, with short errors."""
    return compiler().LLParserLimits(verbose_errors=False)


def schema_error(problem: str) -> UdfArgumentError:
    """Say what the compiler dislikes about a schema."""
    first = " ".join(problem.split())
    return UdfArgumentError(
        f"answers can't be held to this JSON schema: {first[:_ERROR_CHARS]}",
        hint="leave that keyword out, and check it after the answer",
    )


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )

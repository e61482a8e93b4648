"""The AI functions of SQL: their names, parameters and return types.

One row per function; a new function of the family is a new row here and a recipe in the front
(dbfront/calls/functions.py). A constant argument is checked when a statement is planned, a
varying argument once per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ENGINE_PREFIX: Final = "tierkv_ai_"
"""Prefix of engine functions; users may not call them by name."""


class ArgumentKind(StrEnum):
    """Type of an argument; other types are cast to text."""

    TEXT = "text"
    JSON = "json"
    FIELDS = "json or text[]"
    TEXTS = "text[]"


class Returns(StrEnum):
    """Return type of a function: its name in ``\\df``; PostgreSQL has jsonb for json."""

    TEXT = "text"
    JSON = "json"
    BOOLEAN = "boolean"
    DOUBLE = "double precision"
    INTEGER = "integer"
    VECTOR = "real[]"
    TEXTS = "text[]"
    RESULT = "tierkv.ai_result"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    Attributes:
        kind: type of the argument.
        required: a call without the argument is an error.
        strict: a NULL argument makes the answer NULL, without a call.
    """

    name: str
    kind: ArgumentKind = ArgumentKind.TEXT
    required: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class AiFunction:
    """An AI function's signature.

    Attributes:
        parameters: in the order of positional arguments.
        canonical: for an alias, the name of the original function; otherwise its own name.
        aggregate: the first argument is gathered over rows.
        local: answered without a model; does not count as a call.
        either: a call has exactly one of these arguments.
        right: function whose right is needed, if not the function's own.
    """

    name: str
    parameters: tuple[Parameter, ...]
    returns: Returns
    canonical: str
    aggregate: bool = False
    local: bool = False
    either: tuple[str, ...] = ()
    right: str = ""

    def parameter(self, name: str) -> Parameter:
        """Return a parameter by name."""
        return next(parameter for parameter in self.parameters if parameter.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        """Return parameter names, in order."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def granted_as(self) -> str:
        """Return the name by which the right to call the function is granted."""
        if self.right:
            return self.right
        return self.canonical if self.name.startswith("tierkv.") else self.name

    @property
    def main(self) -> Parameter:
        """Return the first parameter with a row's data."""
        return next(parameter for parameter in self.parameters if parameter.strict)


DOCUMENTS: Final = "documents"
CONTEXT: Final = "context"
SETTINGS: Final = ("model", "system_prompt", "options")
"""Parameters that define how to answer, not what; by default the session's settings apply."""

RESULT_FIELDS: Final[dict[str, str]] = {
    "value": "text",
    "error": "text",
    "error_code": "text",
    "model": "text",
    "finish_reason": "text",
    "prompt_tokens": "integer",
    "cached_tokens": "integer",
    "completion_tokens": "integer",
    "ttft_ms": "double precision",
    "latency_ms": "double precision",
    "cached": "boolean",
}
"""Fields of ``tierkv.ai_result`` and their PostgreSQL types."""

PROMPT_TEMPLATE: Final = "ai_prompt"
"""Rewritten as a concatenation by sql/plan/rewrite.py; never a call."""


def _data(name: str, *, kind: ArgumentKind = ArgumentKind.TEXT) -> Parameter:
    return Parameter(name, kind, required=True, strict=True)


def _json(name: str) -> Parameter:
    return Parameter(name, ArgumentKind.JSON)


_MODEL = Parameter("model")
_SYSTEM = Parameter("system_prompt")
_OPTIONS = _json("options")
_CONTEXT = _json(CONTEXT)
_DOCUMENTS = Parameter(DOCUMENTS, ArgumentKind.TEXTS)
_INPUT = Parameter("input", strict=True)
_INSTRUCTION = Parameter("instruction")
_HOW = (_MODEL, _SYSTEM, _OPTIONS)
_ASK = (_MODEL, _SYSTEM, _OPTIONS, _DOCUMENTS, _CONTEXT)
_BEGINNING = (_MODEL, _SYSTEM, _OPTIONS, _DOCUMENTS)
_CATEGORIES = _data("categories", kind=ArgumentKind.TEXTS)
_SCHEMA = _data("schema", kind=ArgumentKind.JSON)


def _function(
    name: str,
    returns: Returns,
    *parameters: Parameter,
    canonical: str = "",
    aggregate: bool = False,
    local: bool = False,
) -> AiFunction:
    return AiFunction(name, parameters, returns, canonical or name, aggregate, local)


def _kv_function(
    name: str, *more: Parameter, right: str, schema: str, local: bool = False
) -> AiFunction:
    """Return a function about the KV of a prompt, or of a session."""
    either = (Parameter("prompt", strict=True), Parameter("session", strict=True))
    parameters = (either[0], *more, either[1], *_BEGINNING)
    canonical, names = f"ai_{name}", tuple(one.name for one in either)
    return AiFunction(
        schema + name, parameters, Returns.JSON, canonical, local=local, either=names, right=right
    )


def _kv_functions(schema: str) -> tuple[AiFunction, ...]:
    keep = _data("keep")
    return (
        _kv_function("kv_prefetch", right="ai_warm", schema=schema),
        _kv_function("kv_pin", keep, right="ai_pin", schema=schema),
        _kv_function("kv_retain", keep, right="ai_pin", schema=schema, local=True),
        _kv_function("kv_demote", right="ai_pin", schema=schema, local=True),
        _kv_function("kv_locate", right="ai_locate", schema=schema, local=True),
        _kv_function("kv_forget", right="ai_forget", schema=schema, local=True),
    )


AI_FUNCTIONS: Final[dict[str, AiFunction]] = {
    function.name: function
    for function in (
        _function("ai_generate", Returns.TEXT, _data("prompt"), *_ASK),
        _function("ai_generate_json", Returns.JSON, _data("prompt"), _SCHEMA, *_ASK),
        _function("ai_generate_detail", Returns.RESULT, _data("prompt"), *_ASK),
        _function(
            "ai_complete",
            Returns.TEXT,
            Parameter("model", required=True),
            _data("prompt"),
            _OPTIONS,
            canonical="ai_generate",
        ),
        _function("ai_filter", Returns.BOOLEAN, _data("predicate"), _INPUT, *_ASK),
        _function(
            "ai_if", Returns.BOOLEAN, _data("predicate"), _INPUT, *_ASK, canonical="ai_filter"
        ),
        _function(
            "ai_classify", Returns.TEXT, _data("input"), _CATEGORIES, _INSTRUCTION, *_HOW, _CONTEXT
        ),
        _function(
            "ai_classify_multi",
            Returns.TEXTS,
            _data("input"),
            _CATEGORIES,
            _INSTRUCTION,
            *_HOW,
            _CONTEXT,
        ),
        _function(
            "ai_extract",
            Returns.JSON,
            _data("input"),
            _data("schema", kind=ArgumentKind.FIELDS),
            _INSTRUCTION,
            *_HOW,
        ),
        _function("ai_score", Returns.DOUBLE, _data("criteria"), _INPUT, *_HOW, _CONTEXT),
        _function("ai_similarity", Returns.DOUBLE, _data("a"), _data("b"), _MODEL),
        _function("ai_embed", Returns.VECTOR, _data("input"), _MODEL),
        _function(
            "ai_agg", Returns.TEXT, _data("input"), _data("instruction"), *_HOW, aggregate=True
        ),
        _function("ai_summarize_agg", Returns.TEXT, _data("input"), *_HOW, aggregate=True),
        _function("ai_chat", Returns.TEXT, _data("session"), _data("message"), *_HOW),
        _function("ai_warm", Returns.INTEGER, _data("prompt"), *_BEGINNING),
        _function("ai_pin", Returns.JSON, _data("prompt"), _data("keep"), *_BEGINNING),
        _function("ai_locate", Returns.JSON, _data("prompt"), *_BEGINNING, local=True),
        _function("ai_forget", Returns.JSON, _data("prompt"), *_BEGINNING, local=True),
        _function(
            "tierkv.warm", Returns.INTEGER, _data("prompt"), *_BEGINNING, canonical="ai_warm"
        ),
        _function(
            "tierkv.pin",
            Returns.JSON,
            _data("prompt"),
            _data("keep"),
            *_BEGINNING,
            canonical="ai_pin",
        ),
        _function(
            "tierkv.forget",
            Returns.JSON,
            _data("prompt"),
            *_BEGINNING,
            canonical="ai_forget",
            local=True,
        ),
        *_kv_functions("ai_"),
        *_kv_functions("tierkv."),
        _function("ai_count_tokens", Returns.INTEGER, _data("input"), _MODEL, local=True),
    )
}
"""Every function by name, without ``ai_prompt``, which only builds a prompt."""

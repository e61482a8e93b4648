"""One AI call behind the engine, and its construction from a row.

Calls with the same text share a CallForm; the engine sends the form's key and one text per row.
``resolve_call`` makes an AiCall from both: equal AiCalls have one answer in a statement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tierkv.kvcore.call_options import UNSET, CallOptions
from tierkv.kvcore.errors import SqlError, UdfArgumentError
from tierkv.sql.calls.arguments import NotTextError, Value, checked_value
from tierkv.sql.calls.dialect import ROW, ROW_TYPE
from tierkv.sql.calls.functions import AI_FUNCTIONS, CONTEXT, DOCUMENTS, AiFunction, ArgumentKind
from tierkv.sql.text.exact_values import exact_argument

Arguments = tuple[tuple[str, Value], ...]
"""Values by parameter name, without NULL and missing arguments."""

_NO_PLACEHOLDER: Final = (ArgumentKind.JSON, ArgumentKind.FIELDS)
_VECTOR_TYPES: Final = frozenset({"vector", "halfvec", "sparsevec"})
"""Types of pgvector."""

_SAYS_NOTHING: Final[dict[str, Value]] = {"options": UNSET, CONTEXT: "{}", DOCUMENTS: ()}
"""Values equivalent to a missing argument; a call with such a value equals the call without it."""


@dataclass(frozen=True, slots=True)
class AiCall:
    """One distinct AI call: a function, by its canonical name, and its arguments."""

    function: str
    arguments: Arguments

    def get(self, name: str) -> Value:
        """Return an argument; None if missing."""
        for key, value in self.arguments:
            if key == name:
                return value
        return None

    def text(self, name: str) -> str:
        """Return a text or JSON argument; empty if missing."""
        value = self.get(name)
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list argument; empty if missing."""
        value = self.get(name)
        return value if isinstance(value, tuple) else ()

    def with_sorted_rows(self) -> AiCall:
        """Return this call with sorted lists: equal for the same gathered rows in any order."""
        return AiCall(
            self.function,
            tuple(
                (name, tuple(sorted(value)) if isinstance(value, tuple) else value)
                for name, value in self.arguments
            ),
        )

    def with_context(self, text: str) -> AiCall:
        """Return this call with the text of its context in place of the fields."""
        return AiCall(
            self.function,
            tuple((name, text if name == CONTEXT else value) for name, value in self.arguments),
        )

    @property
    def model(self) -> str | None:
        """Return the model named by the call."""
        return self.text("model") or None

    @property
    def system_prompt(self) -> str | None:
        """Return the system prompt; None leaves the choice to the session."""
        value = self.get("system_prompt")
        return value if isinstance(value, str) else None

    @property
    def options(self) -> CallOptions:
        """Return the options."""
        value = self.get("options")
        return value if isinstance(value, CallOptions) else UNSET


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls that the engine can't distinguish, because their text is the same.

    Attributes:
        key: the engine function's argument that names the form.
        function: the function as written.
        constants: arguments equal in all rows.
        row_parameters: arguments sent with each row, in this order.
        packed: row arguments are sent as a JSON array; False: as the text of the only argument.
        always_null: an argument that may not be NULL is a NULL constant.
        stage: lowest stage of its calls.
        filters: all its calls are conjuncts that an early-stopping LIMIT may leave unanswered.
        collected: arguments whose list is the rows of a query.
        unordered: the form gathers rows in any order in which the engine meets them.
    """

    key: int
    function: AiFunction
    constants: Arguments = ()
    row_parameters: tuple[str, ...] = ()
    packed: bool = False
    always_null: bool = False
    stage: int = 0
    filters: bool = False
    collected: tuple[str, ...] = ()
    unordered: bool = False

    def constant(self, name: str) -> Value:
        """Return a constant argument; None if the argument is not constant."""
        return dict(self.constants).get(name)

    @property
    def example(self) -> AiCall | None:
        """Return a call with placeholders for row arguments, to check constants before any row.

        None when no placeholder is possible for a required argument.
        """
        values: dict[str, Value] = dict(self.constants)
        for name in self.row_parameters:
            parameter = self.function.parameter(name)
            if parameter.kind in _NO_PLACEHOLDER and parameter.required:
                return None
            if parameter.strict or parameter.required:
                listed = parameter.kind is ArgumentKind.TEXTS or name == self._gathered
                values[name] = (".",) if listed else "."
        missing = any(
            p.strict and p.required and p.name not in values for p in self.function.parameters
        )
        if missing or values.get("model") == ".":
            return None
        return make_call(self.function.name, values)

    @property
    def _gathered(self) -> str:
        return self.function.main.name if self.function.aggregate else ""


def resolve_call(form: CallForm, text: str) -> AiCall | None:
    """Make the call for a row's text; None when the answer is NULL.

    Raises:
        UdfArgumentError: an argument of the row can't be used.
    """
    if form.always_null:
        return None
    values: dict[str, Value] = dict(form.constants)
    if not form.packed:
        values[form.row_parameters[0]] = text
        return make_call(form.function.name, values)
    for name, item in zip(form.row_parameters, _row_items(form, text), strict=True):
        value = _row_value(form.function, name, item)
        if value is None and form.function.parameter(name).strict:
            return None
        if value is not None:
            values[name] = value
    return make_call(form.function.name, values)


def _row_items(form: CallForm, text: str) -> list[Any]:
    try:
        items: list[Any] = exact_argument(text)
    except ValueError as error:
        raise UdfArgumentError(f"{form.function.name}: an argument is not valid: {error}") from None
    return items


def _row_value(function: AiFunction, name: str, item: Any) -> Value:
    if function.aggregate and name == function.main.name:
        gathered = tuple(str(one) for one in item or () if one is not None)
        return gathered or None
    if function.parameter(name).kind is ArgumentKind.TEXTS and isinstance(item, list):
        item = _row_texts(function, name, item)
    if isinstance(item, int | float) and not isinstance(item, bool):
        item = str(item)
    try:
        return checked_value(function, name, item)
    except UdfArgumentError as error:
        raise UdfArgumentError(f"{function.name}: {error.message}", hint=error.hint) from None
    except NotTextError:
        raise UdfArgumentError(f"{function.name}: {name} can't be {json.dumps(item)}") from None


def _row_texts(function: AiFunction, name: str, rows: list[Any]) -> list[str | None]:
    """Return the texts of rows, or of the lists in rows.

    Raises:
        UdfArgumentError: a row is neither text nor NULL.
    """
    values = [_only_column(function, name, row) for row in rows]
    items = [one for value in values for one in (value if isinstance(value, list) else (value,))]
    wrong = next((one for one in items if not isinstance(one, str | None)), None)
    if wrong is not None:
        shown = json.dumps(wrong)
        raise UdfArgumentError(
            f"{function.name}: {name} must be text, not {shown[:40]}",
            hint="Select one column of text, with a cast where it has another type: "
            f"{name} => (SELECT CAST(body AS text) FROM ...).",
        )
    return items


def _only_column(function: AiFunction, name: str, row: Any) -> Any:
    if not isinstance(row, Mapping) or ROW not in row:
        return row
    columns = row[ROW]
    if len(columns) != 1:
        raise SqlError(
            f"{function.name}: the query of {name} returns {len(columns)} columns, not one",
            sqlstate="42601",
        )
    kind = str(row.get(ROW_TYPE) or "").rpartition(".")[2].strip('"')
    if kind in _VECTOR_TYPES:
        raise SqlError(
            f"{function.name}: {name} must be text, not {kind}",
            sqlstate="42804",
            hint="Select the column that has the text, and order by the vector: "
            f"{name} => (SELECT body FROM ... ORDER BY embedding <=> ai_embed(...) LIMIT 5).",
        )
    return next(iter(columns.values()))


def make_call(name: str, values: Mapping[str, Value]) -> AiCall:
    """Make the call of a function from checked arguments by parameter name."""
    canonical = AI_FUNCTIONS[AI_FUNCTIONS[name].canonical]
    return AiCall(
        canonical.name,
        tuple(
            (name, value)
            for name in canonical.names
            if (value := values.get(name)) is not None and value != _SAYS_NOTHING.get(name)
        ),
    )

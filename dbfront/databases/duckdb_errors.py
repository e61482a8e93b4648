"""DuckDB's errors as TierKV errors: SQLSTATE, plain message, position, hint.

The engine reports errors as JSON with type, subtype and position; plain text is understood too,
with less detail. When an AI function raises a TierKVError, DuckDB reports text with a random mark,
and ``RaisedErrors`` returns the original error for the mark. A statement cannot take or forge the
error of another statement. No other module translates engine errors.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import duckdb

from tierkv.kvcore.errors import (
    CancelledByUserError,
    FeatureNotSupportedError,
    SqlError,
    SqlSyntaxError,
    TierKVError,
    UnknownUdfError,
)
from tierkv.sql.calls.functions import AI_FUNCTIONS, PROMPT_TEMPLATE
from tierkv.sql.text.suggest import ai_function_hint

_KEPT: Final = 256
"""Maximum of stored errors; an error hidden by TRY() stays until newer errors displace it."""
_MARK: Final = re.compile(r"tierkv-error-([0-9a-f]{32})")


class RaisedErrors:
    """Stores errors on their way from the raising function to the reporting connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: OrderedDict[str, TierKVError] = OrderedDict()

    def marking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the engine to mark errors; called on the engine's threads."""

        @wraps(function)
        def marked(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except TierKVError as error:
                raise self.marked(error) from None

        return marked

    def marked(self, error: TierKVError) -> RuntimeError:
        """Return the exception for a function of the engine to raise in place of a TierKVError."""
        mark = secrets.token_hex(16)
        with self._lock:
            self._errors[mark] = error
            if len(self._errors) > _KEPT:
                self._errors.popitem(last=False)
        return RuntimeError(f"tierkv-error-{mark}")

    def take(self, text: str) -> TierKVError | None:
        """Take the error of the mark in an engine's error text; None without a known mark."""
        found = _MARK.search(text)
        if found is None:
            return None
        with self._lock:
            return self._errors.pop(found[1], None)


_STATES: Final[tuple[tuple[str, str, str], ...]] = (
    # exception type, pattern in the message, SQLSTATE; the first match counts
    ("Sequence", r"not yet defined in this session", "55000"),
    ("Catalog", r"(Table|View) with name .* already exists", "42P07"),
    ("Catalog", r"Schema with name .* already exists", "42P06"),
    ("Catalog", r"Column with name .* already exists", "42701"),
    ("Catalog", r"already exists", "42710"),
    ("Catalog", r"Could not drop the table because", "2BP01"),
    ("Catalog", r"^(Table|View) with name|Referenced table", "42P01"),
    ("Catalog", r"Function with name|function with name", "42883"),
    ("Catalog", r"Schema with name|schema .* does not exist", "3F000"),
    ("Catalog", r"", "42704"),
    ("Binder", r"Prepared statement .* does not exist", "26000"),
    ("Binder", r"Referenced (update )?column|not found in FROM|does not have a column", "42703"),
    ("Binder", r"Duplicate column name", "42701"),
    ("Binder", r"Referenced table|Catalog .* does not exist", "42P01"),
    ("Binder", r"No function matches|does not support the supplied arguments", "42883"),
    ("Binder", r"GROUP BY clause|aggregate", "42803"),
    ("Binder", r"[Aa]mbiguous", "42702"),
    ("Binder", r"Cannot compare values|Cannot mix values", "42804"),
    ("Binder", r"columns but|supplied|Subquery returns", "42601"),
    ("Binder", r"", "42000"),
    ("Parser", r"", "42601"),
    ("Syntax", r"", "42601"),
    ("Conversion", r"out of range|overflow", "22003"),
    ("Conversion", r"date|time", "22007"),
    ("Conversion", r"", "22P02"),
    ("Out of Range", r"", "22003"),
    ("Invalid Input", r"[Dd]ivision by zero", "22012"),
    ("Invalid Input", r"More than one row returned by a subquery", "21000"),
    ("Invalid Input", r"Values were not provided|Parameter argument", "42P02"),
    ("Invalid Input", r"locked", "42501"),
    ("Invalid Input", r"", "22000"),
    ("Constraint", r"[Dd]uplicate key|[Uu]nique|primary key", "23505"),
    ("Constraint", r"NOT NULL", "23502"),
    ("Constraint", r"[Ff]oreign key", "23503"),
    ("Constraint", r"CHECK", "23514"),
    ("Constraint", r"", "23000"),
    ("TransactionContext", r"[Cc]urrent transaction is aborted", "25P02"),
    ("TransactionContext", r"within a transaction", "25001"),
    ("TransactionContext", r"read-only mode", "25006"),
    ("TransactionContext", r"no transaction is active", "25P01"),
    ("TransactionContext", r"[Cc]onflict", "40001"),
    ("TransactionContext", r"", "25000"),
    ("Permission", r"", "42501"),
    ("IO", r"No such file|not found", "58P01"),
    ("IO", r"", "58030"),
    ("Out of Memory", r"", "53200"),
    ("Not implemented", r"", "0A000"),
    ("Dependency", r"", "2BP01"),
    ("Mismatch Type", r"", "42804"),
)
_DISK_FULL: Final = re.compile(r"No space left on device|Disk quota exceeded|Not enough disk space")
_LATE_CONSTRAINT: Final = re.compile(
    r"No support for adding \w+ constraints with ALTER TABLE|"
    r"Adding columns with [A-Z ]+ constraints is not supported|"
    # DuckDB 1.5, whose message has no more detail.
    r"No support for that ALTER TABLE option yet|Adding columns with constraints not yet supported"
)
_CHECKED: Final = re.compile(r"Cannot change the type of a column that has a CHECK constraint")
_NEW_TABLE_TYPE: Final = (
    "A length, as in varchar(5), is also such a constraint. Create a new table with the other "
    "type, INSERT ... SELECT the rows, DROP the old table, RENAME the new one; or keep such tables "
    "in PostgreSQL (tierkv up --postgres)."
)
_NEW_TABLE: Final = (
    "Write the constraint in CREATE TABLE: create a new table with it, INSERT ... SELECT the rows, "
    "DROP the old table, RENAME the new one; or keep such tables in PostgreSQL "
    "(tierkv up --postgres)."
)
_NO_INDEX: Final = re.compile(r"Unknown index type: hnsw", re.IGNORECASE)
_INDEX: Final = (
    "Without an index, ORDER BY embedding <=> ... reads the whole table and finds the same rows. "
    "For an index, run INSTALL vss with DuckDB on this host and start the front again; or keep the "
    "table in PostgreSQL with pgvector (tierkv up --postgres)."
)
_NO_VECTOR: Final = re.compile(r"\b(?:FLOAT|DOUBLE)\[\d*\]\.?$|'<(?:=|-|~)>\([^)]*VARCHAR")
"""A text that is no vector: a cast that failed, or an operator between a vector and a text."""
_VECTORS: Final = (
    "Write a vector as '[0.1, 0.2]'::FLOAT[2], with as many numbers as the other one has, or take "
    "the vector of a text: embedding <=> ai_embed('...')."
)
_NULL_VECTOR: Final = re.compile(r"argument can not contain NULL values")
_NO_NULLS: Final = (
    "A NULL of a type like FLOAT[128] counts as a list of NULLs here: leave its rows out "
    "(WHERE embedding IS NOT NULL), or make the column FLOAT[]."
)
_TOO_LONG: Final = re.compile(
    r"CHECK\(\(\(length\(.+\) <= \d+\) OR "
    r"\('(?P<type>char|varchar)\((?P<most>\d+)\)' IS NULL\)\)\)$",
    re.DOTALL,
)
"""The checks that rewriting/ddl.py adds for lengths, and the types they stand for."""
_WITH_LENGTH: Final = {"char": "character", "varchar": "character varying"}
_HINT: Final = re.compile(r"\s*\n+\s*((?:Did you mean|Candidate|Either add|Use \").*)", re.DOTALL)
_PLAIN: Final = re.compile(r"^([A-Za-z ]+?) Error: (.*)$", re.DOTALL)
_CATALOGUE: Final = re.compile(r"Did you mean \"(?:pg_|duckdb_|sqlite_|pragma_)")
"""A suggestion of an engine catalog relation, which is not useful for a misspelt table name."""

_PROGRAM: Final = re.compile(
    r"\s*CREATE\s+(?:OR\s+REPLACE\s+)?(?:FUNCTION|PROCEDURE)\b.*?\b(?:RETURNS|LANGUAGE|RETURN)\b",
    re.IGNORECASE | re.DOTALL,
)
_LACKING: Final = (
    # pattern in DuckDB's message (2, then 1.5), the clause in the statement, message, hint
    (
        r'at or near "FOR"|locking clause',
        r"\b(?P<here>FOR)\s+(NO\s+KEY\s+UPDATE|UPDATE|KEY\s+SHARE|SHARE)\b",
        "the embedded database has no row locks, as by SELECT ... FOR UPDATE",
        "Leave the clause out: if two transactions change the same row, the second one fails with "
        "40001 and can be repeated. PostgreSQL behind the front has row locks "
        "(tierkv up --postgres).",
    ),
    (
        r'at or near "INTO"|SELECT INTO',
        r"\bSELECT\b.*?\b(?P<here>INTO)\b",
        "the embedded database has no SELECT ... INTO",
        "Write CREATE TABLE name AS SELECT ...",
    ),
)
"""Clauses of PostgreSQL that are syntax errors in DuckDB."""
_AI_NAMES: Final = (*AI_FUNCTIONS, PROMPT_TEMPLATE)
_AI_LIST: Final = ", ".join(AI_FUNCTIONS)
_AI_NAME: Final = re.compile(r"Function with name \"?(ai_\w+)", re.IGNORECASE)


def to_tierkv_error(
    error: duckdb.Error, engine_text: str, source_position: Callable[[int], int]
) -> TierKVError:
    """Translate an engine error.

    Args:
        error: DuckDB's exception.
        engine_text: the statement that the engine was given.
        source_position: maps a 1-based position in ``engine_text`` to the user's text.
    """
    facts = _facts(str(error))
    kind = str(facts.get("exception_type", ""))
    if kind == "Interrupt" or isinstance(error, duckdb.InterruptException):
        return CancelledByUserError("canceling statement due to user request")
    message, hint = _split_hint(str(facts.get("exception_message", error)))
    if is_disk_full(message):  # In a commit, write or spill; no paths.
        return SqlError(
            "the database could not write: no space left on its disk",
            sqlstate="53100",
            hint="Free space on the disk of front.database, then run the statement again. Nothing "
            "of it was stored; reads still work.",
        )
    position = source_position(_position(facts, engine_text))
    too_long = _TOO_LONG.search(message) if kind == "Constraint" else None
    if too_long is not None:
        text = f"{_WITH_LENGTH[too_long['type']]}({too_long['most']})"
        return SqlError(f"value too long for type {text}", sqlstate="22001", position=position)
    if _CHECKED.search(message):
        return FeatureNotSupportedError(message, position=position, hint=_NEW_TABLE_TYPE)
    if _NO_INDEX.search(message):
        what = "the embedded database has no vector index: DuckDB's extension vss is not loaded"
        return FeatureNotSupportedError(what, position=position, hint=_INDEX)
    if _LATE_CONSTRAINT.search(message):
        return FeatureNotSupportedError(message, position=position, hint=_NEW_TABLE)
    state = sqlstate(kind, message)
    hint = hint or _sandbox_hint(state, message)
    if _NULL_VECTOR.search(message):
        hint = _NO_NULLS
    elif state in ("22P02", "42883") and _NO_VECTOR.search(message):
        hint = _VECTORS
    name = _AI_NAME.search(message)
    if state == "42883" and name:
        return _no_ai_call(name[1], engine_text, position)
    if state == "42601" and _PROGRAM.match(engine_text):
        return FeatureNotSupportedError(
            "the embedded database has no user-defined functions in SQL or other languages",
            position=position,
            hint="Use CREATE MACRO f(a) AS expression; macros can't contain AI calls.",
        )
    if state == "42601":
        for told, clause, what, cure in _LACKING:
            lacking = re.search(clause, engine_text, re.IGNORECASE | re.DOTALL)
            if lacking and re.search(told, message, re.IGNORECASE):
                at = position or source_position(lacking.start("here") + 1)
                return FeatureNotSupportedError(what, position=at, hint=cure)
    if state == "42601" and kind in ("Parser", "Syntax"):
        return SqlSyntaxError(message, position=position, hint=hint)
    return SqlError(message, sqlstate=state, position=position, hint=hint)


def _no_ai_call(name: str, engine_text: str, position: int) -> UnknownUdfError:
    """Return the error for a function named ``ai_...`` that reached the engine."""
    if name.lower() not in _AI_NAMES:
        return UnknownUdfError(
            f"there is no AI function {name}()",
            position=position,
            hint=ai_function_hint(name, _AI_NAMES) or f"The AI functions are {_AI_LIST}.",
        )
    if re.search(rf'\.\s*"?{name}"?\s*\(', engine_text, re.IGNORECASE):
        return UnknownUdfError(
            "AI functions are called without a schema",
            position=position,
            hint=f"Write {name}(...), without a schema before the name.",
        )
    return UnknownUdfError(
        f"{name}() can't be called from text that the statement runs",
        position=position,
        hint="Write the AI call in the statement itself, not in the text of query().",
    )


def is_disk_full(message: str) -> bool:
    """Return True if the engine reports a full disk."""
    return _DISK_FULL.search(message) is not None


def _sandbox_hint(state: str, message: str) -> str:
    """Return a hint about the setting that allows an operation refused by the sandbox, or ''."""
    if state != "42501":
        return ""
    if "configuration has been locked" in message:
        return "The server locks the engine's settings; front.external_access = on unlocks them."
    if re.search(r"disabled (by|through) configuration", message):
        return "The setting front.external_access = on allows files, the network and extensions."
    return ""


def sqlstate(kind: str, message: str) -> str:
    """Return the SQLSTATE of a DuckDB exception type and message; XX000 if no pattern matches."""
    for wanted, pattern, state in _STATES:
        if wanted.lower() == kind.lower() and re.search(pattern, message):
            return state
    return "XX000"


def _facts(text: str) -> dict[str, Any]:
    brace = text.find("{")
    if brace >= 0 and '"exception_type"' in text[brace : brace + 20]:
        try:
            facts: dict[str, Any] = json.loads(text[brace:])
            return facts
        except ValueError:
            pass
    plain = _PLAIN.match(text.split("\n\nLINE ")[0])
    if plain is None:
        return {"exception_message": text}
    return {"exception_type": plain[1], "exception_message": plain[2]}


def _split_hint(message: str) -> tuple[str, str]:
    found = _HINT.search(message)
    if found is None:
        return message.strip(), ""
    hint = "" if _CATALOGUE.match(found[1]) else found[1].strip()
    return message[: found.start()].strip(), hint


def _position(facts: dict[str, Any], engine_text: str) -> int:
    """Return the 1-based position in characters; DuckDB counts UTF-8 bytes from 0."""
    raw = str(facts.get("position", ""))
    if not raw.isdigit():
        return 0
    if engine_text.isascii():
        return int(raw) + 1
    return len(engine_text.encode()[: int(raw)].decode(errors="ignore")) + 1

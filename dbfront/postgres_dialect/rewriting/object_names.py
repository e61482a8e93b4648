"""Rules of rewrite.py for names with a database or a schema (rewriter.py has the names).

``"shop"."public"."t"`` becomes ``main."t"`` in the place of a table, schema, function or type, and
in expressions if the statement names this table. All other dotted names stay: with the database
``main``, ``main.t.c`` is a column of a table.
"""

from __future__ import annotations

import re
from typing import Final

from tierkv.dbfront.postgres_dialect.rewriting.rewriter import (
    DATABASE,
    ENGINE_SCHEMA,
    PUBLIC,
    Rewriter,
)
from tierkv.dbfront.postgres_values.sql_tokens import tokens

_BEFORE_NAME: Final = frozenset(
    {"from", "join", "into", "update", "table", "view", "only", "references", "using", "sequence"}
    | {"schema", "copy", "truncate", "macro", "function", "type", "describe", "summarize"}
    | {"analyze", "vacuum", "exists", "index", "column"}
)
_FROM_OF_FUNCTION: Final = frozenset({"extract", "substring", "trim", "overlay"})
_LEAST: Final = {"column": 4}
"""Minimum number of names in a chain that begins with the database, by the preceding word."""
_LISTS: Final = frozenset({"drop", "truncate", "vacuum", "analyze"})
_SEQUENCE_CALLS: Final = frozenset({"nextval", "currval", "setval"})
_SCHEMA_COLUMNS: Final = re.compile(r"nspname|schema_?name|(?:table|constraint|view)_schema")
_COMPARES: Final = frozenset({"=", "~", "like", "ilike", "<>"})


def _chain(r: Rewriter, i: int) -> list[int]:
    """Return the indexes of the names of ``a.b.c`` that begins at ``i``."""
    found = [i]
    while r.at(i + 1) == "." and i + 2 < len(r.tokens):
        i += 2
        if r.tokens[i].kind not in ("word", "ident"):
            break
        found.append(i)
    return found


def _is_name(r: Rewriter, i: int) -> bool:
    return 0 <= i < len(r.tokens) and r.tokens[i].kind in ("word", "ident") and r.at(i - 1) != "."


def names_object(r: Rewriter, i: int) -> bool:
    """Return True if the name at ``i`` is in a place for names of tables, schemas, types..."""
    before = i - 1
    while before >= 0 and r.at(before) == "(":
        before -= 1
    word = r.at(before)
    if word == "from":
        opening = _enclosing(r, before)
        called = opening > 0 and r.at(opening - 1) in _FROM_OF_FUNCTION
        return not called and r.at(before - 1) != "distinct"
    if word == "on":
        return r.at(0) in ("create", "comment", "grant", "revoke")
    if word == ",":
        return r.in_from(i) or r.at(0) in _LISTS
    if word == "like":
        return r.at(0) == "create"
    return word in _BEFORE_NAME


def _enclosing(r: Rewriter, i: int) -> int:
    """Return the index of the parenthesis around ``i``; -1 if there is none."""
    depth = 0
    for at in range(i - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(r.at(at), 0)
        if depth < 0:
            return at
    return -1


def _relations(r: Rewriter) -> frozenset[tuple[str, ...]]:
    """Return the qualified names of all tables that the statement names."""
    if r.relations is None:
        r.relations = frozenset(
            tuple(r.tokens[at].name.lower() for at in _chain(r, i))
            for i in range(len(r.tokens))
            if _is_name(r, i) and r.at(i + 1) == "." and names_object(r, i)
        )
    return r.relations


def _is_alias(r: Rewriter, name: str) -> bool:
    """Return True if ``name`` also occurs alone: a table or an alias with this name."""
    return any(
        token.kind in ("word", "ident")
        and token.name.lower() == name
        and r.at(at + 1) != "."
        and r.at(at - 1) not in (".", "schema", "exists")
        for at, token in enumerate(r.tokens)
    )


def object_name(r: Rewriter, i: int) -> int:
    """Rewrite ``shop.public.t``, ``public.t.c``, ``public.f()``, ``CREATE SCHEMA public``."""
    if not _is_name(r, i):
        return 0
    if r.tokens[i].name in _SEQUENCE_CALLS and r.at(i + 1) == "(":
        return _sequence(r, i)
    if r.at(i + 1) != "." and r.naming.is_public(r.tokens[i]) and _of_schema(r, i):
        return r.replace(i, 1, ENGINE_SCHEMA)
    if r.at(i + 1) != ".":
        return 0
    chain = _chain(r, i)
    start = _start(r, chain)
    public = r.naming.is_public(r.tokens[chain[start]])
    if start == 0 and not (public and _is_schema(r, chain)):
        return 0
    if r.at(chain[-1] + 2) == "*" and len(chain) - start == 2:  # the engine knows only t.*
        return r.drop(i, chain[-1] - i)
    if public:
        return r.replace(i, chain[start] - i + 1, ENGINE_SCHEMA)
    if r.tokens[chain[start]].name.lower() == r.naming.engine.lower():
        return r.replace(i, 1, f'"{r.naming.engine}"')
    return r.drop(i, chain[start] - i)


def _of_schema(r: Rewriter, i: int) -> bool:
    """Match ``CREATE SCHEMA [IF NOT EXISTS] x``, ``DROP SCHEMA [IF EXISTS] x``."""
    return "schema" in (r.at(i - 1), r.at(i - 3), r.at(i - 4)) and r.at(0) in ("create", "drop")


def _start(r: Rewriter, chain: list[int]) -> int:
    """Return the schema's place in a chain: 1 if the first name is the database, else 0."""
    first = chain[0]
    if not r.naming.is_database(r.tokens[first]):
        return 0
    if names_object(r, first):
        return int(len(chain) >= _LEAST.get(r.at(first - 1), 2 if _of_schema(r, first) else 3))
    if r.at(chain[-1] + 1) == "(":
        return int(len(chain) == 3)
    names = tuple(r.tokens[at].name.lower() for at in chain)
    inside = len(chain) > 3 or r.at(chain[-1] + 2) == "*"
    return int(inside and names[:3] in _relations(r))


def _is_schema(r: Rewriter, chain: list[int]) -> bool:
    """Return True if ``public`` at the start of a chain is the schema, not an alias of a table."""
    return names_object(r, chain[0]) or not _is_alias(r, PUBLIC)


def _sequence(r: Rewriter, i: int) -> int:
    """Rewrite ``nextval('public.numbers')``; the rest of the call stays."""
    if i + 2 >= len(r.tokens) or r.tokens[i + 2].kind != "string":
        return 0
    parts = [token for token in tokens(r.tokens[i + 2].value) if token.text != "."]
    if len(parts) > 2 and r.naming.is_database(parts[0]):
        parts = parts[1:]
    if len(parts) < 2 or not (r.naming.is_public(parts[0]) or len(parts) == 2):
        return 0
    schema = ENGINE_SCHEMA if r.naming.is_public(parts[0]) else parts[0].text
    name = f"{schema}.{parts[1].text}".replace("'", "''")
    return r.replace(i, 3, f"{r.at(i)}('{name}'")


def schema_asked(r: Rewriter, i: int) -> int:
    """Rewrite ``nspname = 'main'`` in a catalog query: the catalog shows ``public``."""
    width = 1
    if (r.at(i), r.at(i + 1)) == ("operator", "("):
        width = r.closing(i + 1) - i + 1
    elif r.at(i) not in _COMPARES:
        return 0
    if not (r.of_catalog and r.naming.public) or i + width >= len(r.tokens):
        return 0
    if not _SCHEMA_COLUMNS.fullmatch(r.at(i - 1).strip('"')):
        return 0
    asked, symbol = r.tokens[i + width], r.at(i) if width == 1 else "~"
    if asked.kind == "string" and asked.value in (ENGINE_SCHEMA, f"^({ENGINE_SCHEMA})$"):
        text = asked.value.replace(ENGINE_SCHEMA, PUBLIC)
        return r.replace(i, width + 1, f"{symbol} '{text}'")
    if asked.kind == "param" and symbol in ("=", "<>", "like"):
        own = f"{DATABASE}.main.own_schema(CAST({asked.text} AS VARCHAR))"
        escaped = " ESCAPE '\\'" if symbol == "like" and r.at(i + 2) != "escape" else ""
        return r.replace(i, 2, f"{symbol} {own}{escaped}")
    return 0

"""Points PostgreSQL catalog queries at our views and turns spellings DuckDB lacks into its own.

Pure and token-wise: ``pg_catalog.pg_class`` becomes ``tierkv_pg.main.pg_class``, ``'t'::regclass``
a lookup, ``OPERATOR(pg_catalog.~)`` the operator, ``COLLATE pg_catalog.default`` nothing. Text
without any of the telling words is given back untouched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dbfront.pgwire.sql_tokens import Token, tokens

DATABASE: Final = "tierkv_pg"

_TELLING: Final = re.compile(
    r"pg_|::\s*(?:reg|name\b|oid|\"char\"|xid)|\bcollate\b|\boperator\b|\bto_reg|\bversion\b"
    r"|\bcurrent_(?:user|role|catalog)\b|\bsession_user\b|\bcurrent_setting\b|\bformat_type\b"
    r"|\b(?:obj|col|shobj)_description\b|\barray_(?:upper|lower)\b|\bquote_ident\b"
    r"|\bset_config\b|\bhas_\w+_privilege\b|\bas\s+(?:reg\w+|oid|name)\b",
    re.IGNORECASE,
)
_TYPES: Final = {
    "name": "VARCHAR",
    "char": "VARCHAR",
    "bpchar": "VARCHAR",
    "oid": "BIGINT",
    "xid": "BIGINT",
    "oidvector": "BIGINT[]",
    "int2vector": "INTEGER[]",
    "jsonb": "JSON",
    "regproc": "VARCHAR",
    "regprocedure": "VARCHAR",
    "regoper": "VARCHAR",
    "regrole": "VARCHAR",
    "regclass": "VARCHAR",
    "regtype": "VARCHAR",
    "regnamespace": "VARCHAR",
}
_FROM_LITERAL: Final = {"regclass": "to_regclass", "regtype": "to_regtype"}
_FROM_OID: Final = {
    "regclass": "regclass_name({})",
    "regtype": "format_type({}, NULL)",
    "regnamespace": "regnamespace_name({})",
}


@dataclass(frozen=True, slots=True)
class CatalogNames:
    """Views and functions of the database ``DATABASE``."""

    views: frozenset[str]
    functions: frozenset[str]


class _Rewriter:
    """One pass over the tokens; each rule answers how many tokens it used up, or 0."""

    def __init__(self, sql: str, names: CatalogNames, literals: Mapping[str, str]) -> None:
        self.sql = sql
        self.tokens: Sequence[Token] = list(tokens(sql))
        self.names = names
        self.literals = literals
        self.out: list[str] = []
        self.copied = 0

    def at(self, index: int) -> str:
        """The token's folded text, or an empty string beyond the ends."""
        if not 0 <= index < len(self.tokens):
            return ""
        token = self.tokens[index]
        return token.text.lower() if token.kind == "word" else token.text

    def replace(self, first: int, count: int, text: str) -> int:
        """Put ``text`` in place of tokens [first, first + count)."""
        start, end = self.tokens[first].start, self.tokens[first + count - 1].end
        self.out += [self.sql[self.copied : start], text]
        self.copied = end
        return count

    def run(self, rules: Sequence[Callable[[_Rewriter, int], int]]) -> str:
        index = 0
        while index < len(self.tokens):
            used = next((n for rule in rules if (n := rule(self, index))), 1)
            index += used
        return "".join(self.out) + self.sql[self.copied :]


def _collate(r: _Rewriter, i: int) -> int:
    """``COLLATE "C"`` and ``COLLATE [pg_catalog.]default``: DuckDB compares bytes anyway."""
    if r.at(i) != "collate":
        return 0
    width = 3 if (r.at(i + 1), r.at(i + 2)) == ("pg_catalog", ".") else 1
    if r.at(i + width).strip('"').lower() not in ("default", "c", "posix"):
        return 0
    return r.replace(i, width + 1, "")


def _operator(r: _Rewriter, i: int) -> int:
    """``OPERATOR(pg_catalog.~)`` is ``~``."""
    if (r.at(i), r.at(i + 1)) != ("operator", "("):
        return 0
    start = i + 4 if r.at(i + 3) == "." else i + 2
    end = start
    while end < len(r.tokens) and r.at(end) != ")":
        end += 1
    symbol = "".join(map(r.at, range(start, end)))
    if not symbol or symbol.isalnum() or end == len(r.tokens):
        return 0
    return r.replace(i, end + 1 - i, symbol)


def _cast_width(r: _Rewriter, i: int) -> tuple[int, str]:
    """Tokens of ``:: [pg_catalog .] type`` at ``i``, and the type's name."""
    if r.at(i) != "::":
        return 0, ""
    width = 4 if (r.at(i + 1), r.at(i + 2)) == ("pg_catalog", ".") else 2
    return width, r.at(i + width - 1).strip('"')


def _cast_of_value(r: _Rewriter, i: int) -> int:
    """``'t'::regclass``, ``c.oid::regclass``: lookups by name, and of names."""
    long = r.at(i + 1) == "." and r.tokens[i].kind in ("word", "ident")
    length = 3 if long else 1
    width, name = _cast_width(r, i + length)
    if not width or r.at(i - 1) == ".":
        return 0
    kind = r.tokens[i].kind
    if kind == "string" and name in _FROM_LITERAL:
        value = r.tokens[i].text
        # The next cast, such as ::oid, then applies to the number.
        return r.replace(i, length + width, f"{DATABASE}.main.{_FROM_LITERAL[name]}({value})")
    if kind in ("word", "ident") and name in _FROM_OID:
        value = r.sql[r.tokens[i].start : r.tokens[i + length - 1].end]
        return r.replace(i, length + width, f"{DATABASE}.main.{_FROM_OID[name].format(value)}")
    return 0


def _cast_type(r: _Rewriter, i: int) -> int:
    """``::name``, ``::pg_catalog.text``, ``CAST(x AS oid)``."""
    width, name = _cast_width(r, i)
    if not width and r.at(i) == "as":
        width = 4 if (r.at(i + 1), r.at(i + 2)) == ("pg_catalog", ".") else 2
        name = r.at(i + width - 1).strip('"')
        if r.at(i + width) not in (")", "["):
            return 0
    if not width or (width == 2 and name not in _TYPES):
        return 0
    return r.replace(i, width, f"{r.at(i)} {_TYPES.get(name, name)}")


def _named(r: _Rewriter, first: int, after: int, literal: str) -> str:
    """A literal that is a whole column of the select list keeps the name of what it replaces."""
    depth = sum({"(": 1, ")": -1}.get(r.at(index), 0) for index in range(first))
    alone = r.at(first - 1) in ("select", ",") and r.at(after) in ("", ",", ";", "from")
    name = next(t.name for t in r.tokens[first:after] if t.name not in ("pg_catalog", "."))
    return f'{literal} AS "{name}"' if alone and depth == 0 else literal


def _literal(r: _Rewriter, i: int) -> int:
    """Session facts: ``current_user``, ``pg_backend_pid()``, ``current_setting('...')``."""
    start = i + 2 if (r.at(i), r.at(i + 1)) == ("pg_catalog", ".") else i
    if start == i and r.at(i - 1) == ".":
        return 0
    name = r.at(start)
    if r.at(start + 1) != "(":
        if name in r.literals and r.at(start + 1) != "." and r.at(i - 1) != "as":
            return r.replace(i, start - i + 1, _named(r, i, start + 1, r.literals[name]))
        return 0
    if r.at(start + 2) == ")" and f"{name}()" in r.literals:
        return r.replace(i, start - i + 3, _named(r, i, start + 3, r.literals[f"{name}()"]))
    if name == "current_setting" and r.tokens[start + 2].kind == "string":
        key = f"current_setting {r.tokens[start + 2].value.lower()}"
        end = start + 3
        if r.at(end) == ",":  # current_setting(name, missing_ok)
            end += 2
        if key in r.literals and r.at(end) == ")":
            return r.replace(i, end - i + 1, _named(r, i, end + 1, r.literals[key]))
    return 0


def _catalog_name(r: _Rewriter, i: int) -> int:
    """``[pg_catalog.]pg_class`` and ``[pg_catalog.]format_type(``."""
    qualified = (r.at(i), r.at(i + 1)) == ("pg_catalog", ".")
    start = i + 2 if qualified else i
    if start >= len(r.tokens) or r.tokens[start].kind not in ("word", "ident"):
        return 0
    if not qualified and r.at(i - 1) in (".", "as"):
        return 0
    name, after = r.tokens[start].name, r.at(start + 1)
    count = start - i + 1
    if after == "(" and name in r.names.functions:
        return r.replace(i, count, f"{DATABASE}.main.{name}")
    if after not in ("(", ".") and name in r.names.views:
        return r.replace(i, count, f"{DATABASE}.main.{name}")
    if qualified:  # a function DuckDB has, a type, or pg_class.relname
        return r.replace(i, count, r.sql[r.tokens[start].start : r.tokens[start].end])
    return 0


_RULES: Final = (_collate, _operator, _cast_of_value, _cast_type, _literal, _catalog_name)


def rewrite(sql: str, names: CatalogNames, literals: Mapping[str, str]) -> str:
    """Rewrite one statement of a client.

    Args:
        sql: one statement.
        names: what our catalog has.
        literals: session facts by lower-case spelling (``current_user``, ``pg_backend_pid()``,
            ``current_setting datestyle``), as SQL literals.
    """
    if not _TELLING.search(sql):
        return sql
    return _Rewriter(sql, names, literals).run(_RULES)


def qualify(sql: str, names: CatalogNames) -> str:
    """Qualify the names in our own DDL."""
    return _Rewriter(sql, names, {}).run((_catalog_name,))

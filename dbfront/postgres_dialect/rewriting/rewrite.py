"""Redirects PostgreSQL catalog queries to the tierkv_pg views, and rewrites spellings DuckDB lacks.

Pure and token-wise: ``pg_catalog.pg_class`` becomes ``tierkv_pg.main.pg_class``, ``'t'::regclass``
a lookup, ``OPERATOR(pg_catalog.~)`` the operator, ``COLLATE pg_catalog.default`` nothing. Text
without any of the telling words is returned unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.postgres_dialect.rewriting.casts import (
    bytes_literal,
    cast_of_call,
    cast_of_value,
    cast_type,
    coded_text,
    function_column,
    list_literal,
    member_of_literal,
)
from tierkv.dbfront.postgres_dialect.rewriting.object_names import object_name, schema_asked
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import (
    DATABASE,
    INFORMATION_SCHEMA,
    CatalogNames,
    Edit,
    Naming,
    Rewriter,
    Rule,
    source_position,
)
from tierkv.dbfront.postgres_dialect.session.sequences import current_value
from tierkv.kvcore.errors import UserError
from tierkv.sql.calls.dialect import DUCKDB_INNER_PRODUCT
from tierkv.sql.plan.plan import SqlStatement

TELLING: Final = re.compile(
    r"pg_|information_schema|\bcurrent_database\b|\bjsonb?_build_|\bjsonb\b|'\{|\bregclass\b"
    r"|\bselect\s+from\b|\bjsonb?_(?:object_)?agg\b|\bjsonb_array_length\b|\bto_jsonb\b"
    r"|\b(?:last|curr)val\b"
    r"|::\s*(?:reg|name\b|oid|\"char\"|xid)|\bcollate\b|\boperator\b|\bto_reg|\bversion\b"
    r"|\bbytea\b|\bcurrent_(?:user|role|catalog|schemas?)\b|\bsession_user\b|\bcurrent_setting\b|\bformat_type\b"
    r"|\b(?:obj|col|shobj)_description\b|\barray_(?:upper|lower)\b|\bquote_ident\b"
    r"|\be'[^\\]*(?:\\[^xu0-7][^\\]*)*\\[xu0-7]|\bu&'"
    r"|\bi?like\s+(?:e?'[^'\\]*\\|\$\d)"
    r"|<#>|\bset_config\b|\bhas_\w+_privilege\b|\bas\s+(?:reg\w+|oid|name)\b",
    re.IGNORECASE,
)
"""Words of a statement that must be rewritten; other statements are left alone."""

_MARKS: Final = (
    *("pg_", "information_schema", "current_", "json", "'{", "reg", "::", "collate", "operator"),
    *("like", "version", "session_user", "format_type", "_description", "array_", "quote_ident"),
    *("set_config", "_privilege", "oid", "name", "lastval", "currval", "bytea", "e'", "u&'"),
    "<#>",
)
"""Every text that TELLING matches contains one of these marks, or matches _NO_COLUMNS."""
_NO_COLUMNS: Final = re.compile(r"select\s+from")
_RENAMED: Final = {
    "json_build_object": "json_object",
    "jsonb_build_object": "json_object",
    "json_build_array": "json_array",
    "jsonb_build_array": "json_array",
    "to_jsonb": "to_json",
    "jsonb_array_length": "json_array_length",
    "json_object_agg": "json_group_object",
    "jsonb_object_agg": "json_group_object",
    "current_schemas": f"{DATABASE}.main.own_current_schemas",
}
_AS_IS: Final = Naming()
_JSON_LISTS: Final = frozenset({"json_agg", "jsonb_agg"})
_MATCHES: Final = {"~": "", "!~": "", "~*": "(?i)", "!~*": "(?i)"}
_SETS: Final = frozenset(
    {"generate_series", "generate_subscripts", "string_to_array", "pg_partition_ancestors"}
)
_VECTORS: Final = frozenset({"indkey", "indclass", "indoption", "indcollation", "proargtypes"})
_AFTER_TABLE: Final = frozenset(
    {"where", "join", "left", "right", "inner", "cross", "full", "natural", "on", "using", "group"}
    | {"order", "limit", "offset", "fetch", "having", "union", "except", "intersect", "window"}
    | {"for", "lateral", "tablesample"}
)
_FACTS_OF_CATALOG: Final = frozenset({"user"})
_ROLE_FACTS: Final = frozenset({"current_user", "current_role", "session_user"})
_ROLE_VERBS: Final = frozenset({"grant", "revoke", "reassign"})
_ROLE_WORDS: Final = frozenset({"owned", "role", "user", "tenant"})


def _collate(r: Rewriter, i: int) -> int:
    """Drop ``COLLATE "C"`` and ``COLLATE [pg_catalog.]default``: DuckDB compares bytes anyway."""
    if r.at(i) != "collate":
        return 0
    width = 3 if (r.at(i + 1), r.at(i + 2)) == ("pg_catalog", ".") else 1
    if r.at(i + width).strip('"').lower() not in ("default", "c", "posix"):
        return 0
    return r.replace(i, width + 1, "")


def _operator(r: Rewriter, i: int) -> int:
    """Rewrite ``OPERATOR(pg_catalog.~)`` as ``~``."""
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


def _named(r: Rewriter, first: int, after: int, literal: str) -> str:
    """Name a literal that is a whole column of the select list after the replaced expression."""
    depth = sum({"(": 1, ")": -1}.get(r.at(index), 0) for index in range(first))
    alone = r.at(first - 1) in ("select", ",") and r.at(after) in ("", ",", ";", "from")
    name = next(t.name for t in r.tokens[first:after] if t.name not in ("pg_catalog", "."))
    return f'{literal} AS "{name}"' if alone and depth == 0 else literal


def _fact(r: Rewriter, first: int, after: int, literal: str) -> str:
    """Return a session fact for tokens [first, after); as a table it has one row."""
    if r.at(first - 1) not in ("from", "join") and not (
        r.at(first - 1) == "," and r.in_from(first)
    ):
        return _named(r, first, after, literal)
    name = next(t.name for t in r.tokens[first:after] if t.name not in ("pg_catalog", "."))
    return _aliased(r, after, f'(SELECT {literal} AS "{name}")', name)


def _role(r: Rewriter, i: int) -> int:
    """Put the user's name for ``CURRENT_USER`` in statements about roles, as in DROP OWNED BY."""
    verb, word, name = r.at(0), r.at(1), r.at(i)
    if name not in _ROLE_FACTS or name not in r.literals or r.tokens[i].kind != "word":
        return 0
    if verb not in _ROLE_VERBS and (verb not in ("drop", "alter") or word not in _ROLE_WORDS):
        return 0
    user = r.literals[name][1:-1].replace("''", "'")
    return r.replace(i, 1, '"' + user.replace('"', '""') + '"')


def _literal(r: Rewriter, i: int) -> int:
    """Replace session facts: ``current_user``, ``pg_backend_pid()``, ``current_setting('...')``."""
    start = i + 2 if (r.at(i), r.at(i + 1)) == ("pg_catalog", ".") else i
    if start == i and r.at(i - 1) == ".":
        return 0
    name = r.at(start)
    if name in _FACTS_OF_CATALOG and not r.of_catalog:
        return 0
    if r.at(start + 1) != "(":
        if name in r.literals and r.at(start + 1) != "." and r.at(i - 1) != "as":
            return r.replace(i, start - i + 1, _fact(r, i, start + 1, r.literals[name]))
        return 0
    if r.at(start + 2) == ")" and f"{name}()" in r.literals:
        return r.replace(i, start - i + 3, _fact(r, i, start + 3, r.literals[f"{name}()"]))
    if name == "current_setting" and r.tokens[start + 2].kind == "string":
        key = f"current_setting {r.tokens[start + 2].value.lower()}"
        end = start + 3
        if r.at(end) == ",":  # current_setting(name, missing_ok)
            end += 2
        if key in r.literals and r.at(end) == ")":
            return r.replace(i, end - i + 1, _named(r, i, end + 1, r.literals[key]))
    return 0


def _regex(r: Rewriter, i: int) -> int:
    """Rewrite ``~``, which matches anywhere in PostgreSQL and the whole text in DuckDB."""
    symbol = r.at(i)
    if not r.of_catalog or symbol not in _MATCHES or i + 1 >= len(r.tokens):
        return 0
    pattern = r.tokens[i + 1]
    if pattern.kind == "string":
        shown = "'" + pattern.value.replace("'", "''") + "'"
    elif pattern.kind == "param":
        shown = pattern.text
    else:
        return 0
    flags = _MATCHES[symbol]
    wide = f"('{flags}(?s).*(?:' || {shown} || ').*')"
    return r.replace(i, 2, f"{symbol.rstrip('*')} {wide}")


def _like(r: Rewriter, i: int) -> int:
    r"""Add PostgreSQL's default escape, the backslash, to ``LIKE 'ai\_%'``."""
    if r.at(i) not in ("like", "ilike") or i + 1 >= len(r.tokens):
        return 0
    pattern = r.tokens[i + 1]
    typed = r.at(i + 2) == "::" and r.at(i + 3) in ("varchar", "text")
    after = i + 4 if typed else i + 2
    if pattern.kind not in ("string", "param") or r.at(after) in ("escape", "||", "::", "("):
        return 0
    # Without a backslash DuckDB's own LIKE means the same, and is faster.
    if not r.of_catalog and pattern.kind == "string" and "\\" not in pattern.value:
        return 0
    return r.replace(i, after - i, f"{r.at(i)} {pattern.text}{'::TEXT' * typed} ESCAPE '\\'")


def _set_in_from(r: Rewriter, first: int) -> int:
    """Rewrite ``FROM f(...) [AS] a``: in PostgreSQL ``a`` is also the name of its column."""
    i = first + 2 if (r.at(first), r.at(first + 1)) == ("pg_catalog", ".") else first
    if not r.of_catalog or r.at(i) not in _SETS or r.at(i + 1) != "(" or not r.in_from(first):
        return 0
    end = r.closing(i + 1)
    if r.at(i) == "pg_partition_ancestors":  # a table without partitions is its only ancestor
        inner = r.nested(r.sql[r.tokens[i + 1].end : r.tokens[end].start])
        last = end + 2 if (r.at(end + 1), r.at(end + 2)) == ("with", "ordinality") else end
        return r.replace(first, last + 1 - first, f"(SELECT {inner} AS relid, 1 AS depth)")
    alias = end + 2 if r.at(end + 1) == "as" else end + 1
    if alias >= len(r.tokens) or r.tokens[alias].kind != "word" or r.at(alias + 1) == "(":
        return 0
    name = r.tokens[alias].text
    call = r.nested(r.sql[r.tokens[i].start : r.tokens[end].end])
    if r.at(i) == "generate_subscripts" and r.tokens[end - 3].name in _VECTORS:
        return r.replace(first, alias + 1 - first, f"(SELECT {call} - 1 AS {name}) {name}")
    if r.at(i) == "string_to_array":
        return r.replace(first, alias + 1 - first, f"(SELECT {call} AS {name}) {name}")
    return r.replace(first, alias + 1 - first, f"{call} AS {name}({name})")


def _substring(r: Rewriter, i: int) -> int:
    """Rewrite ``substring(x FROM 'pattern')``: the first group of a match, or the whole match."""
    if not r.of_catalog or r.at(i) != "substring" or r.at(i + 1) != "(":
        return 0
    end = r.closing(i + 1)
    if end >= len(r.tokens) or r.at(end - 2) != "from" or r.tokens[end - 1].kind != "string":
        return 0
    inner = r.nested(r.sql[r.tokens[i + 1].end : r.tokens[end - 2].start])
    pattern = r.tokens[end - 1].value
    group = int(re.search(r"(?<!\\)\((?!\?)", pattern) is not None)
    quoted = pattern.replace("'", "''")
    return r.replace(i, end + 1 - i, f"nullif(regexp_extract({inner}, '{quoted}', {group}), '')")


def _set_in_select(r: Rewriter, i: int) -> int:
    """Rewrite ``SELECT generate_series(1, 3)``: rows in PostgreSQL, a list in DuckDB."""
    if not r.of_catalog or r.at(i) != "generate_series" or r.at(i + 1) != "(" or r.in_from(i):
        return 0
    end = r.closing(i + 1)
    if end >= len(r.tokens) or r.at(i - 1) not in ("select", ","):
        return 0
    inner = r.nested(r.sql[r.tokens[i + 1].end : r.tokens[end].start])
    return r.replace(i, end + 1 - i, f"unnest(generate_series({inner}))")


def _vector(r: Rewriter, i: int) -> int:
    """Rewrite ``indkey[n]`` and ``generate_subscripts(indkey, 1)``: vectors count from 0."""
    if not r.of_catalog or r.tokens[i].kind not in ("word", "ident"):
        return 0
    if r.at(i + 1) == "[" and r.tokens[i].name in _VECTORS:
        end = i + 2
        while end < len(r.tokens) and r.at(end) not in ("]", ":", "["):
            end += 1
        if r.at(end) != "]":
            return 0
        inner = r.nested(r.sql[r.tokens[i + 1].end : r.tokens[end].start])
        r.replace(i + 1, end - i, f"[({inner}) + 1]")
        return end + 1 - i
    if r.at(i) != "generate_subscripts" or r.at(i + 1) != "(" or r.at(i - 1) not in ("select", ","):
        return 0
    end = r.closing(i + 1)
    if end >= len(r.tokens) or r.tokens[end - 3].name not in _VECTORS or r.in_from(i):
        return 0
    inner = r.nested(r.sql[r.tokens[i + 1].end : r.tokens[end].start])
    return r.replace(i, end + 1 - i, f"generate_subscripts({inner}) - 1")


def _aliased(r: Rewriter, after: int, query: str, name: str) -> str:
    """Return a query in place of a table, with the table's name unless an alias follows."""
    token = r.tokens[after] if after < len(r.tokens) else None
    named = token is not None and (
        token.kind == "ident" or (token.kind == "word" and r.at(after) not in _AFTER_TABLE)
    )
    return query if named else f'{query} AS "{name}"'


def _information(r: Rewriter, i: int) -> int:
    """Rewrite ``information_schema.tables``, and ``information_schema.tables.table_name``."""
    if r.tokens[i].kind not in ("word", "ident") or not r.is_bare(i) or r.at(i + 1) != ".":
        return 0
    if r.tokens[i].name != INFORMATION_SCHEMA or i + 2 >= len(r.tokens):
        return 0
    name = r.tokens[i + 2].name
    if name == "_pg_expandarray":
        return r.replace(i, 3, f"{DATABASE}.main.own_expandarray")
    full = f"{INFORMATION_SCHEMA}.{name}"
    if name not in r.names.information and full not in r.names.empty:
        return 0
    if r.at(i + 3) == ".":
        return r.replace(i, 3, f'"{name}"')
    if full in r.names.empty:
        return r.replace(i, 3, _aliased(r, i + 3, r.names.empty[full], name))
    return r.replace(i, 3, f'{DATABASE}.information."{name}"')


def _constants(r: Rewriter, i: int) -> bool:
    """Return True if the two arguments from ``i`` on are the same for all rows."""
    kinds = {token.kind for token in (*r.tokens[i : i + 1], *r.tokens[i + 2 : i + 3])}
    return r.at(i + 1) == "," and r.at(i + 3) == ")" and kinds <= {"string", "param"}


def _renamed(r: Rewriter, i: int) -> int:
    """Rename functions that DuckDB has under another name, and rewrite ``format('%I', x)``."""
    start = i + 2 if (r.at(i), r.at(i + 1)) == ("pg_catalog", ".") else i
    name = r.at(start)
    if r.at(start + 1) != "(" or (start == i and r.at(i - 1) == "."):
        return 0
    if name in _RENAMED:
        return r.replace(i, start - i + 1, _RENAMED[name])
    ours = start + 2 < len(r.tokens) and r.tokens[start + 2].value.startswith("tierkv.")
    if name == "current_setting" and (r.of_catalog or ours):  # literals: an earlier rule
        return r.replace(i, start - i + 1, f"{DATABASE}.main.own_setting")
    if name == "pg_get_serial_sequence" and _constants(r, start + 2):
        return r.replace(i, start - i + 1, f"{DATABASE}.main.own_serial_sequence")
    if name == "format" and r.of_catalog and r.at(start + 2).startswith("'%"):
        return r.replace(i, start - i + 1, f"{DATABASE}.main.own_format")
    return 0


def _json_list(r: Rewriter, first: int) -> int:
    """Rewrite ``json_agg(x ORDER BY y) FILTER (...)``; DuckDB's json_agg has neither clause."""
    i = first + 2 if (r.at(first), r.at(first + 1)) == ("pg_catalog", ".") else first
    if r.at(i) not in _JSON_LISTS or r.at(i + 1) != "(" or (i == first and r.at(i - 1) == "."):
        return 0
    last = end = r.closing(i + 1)
    while r.at(last + 1) in ("filter", "over") and r.at(last + 2) == "(":
        last = r.closing(last + 2)
    if last >= len(r.tokens):
        return 0
    inner = r.nested(r.sql[r.tokens[i + 1].end : r.tokens[end].start])
    tail = r.nested(r.sql[r.tokens[end].end : r.tokens[last].end])
    return r.replace(first, last + 1 - first, f"to_json(list({inner}){tail})")


def _catalog_name(r: Rewriter, i: int) -> int:
    """Rewrite ``[pg_catalog.]pg_class`` and ``[pg_catalog.]format_type(``."""
    qualified = (r.at(i).strip('"'), r.at(i + 1)) == ("pg_catalog", ".")
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
    if after not in ("(", ".") and name in r.names.empty:
        return r.replace(i, count, _aliased(r, start + 1, r.names.empty[name], name))
    if qualified:  # a function DuckDB has, a type, or pg_class.relname
        return r.replace(i, count, r.sql[r.tokens[start].start : r.tokens[start].end])
    return 0


def _own_information(r: Rewriter, i: int) -> int:
    """Rewrite ``information.tables`` in the catalog's own DDL."""
    if (r.at(i), r.at(i + 1)) != ("information", ".") or r.at(i - 1) == ".":
        return 0
    return r.replace(i, 3, f'{DATABASE}.information."{r.tokens[i + 2].name}"')


def _whole_division(r: Rewriter, i: int) -> int:
    """Rewrite ``/``: PostgreSQL's ``current_setting('server_version_num')::int / 100`` is whole."""
    if r.at(i) != "/" or r.at(i - 1) not in ("int", "integer", "int4") or r.at(i - 2) != "::":
        return 0
    version = r.at(i - 4) == "'server_version_num'" and r.at(i - 6) == "current_setting"
    return r.replace(i, 1, "//") if version or r.of_catalog else 0


def _inner_product(r: Rewriter, i: int) -> int:
    """Rewrite ``<#>``, pgvector's negative inner product, as the operator of each session."""
    return r.replace(i, 1, DUCKDB_INNER_PRODUCT) if r.at(i) == "<#>" else 0


def _no_columns(r: Rewriter, i: int) -> int:
    """Rewrite ``EXISTS (SELECT FROM t)``: a select list may be empty in PostgreSQL."""
    if (r.at(i), r.at(i + 1)) != ("select", "from") or r.at(i - 2) != "exists":
        return 0
    return r.replace(i, 1, "SELECT 1")


_RULES: Final[tuple[Rule, ...]] = (
    schema_asked,
    _collate,
    _operator,
    coded_text,
    list_literal,
    member_of_literal,
    bytes_literal,
    function_column,
    cast_of_value,
    cast_of_call,
    cast_type,
    _regex,
    _like,
    _role,
    _literal,
    _information,
    _json_list,
    current_value,
    _renamed,
    _set_in_from,
    _set_in_select,
    _substring,
    _vector,
    object_name,
    _whole_division,
    _no_columns,
    _inner_product,
    _catalog_name,
)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten statement; ``edits`` map positions, ``naming`` maps names."""

    text: SqlStatement
    edits: tuple[Edit, ...] = ()
    naming: Naming = _AS_IS

    @contextmanager
    def placing_errors(self) -> Iterator[None]:
        """Map errors of the rewritten text to the client's text and names."""
        try:
            yield
        except UserError as error:
            self.naming.speak(error)
            if error.position:
                error.position = source_position(self.edits, error.position)
            raise


def rewrite(
    sql: str, names: CatalogNames, literals: Mapping[str, str], naming: Naming = _AS_IS
) -> Rewritten:
    """Rewrite one statement of a client.

    Args:
        sql: one statement.
        names: the names in the catalog.
        literals: session facts by lower-case spelling (``current_user``, ``pg_backend_pid()``,
            ``current_setting datestyle``), as SQL literals.
        naming: the client's and the engine's names.
    """
    told = may_tell(sql) and TELLING.search(sql) is not None
    if not told and not naming.tells(sql.lower()):
        return Rewritten(SqlStatement.of(sql), naming=naming)
    rewriter = Rewriter(sql, names, literals, naming)
    text = rewriter.run(_RULES)
    return Rewritten(SqlStatement.of(sql if text == sql else text), tuple(rewriter.edits), naming)


def may_tell(sql: str) -> bool:
    """Return True if a statement may need rewriting; on long text 100 times as fast as TELLING."""
    lowered = sql.lower()
    return any(mark in lowered for mark in _MARKS) or _NO_COLUMNS.search(lowered) is not None


def qualify(sql: str, names: CatalogNames) -> str:
    """Qualify the names in the catalog's own DDL."""
    return Rewriter(sql, names, {}).run((_own_information, _catalog_name))

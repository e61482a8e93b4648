"""Casts to types that DuckDB lacks, and literals in PostgreSQL's own spelling: arrays, bytes.

Rules of rewrite.py. ``'t'::regclass`` is the OID of a table, and ``oid::regclass`` shows the
table's name; the cast value and the following cast decide the meaning. PostgreSQL's documentation:
sections 8.19 (OIDs), 8.15 (arrays) and 8.4.1 (bytea in hex).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE, Rewriter
from tierkv.dbfront.postgres_values.parameters import decode_parameter
from tierkv.dbfront.postgres_values.types import FUNCTION_COLUMNS, FUNCTION_OIDS, pg_type
from tierkv.kvcore.errors import SqlError
from tierkv.sql.text.lexer import has_codes

_CODE: Final = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([0-7]{1,3})|([uU])|(.))", re.S
)
_UNICODE: Final = re.compile(r"\\(?:([0-9A-Fa-f]{4})|\+([0-9A-Fa-f]{6})|(\\)|(.?))", re.S)
_CONTROLS: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "b": b"\b", "f": b"\f"}
_TEXT_ARRAY: Final = pg_type("VARCHAR[]")
_HEX: Final = re.compile(r"\\x(?:\s*[0-9a-fA-F]{2})*\s*")
_MEMBERSHIP: Final = {("=", "any"): "IN", ("=", "some"): "IN", ("<>", "all"): "NOT IN",
                      ("!=", "all"): "NOT IN"}  # fmt: skip


def _items(r: Rewriter, i: int) -> list[Any] | None:
    """Return the elements of a literal ``'{a,b}'``; None for any other token."""
    if i >= len(r.tokens) or r.tokens[i].kind != "string":
        return None
    text = r.tokens[i].value
    if not text.lstrip().startswith("{"):
        return None
    items: list[Any] = decode_parameter(text.encode(), _TEXT_ARRAY, 0)
    return items


def coded_text(r: Rewriter, i: int) -> int:
    r"""Rewrite ``E'\u00e9'`` and ``U&'\00e9'`` as plain literals: DuckDB reads neither.

    PostgreSQL's documentation: sections 4.1.2.2 (escapes) and 4.1.2.3 (Unicode escapes).

    Raises:
        SqlError: an invalid escape (22025), or characters that no text can have (22021).
    """
    start = r.tokens[i].start
    if r.tokens[i].kind == "string" and r.at(i)[0] in "eE" and has_codes(r.tokens[i].source):
        text = r.at(i)[2:-1].replace("''", "'")
        return r.replace(i, 1, _literal(_CODE.sub(_byte_marks, text), start))
    if (r.at(i), r.at(i + 1)) != ("u", "&") or r.at(i + 2)[:1] != "'":
        return 0
    if r.tokens[i + 2].start != start + 2:  # With spaces it is an expression.
        return 0

    def character(match: re.Match[str]) -> str:
        four, six, backslash, other = match.groups()
        if four or six:
            return chr(min(int(four or six, 16), 0x10FFFF))
        if backslash:
            return "\\"
        raise _refused("invalid Unicode escape", "22025", start, other)

    return r.replace(i, 3, _literal(_UNICODE.sub(character, r.tokens[i + 2].value), start))


def _byte_marks(match: re.Match[str]) -> str:
    """Return the characters of an escape; a byte of a UTF-8 sequence as a lone surrogate U+DC80."""
    hexes, four, eight, octal, bad, char = match.groups()
    if bad:
        raise _refused("invalid Unicode escape", "22025", -1, bad)
    if four or eight:
        return chr(min(int(four or eight, 16), 0x10FFFF))
    if hexes or octal:
        raw = bytes([int(hexes, 16) if hexes else int(octal, 8) & 0xFF])
        return raw.decode("utf-8", "surrogateescape")
    return _CONTROLS.get(char, char.encode()).decode()


def _literal(text: str, start: int) -> str:
    """Quote a decoded text: bytes become characters, and surrogate pairs one character."""
    if "\0" in text:
        raise _refused('invalid byte sequence for encoding "UTF8": 0x00', "22021", start, "")
    try:
        paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        whole = paired.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise _refused(
            "invalid byte sequence or surrogate in a text constant", "22021", start, ""
        ) from None
    return "'" + whole.replace("'", "''") + "'"


def _refused(message: str, sqlstate: str, start: int, escape: str) -> SqlError:
    hint = "Write \\uXXXX or \\UXXXXXXXX with hexadecimal digits." if escape else ""
    return SqlError(message, sqlstate=sqlstate, position=start + 1, hint=hint)


def list_literal(r: Rewriter, i: int) -> int:
    """Rewrite ``'{a,b}'::text[]``, a list in PostgreSQL's spelling."""
    if r.at(i + 1) != "::":
        return 0
    width = 4 if (r.at(i + 2), r.at(i + 3)) == ("pg_catalog", ".") else 2
    if (r.at(i + 1 + width), r.at(i + 2 + width)) != ("[", "]"):
        return 0
    items = _items(r, i)
    return 0 if items is None else r.replace(i, 1, f"[{_spelled(items)}]")


def member_of_literal(r: Rewriter, i: int) -> int:
    """Rewrite ``= ANY('{a,b}')`` as ``IN ('a', 'b')``: elements get the left side's type."""
    word = _MEMBERSHIP.get((r.at(i), r.at(i + 1)))
    if word is None or r.at(i + 2) != "(" or r.at(i + 4) != ")":
        return 0
    items = _items(r, i + 3)
    if items is None or any(isinstance(item, list) for item in items):
        return 0
    return r.replace(i, 5, f"{word} ({_spelled(items) or 'SELECT NULL WHERE false'})")


def _spelled(items: Sequence[Any]) -> str:
    words = (
        "NULL"
        if item is None
        else f"[{_spelled(item)}]"
        if isinstance(item, list)
        else "'" + str(item).replace("'", "''") + "'"
        for item in items
    )
    return ", ".join(words)


def bytes_literal(r: Rewriter, i: int) -> int:
    r"""Rewrite ``'\x01ff'::bytea``, two bytes, as DuckDB's ``'\x01\xff'``."""
    typed, at = r.at(i) == "bytea", i
    if typed:  # bytea '...'
        at = i + 1
    elif (r.at(i + 1), r.at(i + 2)) != ("::", "bytea") and not (
        (r.at(i + 1), r.at(i + 2), r.at(i + 3)) == ("as", "bytea", ")")
        and (r.at(i - 2), r.at(i - 1)) == ("cast", "(")
    ):
        return 0
    if at >= len(r.tokens) or r.tokens[at].kind != "string":
        return 0
    text = r.tokens[at].value
    if not _HEX.fullmatch(text):
        return 0
    spelled = "".join(f"\\x{byte:02X}" for byte in bytes.fromhex(text[2:]))
    return r.replace(at, 1, f"'{spelled}'") + at - i


_TYPES: Final = {
    "name": "VARCHAR",
    "char": "VARCHAR",
    "bpchar": "VARCHAR",
    "oid": "BIGINT",
    "xid": "BIGINT",
    "oidvector": "UINTEGER[]",
    "int2vector": "SMALLINT[]",
    "jsonb": "JSON",
    "regproc": "VARCHAR",
    "regprocedure": "VARCHAR",
    "regoper": "VARCHAR",
    "regoperator": "VARCHAR",
    "regcollation": "VARCHAR",
    "regconfig": "VARCHAR",
    "regdictionary": "VARCHAR",
    "aclitem": "VARCHAR",
    "regrole": "VARCHAR",
    "regclass": "VARCHAR",
    "regtype": "VARCHAR",
    "regnamespace": "VARCHAR",
}
_TO_OID: Final = {
    "regclass": "to_regclass",
    "regtype": "to_regtype",
    "regproc": "to_regproc",
    "regprocedure": "to_regproc",
    "regnamespace": "to_regnamespace",
    "regrole": "to_regrole",
}
_TO_NAME: Final = {
    "regclass": "own_regclass_name({})",
    "regtype": "own_regtype_name({})",
    "regproc": "own_regproc_name({})",
    "regprocedure": "own_regproc_name({})",
    "regnamespace": "own_regnamespace_name({})",
    "regrole": "own_regrole_name({})",
}
_PROCEDURES: Final = frozenset({"regproc", "regprocedure"})
_COMPARES: Final = frozenset({"=", "<>", "!="})
_TEXTS: Final = frozenset({"text", "varchar", "name"})
_OIDS: Final = frozenset({"oid", "int", "int4", "int8", "bigint", "integer"})
_BEFORE_PARENTHESIS: Final = frozenset(
    {"select", "distinct", "in", "and", "or", "not", "where", "on", "by", "any", "all", "some"}
    | {"exists", "values", "case", "when", "then", "else", "from", "as", "having", "like", "union"}
    | {"returning", "set", "between", "is", "join", "limit", "offset", "except", "intersect"}
)
"""Words that stand before a parenthesis without being a called function."""


def _cast_width(r: Rewriter, i: int) -> tuple[int, str]:
    """Return the number of tokens of ``:: [pg_catalog .] type`` at ``i``, and the type's name."""
    if r.at(i) != "::":
        return 0, ""
    width = 4 if (r.at(i + 1), r.at(i + 2)) == ("pg_catalog", ".") else 2
    return width, r.at(i + width - 1).strip('"')


def _object_cast(r: Rewriter, value: str, name: str, after: int) -> str:
    """Cast ``value`` to an object type: an OID if a cast to a number follows, else a name."""
    width, next_type = _cast_width(r, after)
    if width and next_type in _OIDS:
        return f"{DATABASE}.main.{_TO_OID[name]}(CAST({value} AS VARCHAR))"
    return f"{DATABASE}.main.{_TO_NAME[name].format(value)}"


def function_column(r: Rewriter, i: int) -> int:
    """Rewrite ``t.typreceive::text`` as a name, ``typinput = 'array_in'`` with an OID."""
    if not r.of_catalog or r.tokens[i].kind not in ("word", "ident") or r.at(i - 1) == ".":
        return 0
    last = i
    while r.at(last + 1) == "." and last + 2 < len(r.tokens):
        last += 2
    if r.tokens[last].name not in FUNCTION_COLUMNS:
        return 0
    width, name = _cast_width(r, last + 1)
    if name in _TEXTS:
        column = r.sql[r.tokens[i].start : r.tokens[last].end]
        shown = f"{DATABASE}.main.own_type_function({column})"
        return r.replace(i, last + 1 + width - i, shown)
    if r.at(last + 1) not in _COMPARES or last + 2 >= len(r.tokens):
        return 0
    oid = FUNCTION_OIDS.get(r.tokens[last + 2].value.removeprefix("pg_catalog."))
    if r.tokens[last + 2].kind != "string" or oid is None or r.at(last + 3) == "::":
        return 0
    r.replace(last + 2, 1, str(oid))
    return last + 3 - i


def cast_of_value(r: Rewriter, i: int) -> int:
    """Rewrite ``'t'::regclass``, ``$1::regclass``, ``c.oid::regclass``, ``x.c.oid::regclass``."""
    length = 1
    while r.at(i + length) == "." and r.tokens[i].kind in ("word", "ident"):
        length += 2
    width, name = _cast_width(r, i + length)
    if not width or name not in _TO_NAME or r.at(i - 1) == ".":
        return 0
    kind = r.tokens[i].kind
    value = r.sql[r.tokens[i].start : r.tokens[min(i + length, len(r.tokens)) - 1].end]
    if kind in ("string", "param"):
        # The next cast, for example ::oid, then applies to the number.
        cast = value if kind == "string" else f"CAST({value} AS VARCHAR)"
        known = r.tokens[i].value.removeprefix("pg_catalog.")
        if name == "regtype" and r.at(i - 1) in _COMPARES and r.at(i - 2) == "regtype":
            return r.replace(i, length + width, f"{DATABASE}.main.own_regtype_name({cast})")
        if name in _PROCEDURES and _cast_width(r, i + length + width)[1] in _TEXTS:
            return r.replace(i, length + width, f"replace({cast}, 'pg_catalog.', '')")
        if name in _PROCEDURES and known in FUNCTION_OIDS:
            return r.replace(i, length + width, f"{FUNCTION_OIDS[known]}::UINTEGER")
        return r.replace(i, length + width, f"{DATABASE}.main.{_TO_OID[name]}({cast})")
    if kind in ("word", "ident") and name == "regtype" and r.at(i + length + width) == "[":
        return r.replace(i, length + width + 2, f"{DATABASE}.main.own_regtype_names({value})")
    if kind in ("word", "ident"):
        return r.replace(i, length + width, _object_cast(r, value, name, i + length + width))
    return 0


def cast_of_call(r: Rewriter, i: int) -> int:
    """Rewrite ``CAST(x AS regclass)``, ``(a || b)::regclass`` and ``f(x)::regclass``."""
    if r.at(i) == "cast" and r.at(i + 1) == "(":
        end = r.closing(i + 1)
        name = r.at(end - 1).strip('"')
        start = end - 4 if (r.at(end - 3), r.at(end - 2)) == ("pg_catalog", ".") else end - 2
        if end >= len(r.tokens) or name not in _TO_NAME or r.at(start) != "as":
            return 0
        return _recast(r, i, i + 2, start, end + 1, name)
    named = r.tokens[i].kind in ("word", "ident") and r.at(i) not in _BEFORE_PARENTHESIS
    opens = i + 1 if r.at(i + 1) == "(" and named else i
    if r.at(opens) != "(":
        return 0
    end = r.closing(opens)
    width, name = _cast_width(r, end + 1)
    if not width or name not in _TO_NAME:
        return 0
    return _recast(r, i, i, end + 1, end + 1 + width, name)


def _recast(r: Rewriter, first: int, start: int, stop: int, after: int, name: str) -> int:
    """Replace [first, after) by the rewritten tokens [start, stop), cast to an object type.

    The result is an OID, as comparison with a number needs, or a name before a cast to another
    type.
    """
    inner = r.nested(r.sql[r.tokens[start].start : r.tokens[stop - 1].end])
    width, next_type = _cast_width(r, after)
    if width and next_type not in _OIDS:
        return r.replace(first, after - first, f"{DATABASE}.main.{_TO_NAME[name].format(inner)}")
    call = f"{DATABASE}.main.{_TO_OID[name]}(CAST({inner} AS VARCHAR))"
    return r.replace(first, after - first, call)


def cast_type(r: Rewriter, i: int) -> int:
    """Rewrite ``::name``, ``::pg_catalog.text``, ``CAST(x AS oid)``."""
    width, name = _cast_width(r, i)
    if not width and r.at(i) == "as":
        width = 4 if (r.at(i + 1), r.at(i + 2)) == ("pg_catalog", ".") else 2
        name = r.at(i + width - 1).strip('"')
        closes = i + width + (2 if r.at(i + width) == "[" else 0)
        if r.at(closes) != ")" or r.at(r.opening(closes) - 1) not in ("cast", "try_cast"):
            return 0  # Any other AS names a column.
    if not width or (width == 2 and name not in _TYPES):
        return 0
    return r.replace(i, width, f"{r.at(i)} {_TYPES.get(name, name)}")

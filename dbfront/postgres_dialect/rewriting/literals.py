"""Rules of rewrite.py for literals that PostgreSQL spells in ways of its own: arrays and bytes.

PostgreSQL's documentation, sections 8.15 (arrays) and 8.4.1 (bytea in hex).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from tierkv.dbfront.postgres_dialect.rewriting.rewriter import Rewriter
from tierkv.dbfront.postgres_values.parameters import decode_parameter
from tierkv.dbfront.postgres_values.types import pg_type

_TEXT_ARRAY: Final = pg_type("VARCHAR[]")
_HEX: Final = re.compile(r"\\x(?:\s*[0-9a-fA-F]{2})*\s*")
_MEMBERSHIP: Final = {("=", "any"): "IN", ("=", "some"): "IN", ("<>", "all"): "NOT IN",
                      ("!=", "all"): "NOT IN"}  # fmt: skip


def _items(r: Rewriter, i: int) -> list[Any] | None:
    """The elements of a literal ``'{a,b}'``; None if it is none."""
    if i >= len(r.tokens) or r.tokens[i].kind != "string":
        return None
    text = r.tokens[i].value
    if not text.lstrip().startswith("{"):
        return None
    items: list[Any] = decode_parameter(text.encode(), _TEXT_ARRAY, 0)
    return items


def list_literal(r: Rewriter, i: int) -> int:
    """``'{a,b}'::text[]`` is a list in PostgreSQL's spelling."""
    if r.at(i + 1) != "::":
        return 0
    width = 4 if (r.at(i + 2), r.at(i + 3)) == ("pg_catalog", ".") else 2
    if (r.at(i + 1 + width), r.at(i + 2 + width)) != ("[", "]"):
        return 0
    items = _items(r, i)
    return 0 if items is None else r.replace(i, 1, f"[{_spelled(items)}]")


def member_of_literal(r: Rewriter, i: int) -> int:
    """``= ANY('{a,b}')``: elements have the type of the other side, as in ``IN ('a', 'b')``."""
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
    r"""``'\x01ff'::bytea`` is two bytes, which DuckDB spells ``'\x01\xff'``."""
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

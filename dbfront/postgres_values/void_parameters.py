"""Parameters of type void, which PostgreSQL drops from a call's arguments, and so must we.

pgJDBC sends ``{ ? = call f(?) }`` as ``select * from f($1,$2) as result`` with a void NULL as $1:
the place of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tierkv.kvcore.errors import UserError
from tierkv.sql.text.lexer import Token, TokenKind, tokenize

_VOID: Final = 2278


def declared_types(types: bytes) -> tuple[int, ...]:
    """Read the OIDs at the end of a Parse: a count, and as many."""
    count = int.from_bytes(types[:2], "big")
    return tuple(int.from_bytes(types[2 + 4 * at : 6 + 4 * at], "big") for at in range(count))


def without_void(text: str, oids: Sequence[int]) -> str:
    """Blank the void arguments of calls, so that everything else keeps its place.

    Args:
        text: of a Parse.
        oids: of its parameters' types, as that Parse gives them.
    """
    void = {f"${number}" for number, oid in enumerate(oids, 1) if oid == _VOID}
    if not void:
        return text
    try:
        tokens = tokenize(text)
    except UserError:
        return text
    blanked = list(text)
    for index in range(1, len(tokens) - 1):
        if tokens[index].kind is TokenKind.PARAMETER and tokens[index].text in void:
            for gone in _argument(tokens, index):
                blanked[gone.start : gone.end] = " " * (gone.end - gone.start)
    return "".join(blanked)


def _argument(tokens: list[Token], index: int) -> list[Token]:
    """Return a parameter that is a whole argument, with one comma beside it."""
    before, after = tokens[index - 1], tokens[index + 1]
    if before.text not in ("(", ",") or after.text not in (",", ")"):
        return []
    if after.text == ",":
        return [tokens[index], after]
    return [before, tokens[index]] if before.text == "," else [tokens[index]]

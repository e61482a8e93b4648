"""One pass over the tokens of a statement: what the rules of rewrite.py and casts.py share.

``Rewriter`` knows the tokens, where parentheses close, and what the catalog has; a rule looks at
the token it is given and replaces some or leaves it. It never looks into strings or comments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tierkv.dbfront.postgres_dialect.rewriting.naming import Naming
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens

DATABASE: Final = "tierkv_pg"
INFORMATION_SCHEMA: Final = "information_schema"
_OWN: Final = "own_"
_AS_IS: Final = Naming()


@dataclass(frozen=True, slots=True)
class CatalogNames:
    """What the catalog has; names that begin with ``own_`` are not for clients.

    Attributes:
        views: of the database ``DATABASE``.
        functions: likewise.
        information: views of information_schema.
        empty: queries that stand for catalogs without rows, by name.
    """

    views: frozenset[str]
    functions: frozenset[str]
    information: frozenset[str] = frozenset()
    empty: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether a catalog of that name exists, with rows or without."""
        return name in self.views or name in self.empty

    def for_clients(self) -> CatalogNames:
        """Without what only our own DDL may name."""
        return CatalogNames(
            views=frozenset(name for name in self.views if not name.startswith(_OWN)),
            functions=frozenset(name for name in self.functions if not name.startswith(_OWN)),
            information=self.information,
            empty=self.empty,
        )


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters [start, end) of the source became ``size`` others."""

    start: int
    end: int
    size: int


def source_position(edits: Sequence[Edit], position: int) -> int:
    """Where a position in the rewritten text is in the source; both count from 1."""
    shift = 0
    for edit in edits:
        if position - 1 < edit.start + shift:
            break
        if position - 1 < edit.start + shift + edit.size:
            return edit.start + 1
        shift += edit.size - (edit.end - edit.start)
    return position - shift


class Rewriter:
    """One pass over the tokens; each rule answers how many tokens it used up, or 0.

    Attributes:
        sql: the text.
        tokens: of the text.
        names: what the catalog has.
        literals: session facts, by spelling.
        naming: what client and engine call the same things.
        relations: qualified names of the tables in the text; naming.py finds them once.
        edits: what was replaced, in order.
        of_catalog: whether the text names anything of the catalog.
        rules: set by ``run``.
    """

    def __init__(
        self,
        sql: str,
        names: CatalogNames,
        literals: Mapping[str, str],
        naming: Naming = _AS_IS,
    ) -> None:
        self.sql = sql
        self.naming = naming
        self.relations: frozenset[tuple[str, ...]] | None = None
        self.tokens: Sequence[SqlToken] = list(tokens(sql))
        self.names = names
        self.literals = literals
        self.out: list[str] = []
        self.copied = 0
        self.edits: list[Edit] = []
        self.rules: Sequence[Rule] = ()
        self._bare = -1
        self.of_catalog = any(
            token.kind in ("word", "ident")
            and (token.name in ("pg_catalog", INFORMATION_SCHEMA) or names.has(token.name))
            for token in self.tokens
        )

    def at(self, index: int) -> str:
        """The token's folded text, or an empty string beyond the ends."""
        if not 0 <= index < len(self.tokens):
            return ""
        token = self.tokens[index]
        return token.text.lower() if token.kind == "word" else token.text

    def replace(self, first: int, count: int, text: str) -> int:
        """Put ``text`` in place of tokens [first, first + count)."""
        start, end = self.tokens[first].start, self.tokens[first + count - 1].end
        self.edits.append(Edit(start, end, len(text)))
        self.out += [self.sql[self.copied : start], text]
        self.copied = end
        return count

    def drop(self, first: int, count: int) -> int:
        """Leave out tokens [first, first + count) with the space behind them."""
        start, end = self.tokens[first].start, self.tokens[first + count].start
        self.edits.append(Edit(start, end, 0))
        self.out.append(self.sql[self.copied : start])
        self.copied = end
        self._bare = first + count
        return count

    def is_bare(self, index: int) -> bool:
        """Whether nothing stands before a name, or nothing any more."""
        return self.at(index - 1) != "." or index == self._bare

    def closing(self, index: int) -> int:
        """Index of the partner of the parenthesis at ``index``; the end if there is none."""
        depth = 0
        for at in range(index, len(self.tokens)):
            depth += {"(": 1, ")": -1}.get(self.at(at), 0)
            if depth == 0:
                return at
        return len(self.tokens)

    def opening(self, index: int) -> int:
        """Index of the partner of the closing parenthesis at ``index``; -1 if there is none."""
        depth = 0
        for at in range(index, -1, -1):
            depth += {")": 1, "(": -1}.get(self.at(at), 0)
            if depth == 0:
                return at
        return -1

    def in_from(self, index: int) -> bool:
        """Whether the token stands in a FROM clause."""
        depth = 0
        for at in range(index - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(self.at(at), 0)
            if depth < 0:
                return False
            if depth == 0 and self.at(at) in ("select", "where", "from", "on", "by"):
                return self.at(at) == "from"
        return False

    def nested(self, sql: str) -> str:
        """Rewrite a part of the text by the same rules."""
        part = Rewriter(sql, self.names, self.literals, self.naming)
        part.relations = self.relations
        part.of_catalog = self.of_catalog
        return part.run(self.rules)

    def run(self, rules: Sequence[Rule]) -> str:
        """Rewrite all of the text."""
        self.rules = rules
        index = 0
        while index < len(self.tokens):
            used = next((n for rule in rules if (n := rule(self, index))), 1)
            index += used
        return "".join(self.out) + self.sql[self.copied :]


Rule = Callable[[Rewriter, int], int]

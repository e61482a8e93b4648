"""One pass over the tokens of a statement, for the rules of rewrite.py, casts.py and others.

``Rewriter`` knows the tokens, the partners of parentheses, and the names in the catalog. A rule
looks at the given token and replaces some tokens or none. Rules never look into strings or
comments.

``Naming`` has the names of the database and its default schema. The engine names its database after
the file and calls the default schema ``main``. A client knows the database by the name in its
connection parameters, and the schema as ``public``; ``main`` works too. object_names.py rewrites
clients' statements, ``shown`` the engine's texts. A database with its own schema ``public`` keeps
its schema names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens
from tierkv.kvcore.errors import UserError

PUBLIC: Final = "public"
ENGINE_SCHEMA: Final = "main"


@dataclass(frozen=True, slots=True)
class Naming:
    """The client's and the engine's names of the database and the default schema.

    Attributes:
        database: the name in the client's connection parameters.
        engine: the engine's name of the database.
        public: the default schema is known as ``public``.
    """

    database: str = ""
    engine: str = ""
    public: bool = False

    def tells(self, lowered: str) -> bool:
        """Return True if a statement, in lower case, may contain a name to rewrite."""
        if self.public and PUBLIC in lowered:
            return True
        name = self.database.lower()
        if name == self.engine.lower() or name not in lowered:
            return False
        return re.search(rf'{re.escape(name)}"?\s*\.', lowered) is not None

    def is_database(self, token: SqlToken) -> bool:
        """Return True if a token is the client's name of the database."""
        return token.name.lower() == self.database.lower()

    def is_public(self, token: SqlToken) -> bool:
        """Return True if a token is the client's name of the default schema."""
        return self.public and token.name.lower() == PUBLIC

    def shown(self, text: str) -> str:
        """Return a text of the engine, for example a plan or an error, with the client's names."""
        if self.public:
            text = re.sub(r'((?:Schema with name|entry) )"main"', rf'\1"{PUBLIC}"', text)
        if not self.engine or self.engine not in text:
            return text
        schema = PUBLIC if self.public else ENGINE_SCHEMA
        name = re.escape(self.engine)
        text = re.sub(rf'(?<![\w."])"?{name}"?\.("?)main\b', rf"\1{schema}", text)
        text = re.sub(rf'""{name}""|(?<=database )"{name}"', f'"{self.database}"', text)
        return re.sub(rf'(?<![\w."])"?{name}"?\.(?="?\w+"?\.)', "", text)

    def speak(self, error: UserError) -> None:
        """Replace the engine's names in an error by the client's names."""
        error.message, error.hint = self.shown(error.message), self.shown(error.hint)

    def shown_plan(self, text: str) -> str:
        """Return a drawn plan with the client's names and an unmoved right edge."""
        if self.engine not in text:
            return text
        lines = ((line, self.shown(line)) for line in text.split("\n"))
        return "\n".join(_padded(new, len(old)) for old, new in lines)


def _padded(line: str, width: int) -> str:
    short = width - len(line)
    return line if short <= 0 or not line.endswith("│") else f"{line[:-1]}{' ' * short}│"


DATABASE: Final = "tierkv_pg"
INFORMATION_SCHEMA: Final = "information_schema"
_OWN: Final = "own_"
_AS_IS: Final = Naming()


@dataclass(frozen=True, slots=True)
class CatalogNames:
    """The names in the catalog; names with the prefix ``own_`` are not for clients.

    Attributes:
        views: views of the database ``DATABASE``.
        functions: macros of the same database.
        information: views of information_schema.
        empty: queries that replace catalogs without rows, by name.
    """

    views: frozenset[str]
    functions: frozenset[str]
    information: frozenset[str] = frozenset()
    empty: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return True if a catalog of this name exists, with rows or without."""
        return name in self.views or name in self.empty

    def for_clients(self) -> CatalogNames:
        """Return the names without the names for the catalog's own DDL."""
        return CatalogNames(
            views=frozenset(name for name in self.views if not name.startswith(_OWN)),
            functions=frozenset(name for name in self.functions if not name.startswith(_OWN)),
            information=self.information,
            empty=self.empty,
        )


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters [start, end) of the source became ``size`` other characters."""

    start: int
    end: int
    size: int


def source_position(edits: Sequence[Edit], position: int) -> int:
    """Map a position in the rewritten text to the source; both count from 1."""
    shift = 0
    for edit in edits:
        if position - 1 < edit.start + shift:
            break
        if position - 1 < edit.start + shift + edit.size:
            return edit.start + 1
        shift += edit.size - (edit.end - edit.start)
    return position - shift


class Rewriter:
    """One pass over the tokens; each rule returns the number of consumed tokens, or 0.

    Attributes:
        sql: the text.
        tokens: tokens of the text.
        names: the names in the catalog.
        literals: session facts, by spelling.
        naming: the client's and the engine's names.
        relations: qualified names of the tables in the text; object_names.py finds the names once.
        edits: the replacements, in order.
        of_catalog: True if the text contains a name of the catalog.
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
        """Return the token's folded text, or an empty string beyond the ends."""
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
        """Omit tokens [first, first + count) with the following space."""
        start, end = self.tokens[first].start, self.tokens[first + count].start
        self.edits.append(Edit(start, end, 0))
        self.out.append(self.sql[self.copied : start])
        self.copied = end
        self._bare = first + count
        return count

    def is_bare(self, index: int) -> bool:
        """Return True if a name has no qualifier, or lost its qualifier."""
        return self.at(index - 1) != "." or index == self._bare

    def closing(self, index: int) -> int:
        """Return the index of the parenthesis that closes ``index``; the end if there is none."""
        depth = 0
        for at in range(index, len(self.tokens)):
            depth += {"(": 1, ")": -1}.get(self.at(at), 0)
            if depth == 0:
                return at
        return len(self.tokens)

    def opening(self, index: int) -> int:
        """Return the index of the parenthesis that ``index`` closes; -1 if there is none."""
        depth = 0
        for at in range(index, -1, -1):
            depth += {")": 1, "(": -1}.get(self.at(at), 0)
            if depth == 0:
                return at
        return -1

    def in_from(self, index: int) -> bool:
        """Return True if the token is in a FROM clause."""
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
        """Rewrite the whole text."""
        self.rules = rules
        index = 0
        while index < len(self.tokens):
            used = next((n for rule in rules if (n := rule(self, index))), 1)
            index += used
        return "".join(self.out) + self.sql[self.copied :]


Rule = Callable[[Rewriter, int], int]

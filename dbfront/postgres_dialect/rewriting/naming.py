"""Common names for the database and its default schema, in clients' statements and in replies.

The engine names its database after the file and calls the default schema ``main``. A client knows
the database by the name in its connection parameters, and the schema as ``public``; ``main`` works
too. ``Naming`` knows both: object_names.py rewrites clients' statements, ``shown`` the engine's
texts. A database with its own schema ``public`` keeps its schema names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.postgres_values.sql_tokens import SqlToken
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

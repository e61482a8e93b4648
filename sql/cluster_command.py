"""Statements about the cluster: the front answers them, whatever engine is behind.

    CREATE KV NAMESPACE [IF NOT EXISTS] name [WITH (option = value, ...)]
    ALTER KV NAMESPACE name {SET | WITH} (option = value, ...)
    ALTER KV NAMESPACE name SET option [=] value
    DROP KV NAMESPACE [IF EXISTS] name
    ALTER {ROLE | USER | TENANT | KV NAMESPACE | AI KEY} name SET AI LIMIT (option = value, ...)
    ALTER {ROLE | USER | TENANT | KV NAMESPACE | AI KEY} name RESET AI LIMIT
    GRANT right TO role, ...
    REVOKE right FROM role, ...
    CREATE ROLE name, and DROP ROLE [IF EXISTS] name, unless PostgreSQL keeps roles
    DROP OWNED BY role, ... [CASCADE], and REASSIGN OWNED BY role, ... TO role, likewise

A right is one of these; the names of roles only unless PostgreSQL keeps roles:

    EXECUTE ON {FUNCTION ai_function, ... | ALL AI FUNCTIONS}
    USAGE ON {MODEL name, ... | ALL MODELS}
    role, ...

Pure: this module reads the statement; dbfront/statement/namespace_change.py, limit_change.py and
rights_change.py know the meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tierkv.kvcore.call_limits import SubjectKind
from tierkv.kvcore.errors import SqlError
from tierkv.sql.command_reader import CommandOption, CommandReader
from tierkv.sql.schema_rights import PRIVILEGES, SHARED_SCHEMAS
from tierkv.sql.text.lexer import Token, TokenKind, string_value

_NAMESPACE: Final = ("KV", "NAMESPACE")
_VERBS: Final = ("CREATE", "ALTER", "DROP", "REASSIGN")
_GRANTS: Final = ("GRANT", "REVOKE")
_ON_AI: Final = {
    ("EXECUTE", "ON", "FUNCTION"): "FUNCTION",
    ("EXECUTE", "ON", "ALL", "AI", "FUNCTIONS"): "FUNCTION",
    ("USAGE", "ON", "MODEL"): "MODEL",
    ("USAGE", "ON", "ALL", "MODELS"): "MODEL",
}
_LIMIT: Final = ("AI", "LIMIT")
_AI_PREFIX: Final = "ai_"
_LIMITED: Final = {
    ("ROLE",): SubjectKind.TENANT,
    ("USER",): SubjectKind.TENANT,
    ("TENANT",): SubjectKind.TENANT,
    _NAMESPACE: SubjectKind.NAMESPACE,
    ("AI", "KEY"): SubjectKind.KEY,
}
_NO_ROLES: Final = frozenset({"CURRENT_USER", "CURRENT_ROLE", "SESSION_USER"})
OWNED_VERBS: Final = ("DROP OWNED", "REASSIGN OWNED")
"""What can be done with all that a role owns."""
_HEAD_CHARS: Final = 1_000
_SETS_PASSWORD: Final = re.compile(r"(?is)\b(?:create|alter)\b.{1,200}\bpassword\b")
_PASSWORD: Final = re.compile(r"(?is)(\bpassword\s+)[eu]?&?(?:'[^']*'?|\$(\w*)\$.*?(?:\$\2\$|\Z))+")


class RightKind(StrEnum):
    """What a right is about."""

    FUNCTION = "function"
    MODEL = "model"
    ROLE = "role"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class GrantedRight:
    """The right that a GRANT gives or a REVOKE takes.

    Attributes:
        kind: what the right is about.
        names: functions, models or roles, in lower case unless quoted; empty: all. Of tables
            ``schema.table`` or ``schema.*``.
        roles: whose rights change.
        position: of the first name, counted in characters from 1.
        privileges: on tables, some of schema_rights.PRIVILEGES.
    """

    kind: RightKind
    names: tuple[str, ...]
    roles: tuple[str, ...]
    position: int = 0
    privileges: frozenset[str] = frozenset()

    def __str__(self) -> str:
        listed = ", ".join(self.names) or "all"
        given = "".join(f"{each}, " for each in PRIVILEGES if each in self.privileges)
        return f"{given[:-2]} on {listed}" if given else f"{self.kind} {listed}"


@dataclass(frozen=True, slots=True)
class ClusterCommand:
    """A statement about a namespace, about the limits of a subject, or about rights.

    Attributes:
        verb: ``CREATE``, ``ALTER`` or ``DROP``; of limits ``ALTER`` or, for RESET, ``DROP``; of
            rights ``GRANT`` or ``REVOKE``, of roles ``CREATE`` or ``DROP``; of what roles own
        ``DROP OWNED`` or ``REASSIGN OWNED``, and ``right`` names the new owner.
        name: the namespace, the subject of the limits, or the roles whose rights change.
        options: in their order.
        tolerant: IF EXISTS, or IF NOT EXISTS.
        limited: what kind of subject the limits have; None: the statement is not about limits.
        right: what is granted or revoked; None: the statement is not about rights.
        password: of the user that is made or changed, clear or as a SCRAM verifier; empty takes the
            login away. None: the statement is not about a login.
    """

    verb: str
    name: str
    options: tuple[CommandOption, ...] = ()
    tolerant: bool = False
    limited: SubjectKind | None = None
    right: GrantedRight | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def tag(self) -> str:
        """The command tag."""
        if self.right is not None and self.verb in OWNED_VERBS:
            return self.verb
        if self.right is not None:
            return f"{self.verb} ROLE" if self.right.kind is RightKind.ROLE else self.verb
        return f"{self.verb} KV NAMESPACE" if self.limited is None else "ALTER AI LIMIT"


def cluster_command(tokens: Sequence[Token], *, keeps_roles: bool = True) -> ClusterCommand | None:
    """Read a statement about the cluster; None for any other statement.

    Args:
        tokens: of one statement.
        keeps_roles: False: the database keeps roles, and reads GRANT role TO role itself.

    Raises:
        SqlSyntaxError: the statement is malformed.
    """
    if not tokens:
        return None
    if tokens[0].upper in _GRANTS:
        return _rights_command(tokens, keeps_roles)
    if tokens[0].upper not in _VERBS:
        return None
    words = tuple(token.upper for token in tokens[1:7])
    if tokens[0].upper == "ALTER":
        for subject, kind in _LIMITED.items():
            after = words[len(subject) + 1 : len(subject) + 4]
            if words[: len(subject)] != subject or after[1:] != _LIMIT:
                continue
            if after[0] in ("SET", "RESET"):
                return _Reader(tokens, 1 + len(subject)).limit(kind)
    if keeps_roles and words[:2] == ("OWNED", "BY"):
        return _Reader(tokens, 3).owned()
    of_role = keeps_roles and words[:1] in (("ROLE",), ("USER",))
    if of_role and (tokens[0].upper != "ALTER" or "PASSWORD" in words[2:]):
        return _Reader(tokens, 2).role(user=words[:1] == ("USER",))
    if words[:2] != _NAMESPACE:
        return None
    return _Reader(tokens, 3).command()


def without_password(sql: str) -> str:
    """Return a statement for logs and views: the password of a user is left out."""
    return _PASSWORD.sub(r"\1'***'", sql) if _SETS_PASSWORD.search(sql, 0, _HEAD_CHARS) else sql


def _rights_command(tokens: Sequence[Token], keeps_roles: bool) -> ClusterCommand | None:
    words = tuple(token.upper for token in tokens[1:6])
    for phrase, kind in _ON_AI.items():
        if words[: len(phrase)] != phrase:
            continue
        named = phrase[2] != "ALL"
        first = tokens[len(phrase) + 1 :][:1]
        if named and kind == "FUNCTION" and not (first and _is_ai(first[0])):
            return None  # A function of the database.
        return _Reader(tokens, 1 + len(phrase)).right(RightKind[kind], named=named)
    if not keeps_roles:
        return None
    on = next((at for at, token in enumerate(tokens[:40]) if token.upper == "ON"), 0)
    if not on:
        return _Reader(tokens, 1).right(RightKind.ROLE, named=True)
    return _Reader(tokens, 1).table_right()


def _is_ai(token: Token) -> bool:
    return token.text.strip('"').lower().startswith(_AI_PREFIX)


def in_transaction(command: ClusterCommand) -> SqlError:
    """Return the error of a statement inside a transaction, which could not be rolled back."""
    return SqlError(
        f"{command.tag} cannot run inside a transaction block",
        sqlstate="25001",
        hint="What it changes belongs to the cluster, not to the database: COMMIT first.",
    )


class _Reader(CommandReader):
    """Reads a statement about the cluster."""

    def command(self) -> ClusterCommand:
        verb = self.tokens[0].upper
        tolerant = self.if_exists(verb)
        name = self.name("a namespace's name")
        options: tuple[CommandOption, ...] = ()
        if verb == "ALTER" and self.word("SET"):
            options = self.options() if self.sees("(") else (self.option(),)
        elif verb != "DROP" and self.word("WITH"):
            options = self.options()
        if verb == "ALTER" and not options:
            raise self.wrong("expected SET (option = value, ...)")
        self.end()
        return ClusterCommand(verb, name, options, tolerant)

    def limit(self, kind: SubjectKind) -> ClusterCommand:
        name = self.name(f"the name of a {kind}")
        sets = self.word("SET")
        self.at += 2 if sets else 3
        options = self.options() if sets else ()
        self.end()
        return ClusterCommand("ALTER" if sets else "DROP", name, options, limited=kind)

    def right(self, kind: RightKind, *, named: bool) -> ClusterCommand:
        verb = self.tokens[0].upper
        position = self.tokens[self.at].start + 1 if self.at < len(self.tokens) else 0
        names = self._names(f"the name of a {kind}") if named else ()
        word = "TO" if verb == "GRANT" else "FROM"
        if not self.word(word):
            raise self.wrong(f"expected {word}")
        roles = self._names("the name of a role")
        self.end()
        right = GrantedRight(kind, names, roles, position)
        return ClusterCommand(verb, ", ".join(roles), right=right)

    def table_right(self) -> ClusterCommand:
        """Read GRANT privilege ON [TABLE] schema.table or ON ALL TABLES IN SCHEMA schema."""
        verb = self.tokens[0].upper
        privileges: set[str] = set()
        while True:
            if self.word("ALL"):
                self.word("PRIVILEGES")
                privileges.update(PRIVILEGES)
            else:
                token = self.next("a privilege")
                if token.upper not in PRIVILEGES:
                    self.at -= 1
                    raise self.wrong(f"expected ALL or one of {', '.join(PRIVILEGES)}")
                privileges.add(token.upper)
            if not self.sign(","):
                break
        if not self.word("ON"):
            raise self.wrong("expected ON")
        whole = self.word("ALL")
        for word in ("TABLES", "IN", "SCHEMA") if whole else ():
            if not self.word(word):
                raise self.wrong("expected ALL TABLES IN SCHEMA")
        if not whole:
            self.word("TABLE")
        position = self.tokens[min(self.at, len(self.tokens) - 1)].start + 1
        names = [self._table(whole=whole)]
        while self.sign(","):
            names.append(self._table(whole=whole))
        if not self.word("TO" if verb == "GRANT" else "FROM"):
            raise self.wrong(f"expected {'TO' if verb == 'GRANT' else 'FROM'}")
        roles = self._names("the name of a role")
        self.end()
        right = GrantedRight(RightKind.TABLE, tuple(names), roles, position, frozenset(privileges))
        return ClusterCommand(verb, ", ".join(roles), right=right)

    def _table(self, *, whole: bool) -> str:
        schema = self.name("the name of a schema").lower()
        dotted = not whole and self.sees(".")
        if schema in SHARED_SCHEMAS or not (whole or dotted):
            raise SqlError(
                f"{schema} is not a schema of a user",
                sqlstate="0A000",
                position=self.tokens[self.at - 1].start + 1,
                hint="Write schema.table. Tables of schema main are everybody's and need no GRANT.",
            )
        self.sign(".")
        if whole:
            return f"{schema}.*"
        return f"{schema}.{self.name('the name of a table').lower()}"

    def role(self, *, user: bool) -> ClusterCommand:
        verb = self.tokens[0].upper
        tolerant = self.if_exists(verb)
        name = self.name("the name of a role")
        position = self.tokens[self.at - 1].start + 1
        password = None if verb == "DROP" else self._password()
        self.end()
        if user and verb == "CREATE" and not password:
            raise SqlError(
                "a user needs a password",
                sqlstate="22023",
                position=position,
                hint=f"Write CREATE USER {name} PASSWORD '...'; CREATE ROLE makes a role without "
                "login.",
            )
        right = GrantedRight(RightKind.ROLE, (), (name,), position)
        return ClusterCommand(verb, name, tolerant=tolerant, right=right, password=password)

    def owned(self) -> ClusterCommand:
        """Read the rest of DROP OWNED BY or REASSIGN OWNED BY."""
        verb = f"{self.tokens[0].upper} OWNED"
        position = self.tokens[min(self.at, len(self.tokens) - 1)].start + 1
        roles = self._names("the name of a role")
        receivers: tuple[str, ...] = ()
        if verb == "REASSIGN OWNED":
            if not self.word("TO"):
                raise self.wrong("expected TO")
            receivers = (self.name("the name of a role"),)
        elif not self.word("CASCADE"):
            self.word("RESTRICT")
        self.end()
        right = GrantedRight(RightKind.ROLE, receivers, roles, position)
        return ClusterCommand(verb, ", ".join(roles), right=right)

    def _password(self) -> str | None:
        """Read [WITH] [LOGIN] [ENCRYPTED] PASSWORD; None without it, empty for PASSWORD NULL."""
        self.word("WITH")
        logs_in = self.word("LOGIN") | self.word("ENCRYPTED")
        if not self.word("PASSWORD"):
            if logs_in:
                raise self.wrong("expected PASSWORD")
            return None
        if self.word("NULL"):
            return ""
        token = self.next("a password in quotes")
        if token.kind is not TokenKind.STRING:
            self.at -= 1
            raise self.wrong("expected a password in quotes")
        if not string_value(token):
            raise SqlError(
                "an empty password lets nobody in",
                sqlstate="22023",
                position=token.start + 1,
                hint="PASSWORD NULL takes a login away.",
            )
        return string_value(token)

    def _names(self, what: str) -> tuple[str, ...]:
        found = [self._one_name(what)]
        while self.sign(","):
            found.append(self._one_name(what))
        return tuple(found)

    def _one_name(self, what: str) -> str:
        """Read a name, and skip the argument types of a function.

        The embedded database's dialect puts a role's name for CURRENT_USER; in front of PostgreSQL
        only the server knows the role after SET ROLE.
        """
        if self.at < len(self.tokens) and self.tokens[self.at].upper in _NO_ROLES:
            raise SqlError(
                f"{self.tokens[self.at].upper} can't be named in a GRANT that TierKV keeps",
                sqlstate="0A000",
                position=self.tokens[self.at].start + 1,
                hint="Write the role's name; SELECT current_user shows the name.",
            )
        name = self.name(what)
        if self.sign("("):
            while not self.sign(")"):
                self.next('")"')
        return name

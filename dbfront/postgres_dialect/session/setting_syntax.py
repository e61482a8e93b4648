"""SET, RESET, SHOW and set_config as values, parsed from SQL text.

This module only parses; setting_commands.py runs the commands. ``parse_setting_command`` returns
None for other statements, and for forms that the engine handles (``SET VARIABLE``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, first_word, tokens
from tierkv.kvcore.errors import SqlSyntaxError

_VERBS: Final = frozenset({"SET", "SHOW", "RESET", "SELECT"})
_SCOPES: Final = ("SESSION", "LOCAL")


@dataclass(frozen=True, slots=True)
class PgSettingCommand:
    """``verb`` SET, RESET, SHOW or SET_CONFIG; ``name`` in the client's spelling.

    Attributes:
        value: the new value; None for DEFAULT, RESET and SHOW.
        local: only until the transaction ends.
    """

    verb: str
    name: str
    value: str | None = None
    local: bool = False


def parse_setting_command(sql: str) -> PgSettingCommand | None:
    """Parse a settings statement; None for any other statement.

    Raises:
        SqlSyntaxError: a SET without a value.
    """
    verb = first_word(sql)
    if verb not in _VERBS or (verb == "SELECT" and "set_config" not in sql.lower()):
        return None
    words = [token for token in tokens(sql) if token.text != ";"]
    if verb == "SET":
        return _parse_set(words[1:])
    if verb in ("SHOW", "RESET") and len(words) > 1:
        return PgSettingCommand(verb, _spaced_name(words[1:]))
    if verb == "SELECT":
        return _parse_set_config(words)
    return None


def _spaced_name(words: list[SqlToken]) -> str:
    joined = " ".join(word.upper for word in words)
    if joined == "TIME ZONE":
        return "TimeZone"
    if joined == "TRANSACTION ISOLATION LEVEL":
        return "transaction_isolation"
    if joined == "SESSION AUTHORIZATION":
        return "session_authorization"
    return "".join(word.name for word in words)


def _parse_set(words: list[SqlToken]) -> PgSettingCommand | None:
    local = False
    if words and words[0].upper in _SCOPES and len(words) > 1 and words[1].text not in ("=", "."):
        if words[1].upper == "CHARACTERISTICS":
            return PgSettingCommand("SET", "default_transaction_isolation", "")
        if words[1].upper == "AUTHORIZATION":
            return PgSettingCommand("SET", "role", _value(words[2:]))
        local = words[0].upper == "LOCAL"
        words = words[1:]
    if not words or words[0].upper in ("VARIABLE", "GLOBAL"):
        return None
    if words[0].upper == "TRANSACTION":
        return PgSettingCommand("SET", "transaction_isolation", "", local=True)
    if [word.upper for word in words[:2]] == ["TIME", "ZONE"]:
        return PgSettingCommand("SET", "TimeZone", _value(words[2:]), local)
    if words[0].upper in ("NAMES", "ROLE"):
        name = {"NAMES": "client_encoding", "ROLE": "role"}[words[0].upper]
        return PgSettingCommand("SET", name, _value(words[1:]), local)
    return _parse_assignment(words, local=local)


def _parse_assignment(words: list[SqlToken], *, local: bool) -> PgSettingCommand:
    width = 3 if len(words) > 2 and words[1].text == "." else 1
    name = "".join(word.name for word in words[:width])
    if len(words) <= width or words[width].upper not in ("TO", "="):
        raise SqlSyntaxError(f'SET {name} needs "TO" or "=" and a value')
    return PgSettingCommand("SET", name, _value(words[width + 1 :]), local)


def _value(words: list[SqlToken]) -> str | None:
    """Return the value; join several values as PostgreSQL does. None for DEFAULT or LOCAL."""
    if len(words) == 1 and words[0].upper in ("DEFAULT", "LOCAL"):
        return None
    if not words:
        raise SqlSyntaxError("SET needs a value")
    text = "".join(
        ", " if word.text == "," else word.value if word.kind == "string" else word.text.strip('"')
        for word in words
    )
    return text.strip()


def _parse_set_config(words: list[SqlToken]) -> PgSettingCommand | None:
    """Parse ``SELECT [pg_catalog.]set_config('name', 'value', is_local)``."""
    rest = words[1:]
    if len(rest) > 2 and rest[0].upper == "PG_CATALOG" and rest[1].text == ".":
        rest = rest[2:]
    if len(rest) < 8 or rest[0].upper != "SET_CONFIG" or rest[7].text != ")":
        return None
    if len(rest) > 8 or rest[2].kind != "string" or rest[4].kind != "string":
        return None
    local = rest[6].value.lower() in ("true", "t", "on", "1")
    return PgSettingCommand("SET_CONFIG", rest[2].value, rest[4].value, local)

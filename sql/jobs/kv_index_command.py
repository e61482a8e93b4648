"""Statements about KV indexes.

    CREATE KV INDEX [IF NOT EXISTS] name ON table (expression)
        [USING MODEL m] [WITH (option = value, ...)]
    REFRESH KV INDEX name
    DROP KV INDEX [IF EXISTS] name

Pure. dbfront/jobs/kv_indexes.py carries them out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError
from tierkv.sql.calls.calls import find_calls
from tierkv.sql.command_reader import CommandOption, CommandReader
from tierkv.sql.jobs.job_command import OPTION_KINDS, option_value
from tierkv.sql.plan.plan import StatementPlan
from tierkv.sql.text.durations import seconds_of
from tierkv.sql.text.lexer import Token, TokenKind, closing_index, name_value, tokenize
from tierkv.sql.text.suggest import did_you_mean

MANUAL: Final = 0.0
ON_CHANGE: Final = -1.0
"""Values of ``refresh_s``: by REFRESH only, or after each statement that writes to the table."""

_VERBS: Final = ("CREATE", "REFRESH", "DROP")
_OPTIONS: Final = (
    "kind", "pin", "tier", "ttl", "system_prompt", "refresh", "batch", "priority", "background",
)  # fmt: skip
_KINDS: Final = ("prefix", "chunk")
_TIERS: Final = ("pool", "memory")
PIN_RENEW_S: Final = limits.MAX_PIN_S / 2
"""Age at which the pins of an index with ``tier = 'memory'`` are renewed."""

_VOLATILE_WORDS: Final = frozenset(
    {"CURRENT_TIMESTAMP", "CURRENT_DATE", "CURRENT_TIME", "LOCALTIMESTAMP", "LOCALTIME"}
)
_CLOCKS: Final = frozenset(
    {
        "NOW", "TODAY", "TRANSACTION_TIMESTAMP", "STATEMENT_TIMESTAMP", "GET_CURRENT_TIMESTAMP",
        "GET_CURRENT_TIME", "TXID_CURRENT", "PG_CURRENT_XACT_ID",
    }
)  # fmt: skip
"""Functions that both databases call stable, because they are constant within a statement."""


@dataclass(frozen=True, slots=True)
class KvIndexOptions:
    """How an index is kept.

    Attributes:
        kind: ``prefix``: documents begin prompts; ``chunk``: documents stand anywhere in prompts.
        model: name of the model; empty: the session's.
        system_prompt: of the calls that will use the index; None: the session's at CREATE.
        pin_s: how long the KV of a document is pinned; 0.0: not at all.
        tier: ``memory``: documents are pinned as long as the index exists; ``pool``: they are not.
        ttl_s: age at which the KV of a document is forgotten; 0.0: never.
        refresh_s: seconds between refreshes, MANUAL or ON_CHANGE; None: what the door can do.
        batch: documents per transaction.
        priority: of the calls.
        background: CREATE returns at once, where the front can work in the background.
        made_by: user whose sessions refresh, where indexes have no owners.
        made_s: Unix time of CREATE.
        tenant: of the calls; None in indexes of older releases.
    """

    kind: str = "prefix"
    model: str = ""
    system_prompt: str | None = None
    pin_s: float = 0.0
    tier: str = "pool"
    ttl_s: float = 0.0
    refresh_s: float | None = None
    batch: int = 128
    priority: int | None = 1
    background: bool = True
    made_by: str = ""
    made_s: float = 0.0
    tenant: str | None = None

    @property
    def in_memory(self) -> bool:
        """Documents are pinned for as long as the index exists."""
        return self.tier == "memory"


@dataclass(frozen=True, slots=True)
class KvIndexCommand:
    """A statement about a KV index.

    Attributes:
        verb: CREATE, REFRESH or DROP.
        name: of the index.
        table: of CREATE: the table as written.
        table_name: of CREATE: the last part of the table's name, as written statements name it.
        expression: of CREATE: SQL of a document.
        offset: number of characters before ``expression``.
        functions: names called in the expression.
        options: of CREATE.
        tolerant: IF EXISTS, or IF NOT EXISTS.
    """

    verb: str
    name: str
    table: str = ""
    table_name: str = ""
    expression: str = ""
    offset: int = 0
    functions: tuple[str, ...] = ()
    options: KvIndexOptions = KvIndexOptions()
    tolerant: bool = False

    @property
    def tag(self) -> str:
        """The command tag."""
        return f"{self.verb} KV INDEX"


def kv_index_command(tokens: Sequence[Token], text: str) -> KvIndexCommand | None:
    """Read a statement about a KV index; None for any other statement.

    Args:
        tokens: of one statement.
        text: the statement.

    Raises:
        SqlSyntaxError: the statement is malformed.
        SqlError: 42601, an unknown option or several expressions; 22023, an unusable value; 42P17,
            the expression is volatile.
        FeatureNotSupportedError: the expression has an AI call.
    """
    words = [token.upper for token in tokens[:3]]
    if words[1:] != ["KV", "INDEX"] or words[0] not in _VERBS:
        return None
    reader = _KvIndexReader(tokens, 3)
    if words[0] == "CREATE":
        return reader.create(text)
    tolerant = words[0] == "DROP" and reader.if_exists("DROP")
    name = reader.name("the name of an index")
    reader.end()
    return KvIndexCommand(words[0], name, tolerant=tolerant)


class _KvIndexReader(CommandReader):
    """Reads CREATE KV INDEX."""

    def create(self, text: str) -> KvIndexCommand:
        tolerant = self.if_exists("CREATE")
        name = self.name("the name of an index")
        if not self.word("ON"):
            raise self.wrong("expected ON and a table")
        first = self.at
        table = self.next("a table")
        while self.sign("."):
            table = self.next("a table")
        if table.kind not in (TokenKind.WORD, TokenKind.QUOTED):
            self.at -= 1
            raise self.wrong("expected a table")
        source = text[self.tokens[first].start : table.end]
        if not self.sees("("):
            raise self.wrong("expected (expression)")
        close = closing_index(list(self.tokens), self.at)
        inside = list(self.tokens[self.at + 1 : close])
        if not inside:
            self.at += 1
            raise self.wrong("expected an expression")
        _check_expression(inside)
        self.at = close + 1
        options = KvIndexOptions()
        if self.word("USING"):
            if not self.word("MODEL"):
                raise self.wrong("expected MODEL")
            options = replace(options, model=self.name("the name of a model"))
        if self.word("WITH"):
            options = _with_options(options, self.options())
        self.end()
        return KvIndexCommand(
            "CREATE", name, source, name_value(table), text[inside[0].start : inside[-1].end],
            inside[0].start, _functions(inside), options, tolerant,
        )  # fmt: skip


def _check_expression(inside: list[Token]) -> None:
    if find_calls(inside):
        raise FeatureNotSupportedError(
            "the expression of a KV index can't have AI calls",
            position=inside[0].start + 1,
            hint="Keep the answers in a table (CREATE AI TABLE), and index its column.",
        )
    depth = 0
    for at, token in enumerate(inside):
        if token.kind is TokenKind.WORD and token.upper in _VOLATILE_WORDS:
            raise volatile(token.text, position=token.start + 1)
        if token.upper in _CLOCKS and [after.text for after in inside[at + 1 : at + 2]] == ["("]:
            raise volatile(f"{token.text}()", position=token.start + 1)
        depth += (token.text in ("(", "[", "{")) - (token.text in (")", "]", "}"))
        if token.text == "," and not depth:
            raise SqlError(
                "a KV index has one expression: the text that prompts begin with",
                sqlstate="42601",
                position=token.start + 1,
                hint="Put columns together as the prompts do: title || ' ' || body.",
            )


def volatile(name: str, *, position: int = 0) -> SqlError:
    """Return the error of an expression with changing values."""
    return SqlError(
        f"{name} in the expression of a KV index gives another value each time",
        sqlstate="42P17",
        position=position,
        hint="Index columns of the table; put what changes behind them in the prompt.",
    )


def _functions(inside: Sequence[Token]) -> tuple[str, ...]:
    called = (
        token
        for token, after in pairwise(inside)
        if after.text == "(" and token.kind in (TokenKind.WORD, TokenKind.QUOTED)
    )
    return tuple(sorted({name_value(token) for token in called}))


def _with_options(options: KvIndexOptions, given: Sequence[CommandOption]) -> KvIndexOptions:
    values: dict[str, Any] = {}
    for option in given:
        if option.name == "capacity":
            raise SqlError(
                "an index has no option capacity: it belongs to the namespace",
                sqlstate="42601",
                position=option.position,
                hint="CREATE KV NAMESPACE n WITH (capacity, ttl, media) limits what is kept where.",
            )
        if option.name not in _OPTIONS:
            raise SqlError(
                f"an index has no option {option.name}",
                sqlstate="42601",
                position=option.position,
                hint=did_you_mean(option.name, _OPTIONS) or f"Options are {', '.join(_OPTIONS)}.",
            )
        if option.name == "kind":
            values["kind"] = _kind(option)
        elif option.name == "system_prompt":
            values["system_prompt"] = option.value
        elif option.name == "tier":
            values["tier"] = _tier(option)
        elif option.name in ("pin", "ttl"):
            values[f"{option.name}_s"] = _seconds(option, {"off": 0.0})
            if values.get("pin_s", 0.0) > limits.MAX_PIN_S:
                raise SqlError(
                    "option pin is a time up to a year",
                    sqlstate="22023",
                    position=option.position,
                    hint="Use tier = 'memory' to pin the texts for as long as the index exists.",
                )
        elif option.name == "refresh":
            known = {"manual": MANUAL, "on change": ON_CHANGE}
            values["refresh_s"] = _seconds(option, known)
        else:
            values[option.name] = option_value(option, OPTION_KINDS[option.name])
        if values.get("pin_s") and values.get("tier") == "memory":
            raise SqlError(
                "an index has either pin or tier = 'memory', which pins its texts without an end",
                sqlstate="22023",
                position=option.position,
            )
    return replace(options, **values)


def _kind(option: CommandOption) -> str:
    if option.value not in _KINDS:
        raise SqlError(
            "option kind is 'prefix' or 'chunk'", sqlstate="22023", position=option.position
        )
    return option.value


def _tier(option: CommandOption) -> str:
    if option.value == "disk":
        raise FeatureNotSupportedError(
            "an index can't keep its KV on disks alone: the pool places blocks by namespace",
            position=option.position,
            hint="CREATE KV NAMESPACE n WITH (media = 'disk') does so for tenants of its own.",
        )
    if option.value not in _TIERS:
        raise SqlError(
            "option tier is 'pool' or 'memory'", sqlstate="22023", position=option.position
        )
    return option.value


def _seconds(option: CommandOption, words: dict[str, float]) -> float:
    found = words.get(option.value.lower())
    seconds = seconds_of(option.value) if found is None else found
    if seconds is None or (found is None and seconds < 1):
        shown = " or ".join(f"'{word}'" for word in words)
        raise SqlError(
            f"option {option.name} is {shown}, or a time of at least a second such as '1 hour'",
            sqlstate="22023",
            position=option.position,
        )
    return seconds


@dataclass(frozen=True, slots=True)
class IndexedText:
    """What an index has: documents of a table, as SQL.

    Attributes:
        owner: owner of the index; empty without logins.
        table: name of the table, in lower case, without schema.
        kind: ``prefix`` or ``chunk``.
        made_s: Unix time of CREATE.
    """

    owner: str
    name: str
    table: str
    expression: str
    kind: str
    made_s: float = 0.0

    @classmethod
    def of_row(
        cls, owner: str, name: str, table: str, expression: str, options: str
    ) -> IndexedText:
        """Read a row of the table of indexes; ``options`` are JSON."""
        known = json.loads(options)
        return cls(owner, name, table, expression, known["kind"], known.get("made_s", 0.0))


_PROMPTS: Final = ("input", "prompt")
"""Parameters with the beginning of a prompt, the first that a call has."""

_ENDS: Final = frozenset({"||", ",", ")", "]", "}"})


def index_used_by(
    text: str, arguments: Mapping[str, int], indexes: Sequence[IndexedText]
) -> IndexedText | None:
    """Return the index whose documents the prompts of a call begin with, or contain; pure.

    Args:
        text: the statement.
        arguments: start of the call's arguments by parameter, in characters from 1.
        indexes: the indexes that the client has.
    """
    tokens = tokenize(text)
    names = {name_value(t) for t in tokens if t.kind in (TokenKind.WORD, TokenKind.QUOTED)}
    for index in indexes:
        if index.table not in names:
            continue
        wanted = _plain(tokenize(index.expression))
        if index.kind == "chunk":
            starts = _places(tokens, arguments.get("documents"), wanted)
        else:
            main = next((arguments[name] for name in _PROMPTS if name in arguments), None)
            starts = [at for at, token in enumerate(tokens) if token.start + 1 == main]
        if any(_begins(_plain(tokens[at:]), wanted) for at in starts):
            return index
    return None


def indexed_forms(plan: StatementPlan, indexes: Sequence[IndexedText]) -> dict[int, IndexedText]:
    """Return the index used by the prompts of each form of a statement; pure."""
    found: dict[int, IndexedText] = {}
    for site in plan.sites if indexes else ():
        index = index_used_by(plan.text, dict(site.arguments), indexes)
        if index is not None:
            found.setdefault(site.form.key, index)
    return found


def _places(tokens: Sequence[Token], start: int | None, wanted: Sequence[str]) -> Sequence[int]:
    """Return the tokens of an argument at which a document may begin."""
    if start is None or not wanted:
        return ()
    first = next((at for at, token in enumerate(tokens) if token.start + 1 >= start), len(tokens))
    return range(first, len(tokens))


def _plain(tokens: Sequence[Token]) -> list[str]:
    """Return tokens as compared: names in lower case and without the table before a dot."""
    plain: list[str] = []
    for token in tokens:
        named = token.kind in (TokenKind.WORD, TokenKind.QUOTED)
        if named and plain[-1:] == ["."]:
            del plain[-2:]
        plain.append(name_value(token) if named else token.text)
    return plain


def _begins(found: Sequence[str], wanted: Sequence[str]) -> bool:
    count = len(wanted)
    return list(found[:count]) == list(wanted) and (len(found) == count or found[count] in _ENDS)

"""Statements about AI jobs. The front runs the statement of the job in batches.

    CREATE AI JOB [IF NOT EXISTS] name AS statement WITH (key = column, option = value, ...)
    RESUME [AI] JOB name [WITH (option = value, ...)]
    RUN AI JOB name PARTITION number [WITH (retry_failed = true)]
    CANCEL [AI] JOB name, and CALL tierkv.cancel_job('name')
    DROP AI JOB [IF EXISTS] name

RUN is for runners elsewhere, which take one partition each. Pure: job_statement.py reads the
statement of a job; dbfront/jobs/job_commands.py carries these statements out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlError, SqlSyntaxError
from tierkv.kvcore.value_kinds import Flag, OneOf, ValueKind, Whole
from tierkv.sql.command_reader import CommandOption, CommandReader
from tierkv.sql.text.lexer import Token, TokenKind, string_value
from tierkv.sql.text.suggest import did_you_mean


class JobVerb(StrEnum):
    """What a statement does with a job."""

    CREATE = "CREATE"
    RESUME = "RESUME"
    RUN = "RUN"
    CANCEL = "CANCEL"
    DROP = "DROP"


@dataclass(frozen=True, slots=True)
class JobCommand:
    """A statement about a job.

    Attributes:
        verb: what it does.
        name: the job.
        options: of CREATE and RESUME, in their order.
        statement: of CREATE: the statement that the job runs.
        offset: number of characters before ``statement``.
        tolerant: IF EXISTS, or IF NOT EXISTS.
        partition: of RUN.
    """

    verb: JobVerb
    name: str
    options: tuple[CommandOption, ...] = ()
    statement: str = ""
    offset: int = 0
    tolerant: bool = False
    partition: int = 0

    @property
    def tag(self) -> str:
        """The command tag."""
        return f"{self.verb} AI JOB"


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job runs.

    Attributes:
        key: SQL of the key, a column of the source; each value stands for one row.
        batch: most rows in a batch, which is one transaction.
        max_cost_tokens: tokens of prompts and answers after which the job stops; 0 is no limit.
        max_failed: rows set aside after which the job stops; 0 is no limit.
        priority: of the calls; None: as of any large statement.
        runner: ``local`` or ``ray``.
        partitions: number of parts, which a runner may run at the same time.
        background: the front runs the job in a session of its own.
        queued: the job waits in the queue for the worker of any front.
        ticket: names the one entry of the queue that may run the job; set by the front.
        made_by: user of this session, where jobs have no owners.
        retry_failed: ask again about the rows set aside; of RESUME only.
    """

    key: str = ""
    batch: int = 500
    max_cost_tokens: int = 0
    max_failed: int = 1000
    priority: int | None = None
    runner: str = "local"
    partitions: int = 0
    background: bool = False
    queued: bool = False
    ticket: str = ""
    made_by: str = ""
    retry_failed: bool = False


OPTION_KINDS: Final[dict[str, ValueKind]] = {
    "batch": Whole(1, limits.MAX_JOB_BATCH_ROWS),
    "max_cost_tokens": Whole(0),
    "max_failed": Whole(0),
    "priority": Whole(-100, 100),
    "runner": OneOf(("local", "ray")),
    "partitions": Whole(1, limits.MAX_JOB_PARTITIONS),
    "background": Flag(),
    "queued": Flag(),
    "retry_failed": Flag(),
}
_AT_CREATION: Final = ("key", "partitions")
_PRIORITIES: Final = {"interactive": "0", "batch": "1"}


def job_options(command: JobCommand, old: JobOptions | None = None) -> JobOptions:
    """Return the options of CREATE, or of RESUME over the job's earlier ones.

    Raises:
        SqlError: 42601, an unknown or missing option; 22023, an unusable value.
    """
    values: dict[str, object] = {}
    known = [name for name in (*_AT_CREATION[:1], *OPTION_KINDS) if _allowed(name, command.verb)]
    for option in command.options:
        if option.name not in known:
            raise SqlError(
                f"a job has no option {option.name}"
                if option.name not in JobOptions.__dataclass_fields__
                else f"option {option.name} can't be given here",
                sqlstate="42601",
                position=option.position,
                hint=did_you_mean(option.name, known) or f"Options are {', '.join(known)}.",
            )
        kind = OPTION_KINDS.get(option.name)
        values[option.name] = option.value if kind is None else option_value(option, kind)
    if old is None and "key" not in values:
        raise SqlError(
            "a job needs a key to be cut into batches",
            sqlstate="42601",
            hint="Add WITH (key = id): a column of the source with one value per row.",
        )
    return replace(old or JobOptions(), **values)  # type: ignore[arg-type]


def _allowed(name: str, verb: JobVerb) -> bool:
    if verb is JobVerb.CREATE:
        return name != "retry_failed"
    return name == "retry_failed" if verb is JobVerb.RUN else name not in _AT_CREATION


def option_value(option: CommandOption, kind: ValueKind) -> object:
    """Return the value of an option.

    Raises:
        SqlError: 22023, the value is unusable.
    """
    text = option.value
    if option.name == "priority":
        text = _PRIORITIES.get(text.lower(), text)
    try:
        return kind.from_text(text)
    except ValueError as error:
        raise SqlError(
            f"option {option.name} {error}", sqlstate="22023", position=option.position
        ) from None


_CANCEL_CALL: Final = ["CALL", "TIERKV", ".", "CANCEL_JOB", "("]


def job_command(tokens: Sequence[Token], text: str) -> JobCommand | None:
    """Read a statement about a job; None for any other statement.

    Args:
        tokens: of one statement.
        text: the statement.

    Raises:
        SqlSyntaxError: the statement is malformed.
    """
    words = [token.upper for token in tokens[:5]]
    if words == _CANCEL_CALL:
        return _JobReader(tokens, 5).cancel_call()
    if words[:1] not in (["CREATE"], ["RESUME"], ["RUN"], ["CANCEL"], ["DROP"]):
        return None
    of_ai = words[1:3] == ["AI", "JOB"]
    if not of_ai and not (words[1:2] == ["JOB"] and words[0] in ("RESUME", "CANCEL")):
        return None
    reader = _JobReader(tokens, 3 if of_ai else 2)
    verb = JobVerb(words[0])
    return reader.create(text) if verb is JobVerb.CREATE else reader.other(verb)


class _JobReader(CommandReader):
    """Reads a statement about a job."""

    def create(self, text: str) -> JobCommand:
        tolerant = self.if_exists("CREATE")
        name = self.name("the name of a job")
        if not self.word("AS"):
            raise self.wrong("expected AS")
        first = self.at
        opening = options_start(self.tokens, first)
        if opening is None:
            end = len(self.tokens)
            options: tuple[CommandOption, ...] = ()
        else:
            end, self.at = opening - 1, opening
            options = self.options()
        if end <= first:
            raise SqlSyntaxError(
                "expected INSERT INTO ... SELECT or CREATE TABLE ... AS SELECT after AS",
                position=self.tokens[first - 1].end + 1,
            )
        start = self.tokens[first].start
        statement = text[start : self.tokens[end - 1].end]
        return JobCommand(JobVerb.CREATE, name, options, statement, start, tolerant)

    def other(self, verb: JobVerb) -> JobCommand:
        tolerant = verb is JobVerb.DROP and self.if_exists(verb)
        name = self.name("the name of a job")
        options: tuple[CommandOption, ...] = ()
        partition = 0
        if verb is JobVerb.RUN:
            if not self.word("PARTITION"):
                raise self.wrong("expected PARTITION")
            number = self.next("the number of a partition")
            if number.kind is not TokenKind.NUMBER or not number.text.isdecimal():
                self.at -= 1
                raise self.wrong("expected the number of a partition")
            partition = int(number.text)
        if verb in (JobVerb.RESUME, JobVerb.RUN) and self.word("WITH"):
            options = self.options()
        self.end()
        return JobCommand(verb, name, options, tolerant=tolerant, partition=partition)

    def cancel_call(self) -> JobCommand:
        token = self.next("the name of a job")
        named = token.kind in (TokenKind.STRING, TokenKind.WORD)
        if not named:
            self.at -= 1
            raise self.wrong("expected the name of a job in quotes")
        self.expect(")")
        self.end()
        is_text = token.kind is TokenKind.STRING
        return JobCommand(JobVerb.CANCEL, string_value(token) if is_text else token.text.lower())


def options_start(tokens: Sequence[Token], first: int) -> int | None:
    """Return the bracket of the WITH (...) at the end; None without one."""
    if tokens[-1].text != ")":
        return None
    depth = 0
    for index in range(len(tokens) - 1, first - 1, -1):
        depth += {")": 1, "(": -1}.get(tokens[index].text, 0)
        if depth == 0:
            ends_it = index > first and tokens[index - 1].upper == "WITH"
            return index if ends_it else None
    return None

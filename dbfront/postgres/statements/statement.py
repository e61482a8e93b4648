"""The relay's view of an SQL text: its statements, their positions and their plans."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from tierkv.kvcore.errors import FeatureNotSupportedError, UserError
from tierkv.sql.calls.calls import find_calls
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import AI_FUNCTIONS, PROMPT_TEMPLATE
from tierkv.sql.cluster_command import ClusterCommand, cluster_command
from tierkv.sql.jobs.ai_table_command import AiTableCommand, ai_table_command
from tierkv.sql.jobs.job_command import JobCommand, job_command
from tierkv.sql.jobs.kv_index_command import KvIndexCommand, kv_index_command
from tierkv.sql.plan.call_sites import MAX_FORMS
from tierkv.sql.plan.explain_options import ESTIMATE_OPTION
from tierkv.sql.plan.plan import StatementPlan, plan_statement
from tierkv.sql.plan.rewrite import RewrittenSql
from tierkv.sql.settings import parse_setting, setting_command, setting_spec
from tierkv.sql.text.lexer import Token, TokenKind, name_value, string_value, tokenize
from tierkv.sql.text.statement import StatementKind, classify, command_name, statement_spans

_MARKS: Final = re.compile(
    rb"(?i)\b(?:"
    + "|".join((*AI_FUNCTIONS, PROMPT_TEMPLATE, ESTIMATE_OPTION, "tierkv")).encode()
    + rb")\b"
)
_CLUSTER: Final = re.compile(rb"\b(?:kv\b.{0,999}?\bnamespace|ai\b.{0,999}?\blimit)\b", re.DOTALL)
# The byte before a text is its length, which may look like a letter.
_RIGHTS: Final = re.compile(
    rb"(?:grant|revoke)\b.{0,99}?\bon\b.{0,99}?\b(?:ai_|ai\b|models?\b)", re.DOTALL
)
_JOBS: Final = re.compile(
    rb"(?:(?:create|resume|run|cancel|drop)\s+(?:ai\s+)?job|\bai\s+table|\bkv\s+index)\b"
)
RESETS: Final = "stat_reset"
"""A function that notifies the front; only its name distinguishes the function from views."""

_KEY_LIMIT: Final = 1 << 62
_LOCKS: Final = frozenset({"UPDATE", "SHARE", "NO", "KEY"})


def may_matter(message: bytes) -> bool:
    """Return True if a message may contain AI calls, TierKV settings or views; quick."""
    lowered = message.lower()
    if (b"ai_" in lowered or b"tierkv" in lowered) and _MARKS.search(lowered) is not None:
        return True
    if (b"grant" in lowered or b"revoke" in lowered) and _RIGHTS.search(lowered) is not None:
        return True
    if (b"job" in lowered or b"table" in lowered or b"index" in lowered) and _JOBS.search(
        lowered
    ) is not None:
        return True
    about = b"namespace" in lowered or b"limit" in lowered
    return about and _CLUSTER.search(lowered) is not None


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a text.

    Attributes:
        text: as written.
        offset: number of characters before the statement in the whole text.
        kind: kind of the whole statement.
        words: the first words, in upper case.
        plan: set for AI calls or admin views; for a DECLARE, the plan of the query inside.
        declare: length of the text before the query of a DECLARE; 0 for other statements.
        resets: True if the statement calls tierkv.stat_reset.
        command: set for a statement about the cluster, which PostgreSQL must not see.
        job: set for a statement about a job or an AI table, likewise.
    """

    text: str
    offset: int
    kind: StatementKind
    words: tuple[str, ...]
    plan: StatementPlan | None = None
    declare: int = 0
    resets: bool = False
    command: ClusterCommand | None = None
    job: JobCommand | AiTableCommand | KvIndexCommand | None = None

    @property
    def views(self) -> frozenset[str]:
        """Return the views to fill before the run, and RESETS for a reset."""
        views = frozenset() if self.plan is None else self.plan.admin_views
        return views | {RESETS} if self.resets else views

    @property
    def has_calls(self) -> bool:
        """Return True if models must be asked."""
        return self.plan is not None and bool(self.plan.sites)

    @property
    def engine_text(self) -> str:
        """Return the text for PostgreSQL."""
        if self.plan is None:
            return self.text
        return self.text[: self.declare] + self.plan.engine_sql.text

    @property
    def inner(self) -> RewrittenSql:
        """Return the rewritten query."""
        assert self.plan is not None
        return self.plan.engine_sql

    @property
    def collect_text(self) -> str | None:
        """Return a SELECT with the calls of a writing statement, or None if there is no SELECT."""
        plan = self.plan
        if plan is None or plan.collect_sql is None or self.kind is StatementKind.COPY:
            return None
        return plan.collect_sql.text

    @property
    def holds(self) -> bool:
        """Return True if a DECLARE is WITH HOLD."""
        words = [token.upper for token in tokenize(self.text[: self.declare])]
        return ("WITH", "HOLD") in pairwise(words)

    @property
    def opens_window(self) -> bool:
        """Return True for a DECLARE of a cursor with calls answerable during its fetches."""
        if not self.declare or self.plan is None or self.plan.cursor_rows is None or self.holds:
            return False
        words = [token.upper for token in tokenize(self.text[: self.declare])]
        return "SCROLL" not in words or ("NO", "SCROLL") in pairwise(words)

    @property
    def cursor(self) -> str:
        """Return the cursor's name in a DECLARE."""
        return name_value(tokenize(self.text)[1])

    @property
    def cursor_text(self) -> str:
        """Return the DECLARE of a cursor whose calls are answered during its fetches."""
        assert self.plan is not None and self.plan.cursor_rows is not None
        return self.text[: self.declare] + self.plan.cursor_rows.rows.text

    @property
    def locks_rows(self) -> bool:
        """Return True if a SELECT has a clause like FOR UPDATE or FOR NO KEY UPDATE."""
        words = [token.upper for token in tokenize(self.text)]
        return any(word == "FOR" and following in _LOCKS for word, following in pairwise(words))

    def position(self, sent: int) -> int:
        """Translate a position in ``engine_text`` to the whole text."""
        if self.plan is None or sent <= self.declare:
            return sent + self.offset
        inner = self.plan.engine_sql.source_position(sent - self.declare)
        return inner + self.declare + self.offset


class StatementPlanner:
    """Plans the statements of one session; each statement gets form keys of its own."""

    def __init__(self) -> None:
        self._key = MAX_FORMS

    def statements(self, text: str) -> list[Statement]:
        """Split a text into statements, and plan the statements with AI calls or admin views.

        Raises:
            UserError: impossible AI calls, or an invalid SET of a ``tierkv.*`` setting.
        """
        found: list[Statement] = []
        for start, end in statement_spans(text):
            found.append(self._statement(text[start:end], start))
        return found

    def _statement(self, text: str, offset: int) -> Statement:
        tokens = tokenize(text)
        kind = classify(tokens)
        words = tuple(token.upper for token in tokens[:4])
        bare = Statement(text, offset, kind, words)
        check_setting(tokens)
        command = cluster_command(tokens, keeps_roles=False)
        if command is not None:
            return replace(bare, command=command)
        job = (
            job_command(tokens, text)
            or ai_table_command(tokens, text)
            or kv_index_command(tokens, text)
        )
        if job is not None:
            return replace(bare, job=job)
        _refuse_stored_calls(tokens, kind, offset)
        declare = _declared_query(tokens)
        try:
            plan = plan_statement(
                text[declare:], key_base=self._next_key(), dialect=Dialect.POSTGRES
            )
        except UserError as error:
            if error.position:
                error.position += offset + declare
            raise
        same = plan.engine_sql.text == text[declare:]
        resets = _calls_reset(tokens)
        if not plan.sites and not plan.admin_views and same and not resets:
            return bare
        _refuse_copy_in(tokens, plan)
        return Statement(text, offset, kind, words, plan, declare, resets)

    def _next_key(self) -> int:
        self._key = self._key + MAX_FORMS if self._key < _KEY_LIMIT else MAX_FORMS
        return self._key


def check_setting(tokens: list[Token]) -> None:
    """Refuse an invalid SET of a ``tierkv.*`` setting, which PostgreSQL would accept unchecked.

    Raises:
        SqlError: 42704, the setting does not exist.
        UserError: 22023, the value is invalid.
    """
    command = setting_command(tokens)
    if command is None:
        return
    setting_spec(command.name)
    if command.verb == "SET" and command.value is not None:
        parse_setting(command.name, command.value)


def _refuse_stored_calls(tokens: list[Token], kind: StatementKind, offset: int) -> None:
    """Refuse stored code with AI calls, which PostgreSQL would run without the front.

    Raises:
        FeatureNotSupportedError: with the position of the code.
    """
    words = {token.upper for token in tokens[:4]}
    stored = kind is StatementKind.CREATE and words & {"FUNCTION", "PROCEDURE"}
    if not stored and tokens[0].upper != "DO":
        return
    for token in tokens:
        if token.kind is TokenKind.STRING and _calls_in(string_value(token)):
            raise FeatureNotSupportedError(
                f"{command_name(tokens)} can't contain AI calls: PostgreSQL itself would run them",
                position=offset + token.start + 1,
                hint="Make the AI call in the statement that the client sends, and pass the answer "
                "as an argument.",
            )


def _calls_in(text: str) -> bool:
    try:
        return bool(find_calls(tokenize(text)))
    except UserError:
        return may_matter(text.encode("utf-8", "replace"))


def _calls_reset(tokens: list[Token]) -> bool:
    words = [token.text.lower() for token in tokens]
    return any(words[at : at + 4] == ["tierkv", ".", RESETS, "("] for at in range(len(words)))


def _declared_query(tokens: list[Token]) -> int:
    """Return the start of the query of a DECLARE CURSOR; 0 for any other statement."""
    if not tokens or tokens[0].upper != "DECLARE":
        return 0
    words = [token.upper if token.kind is TokenKind.WORD else "" for token in tokens]
    if "CURSOR" not in words:
        return 0
    try:
        return tokens[words.index("FOR", words.index("CURSOR")) + 1].start
    except (ValueError, IndexError):
        return 0


def _refuse_copy_in(tokens: list[Token], plan: StatementPlan) -> None:
    if plan.sites and plan.kind is StatementKind.COPY and tokens[1].text != "(":
        raise FeatureNotSupportedError(
            "COPY FROM can't contain AI calls",
            hint="Copy into a table first, then SELECT or INSERT from it.",
        )

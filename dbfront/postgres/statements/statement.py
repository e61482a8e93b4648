"""What the relay knows of one SQL text: its statements, where they stand, and their plans."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tierkv.kvcore.errors import FeatureNotSupportedError, UserError
from tierkv.sql.calls.calls import find_calls
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import AI_FUNCTIONS, PROMPT_TEMPLATE
from tierkv.sql.plan.explain_options import ESTIMATE_OPTION
from tierkv.sql.plan.plan import MAX_FORMS, StatementPlan, plan_statement
from tierkv.sql.plan.rewrite import RewrittenSql
from tierkv.sql.settings import parse_setting, setting_command, setting_spec
from tierkv.sql.text.lexer import Token, TokenKind, name_value, string_value, tokenize
from tierkv.sql.text.statement import StatementKind, classify, command_name, statement_spans

_MARKS: Final = re.compile(
    rb"(?i)\b(?:"
    + "|".join((*AI_FUNCTIONS, PROMPT_TEMPLATE, ESTIMATE_OPTION, "tierkv")).encode()
    + rb")\b"
)
RESETS: Final = "stat_reset"
"""A function that tells the front something; it is told apart from views by its name only."""

_KEY_LIMIT: Final = 1 << 62
_LOCKS: Final = frozenset({"UPDATE", "SHARE", "NO", "KEY"})


def may_matter(message: bytes) -> bool:
    """Whether a message's text may hold AI calls, our settings or our views; quick."""
    lowered = message.lower()
    return (b"ai_" in lowered or b"tierkv" in lowered) and _MARKS.search(lowered) is not None


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a text.

    Attributes:
        text: as written.
        offset: characters before it in the whole text.
        kind: of the whole statement.
        words: its first words, in upper case.
        plan: set where there are AI calls or admin views; of the query inside a DECLARE.
        declare: length of what stands before that query; 0 for other statements.
        resets: it calls tierkv.stat_reset.
    """

    text: str
    offset: int
    kind: StatementKind
    words: tuple[str, ...]
    plan: StatementPlan | None = None
    declare: int = 0
    resets: bool = False

    @property
    def views(self) -> frozenset[str]:
        """What the front must set before it runs; RESETS among the views it reads."""
        views = frozenset() if self.plan is None else self.plan.admin_views
        return views | {RESETS} if self.resets else views

    @property
    def has_calls(self) -> bool:
        """Whether models must be asked."""
        return self.plan is not None and bool(self.plan.sites)

    @property
    def engine_text(self) -> str:
        """What PostgreSQL is given."""
        if self.plan is None:
            return self.text
        return self.text[: self.declare] + self.plan.engine_sql.text

    @property
    def inner(self) -> RewrittenSql:
        """The rewritten query."""
        assert self.plan is not None
        return self.plan.engine_sql

    @property
    def collect_text(self) -> str | None:
        """A SELECT that meets the calls of a statement that writes; None where there is none."""
        plan = self.plan
        if plan is None or plan.collect_sql is None or self.kind is StatementKind.COPY:
            return None
        return plan.collect_sql.text

    @property
    def holds(self) -> bool:
        """Whether a DECLARE is WITH HOLD."""
        words = [token.upper for token in tokenize(self.text[: self.declare])]
        return ("WITH", "HOLD") in pairwise(words)

    @property
    def opens_window(self) -> bool:
        """Whether it declares a cursor whose calls can be answered as its rows are fetched."""
        if not self.declare or self.plan is None or self.plan.cursor_rows is None or self.holds:
            return False
        words = [token.upper for token in tokenize(self.text[: self.declare])]
        return "SCROLL" not in words or ("NO", "SCROLL") in pairwise(words)

    @property
    def cursor(self) -> str:
        """The name that a DECLARE gives."""
        return name_value(tokenize(self.text)[1])

    @property
    def cursor_text(self) -> str:
        """The DECLARE of a cursor whose calls are answered as its rows are fetched."""
        assert self.plan is not None and self.plan.cursor_rows is not None
        return self.text[: self.declare] + self.plan.cursor_rows.rows.text

    @property
    def locks_rows(self) -> bool:
        """Whether a SELECT has a clause such as FOR UPDATE or FOR NO KEY UPDATE."""
        words = [token.upper for token in tokenize(self.text)]
        return any(word == "FOR" and following in _LOCKS for word, following in pairwise(words))

    def position(self, sent: int) -> int:
        """Translate a position in ``engine_text`` to the whole text's."""
        if self.plan is None or sent <= self.declare:
            return sent + self.offset
        inner = self.plan.engine_sql.source_position(sent - self.declare)
        return inner + self.declare + self.offset


class StatementPlanner:
    """Plans the statements of one session; each gets form keys of its own."""

    def __init__(self) -> None:
        self._key = MAX_FORMS

    def statements(self, text: str) -> list[Statement]:
        """Cut a text into statements, and plan those with AI calls or admin views.

        Raises:
            UserError: AI calls that can't work, or a ``tierkv.*`` setting that can't be set so.
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
    """Refuse a SET of a ``tierkv.*`` setting that PostgreSQL would take blindly.

    Raises:
        SqlError: 42704, there is no such setting.
        UserError: 22023, it can't have that value.
    """
    command = setting_command(tokens)
    if command is None:
        return
    setting_spec(command.name)
    if command.verb == "SET" and command.value is not None:
        parse_setting(command.name, command.value)


def _refuse_stored_calls(tokens: list[Token], kind: StatementKind, offset: int) -> None:
    """Refuse code that PostgreSQL would keep and run by itself, with AI calls in its text.

    Raises:
        FeatureNotSupportedError: with the position of that text.
    """
    words = {token.upper for token in tokens[:4]}
    stored = kind is StatementKind.CREATE and words & {"FUNCTION", "PROCEDURE"}
    if not stored and tokens[0].upper != "DO":
        return
    for token in tokens:
        if token.kind is TokenKind.STRING and _calls_in(string_value(token)):
            raise FeatureNotSupportedError(
                f"{command_name(tokens)} can't hold AI calls: PostgreSQL would run them by itself",
                position=offset + token.start + 1,
                hint="Call the AI in the statement that the client sends, and hand the answer over "
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
    """Return where the query of a DECLARE CURSOR starts; 0 for any other statement."""
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
            "COPY FROM can't hold AI calls",
            hint="Copy into a table first, then SELECT or INSERT from it.",
        )

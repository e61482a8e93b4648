"""The options between EXPLAIN and the explained statement, and their form for the engine.

Read by sql/plan/plan.py. ``AI_ESTIMATE`` is our own option and never reaches the engine. Options
unknown here (``COSTS``, ``BUFFERS`` ...) are passed on as written, for the engine to check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.errors import FeatureNotSupportedError, SqlSyntaxError
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.rewrite import RewrittenSql
from tierkv.sql.text.lexer import Token, TokenKind, closing_index, string_value

ESTIMATE_OPTION: Final = "AI_ESTIMATE"
_QUERIES: Final = frozenset({"SELECT", "WITH", "VALUES", "FROM", "TABLE", "("})
_ON: Final = frozenset({"TRUE", "ON", "1"})
_OFF: Final = frozenset({"FALSE", "OFF", "0"})
_FORMATS: Final = frozenset({"TEXT", "JSON"})


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """Options of an EXPLAIN.

    Attributes:
        start: index of the first token of the explained statement.
        analyze: run the statement and report measured costs.
        estimate: report estimated costs of the AI calls.
        format: ``TEXT``, ``JSON``, or another format of the engine.
        verbose: more details of the engine's plan.
        others: further options, as written.
    """

    start: int
    analyze: bool = False
    estimate: bool = False
    format: str = "TEXT"
    verbose: bool = False
    others: tuple[str, ...] = ()

    @property
    def as_json(self) -> bool:
        """Return whether the result is one JSON document."""
        return self.format == "JSON"

    def engine_prefix(self, dialect: Dialect, *, analyze: bool) -> str:
        """Write the EXPLAIN in front of the engine's text of the statement."""
        options = [
            *(["ANALYZE"] if analyze else []),
            *([f"FORMAT {self.format}"] if self.format != "TEXT" else []),
            *(["VERBOSE"] if self.verbose and dialect is Dialect.POSTGRES else []),
            *self.others,
        ]
        return f"EXPLAIN ({', '.join(options)}) " if options else "EXPLAIN "

    def check(self) -> None:
        """Refuse options that don't work with AI calls.

        Raises:
            FeatureNotSupportedError: a format without a place for AI calls.
            SqlSyntaxError: both ANALYZE and AI_ESTIMATE are given.
        """
        if self.format not in _FORMATS:
            raise FeatureNotSupportedError(
                f"EXPLAIN can't show AI calls in format {self.format}",
                hint="Use FORMAT TEXT or FORMAT JSON.",
            )
        if self.analyze and self.estimate:
            raise SqlSyntaxError(
                f"EXPLAIN options ANALYZE and {ESTIMATE_OPTION} cannot be used together",
                hint=f"ANALYZE calls the model; {ESTIMATE_OPTION} does not.",
            )


def explain_options(tokens: list[Token]) -> ExplainOptions | None:
    """Read the options of an EXPLAIN; None for any other statement.

    Raises:
        SqlSyntaxError: an option known here has an invalid value.
    """
    if not tokens or tokens[0].upper != "EXPLAIN" or tokens[0].kind is not TokenKind.WORD:
        return None
    index = 1
    words: set[str] = set()
    while index < len(tokens) and tokens[index].upper in ("ANALYZE", "ANALYSE", "VERBOSE"):
        words.add(tokens[index].upper)
        index += 1
    listed: list[list[Token]] = []
    if _opens_list(tokens, index):
        close = closing_index(tokens, index)
        listed, index = _items(tokens[index + 1 : close]), close + 1
    return _options(index, words, listed)


def explaining(prefix: str, sql: RewrittenSql, suffix: str = "") -> RewrittenSql:
    """Put words around a text for the engine; positions still refer to the user's text."""
    return RewrittenSql(
        f"{prefix}{sql.text}{suffix}",
        tuple((offset + len(prefix), source) for offset, source in sql.marks),
        sql.parameters,
    )


def _opens_list(tokens: list[Token], index: int) -> bool:
    following = tokens[index : index + 2]
    return len(following) == 2 and following[0].text == "(" and following[1].upper not in _QUERIES


def _items(tokens: list[Token]) -> list[list[Token]]:
    items: list[list[Token]] = [[]]
    for token in tokens:
        if token.text == ",":
            items.append([])
        else:
            items[-1].append(token)
    return [item for item in items if item]


def _options(start: int, words: set[str], listed: list[list[Token]]) -> ExplainOptions:
    switches = {"ANALYZE": bool(words - {"VERBOSE"}), "VERBOSE": "VERBOSE" in words}
    switches[ESTIMATE_OPTION] = False
    chosen, others = "TEXT", []
    for item in listed:
        name = item[0].upper.replace("ANALYSE", "ANALYZE")
        if name in switches:
            switches[name] = _switch(name, item)
        elif name == "FORMAT" and len(item) == 2:
            chosen = _text(item[1]).upper()
        else:
            others.append(" ".join(token.text for token in item))
    return ExplainOptions(
        start,
        analyze=switches["ANALYZE"],
        estimate=switches[ESTIMATE_OPTION],
        format=chosen,
        verbose=switches["VERBOSE"],
        others=tuple(others),
    )


def _switch(name: str, item: list[Token]) -> bool:
    value = _text(item[1]).upper() if len(item) == 2 else "ON" if len(item) == 1 else ""
    if value not in _ON | _OFF:
        raise SqlSyntaxError(
            f"{name} requires a Boolean value", position=item[0].start + 1, hint=f"Write {name}."
        )
    return value in _ON


def _text(token: Token) -> str:
    return string_value(token) if token.kind is TokenKind.STRING else token.text

"""The plan of one statement: kind, AI calls, and the texts for the engine.

``plan_statement`` is the entry point of the room: text in, frozen plan out. The doors of the front
make a ``SqlStatement`` of each client statement; the executor runs this value, and prepared
statements keep it. A plan with AI calls is handed out once, because its form keys are valid for a
single run. This module refuses invalid statements before anything runs (sql/plan/refusals.py),
knows no tables and never executes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final, Self

from tierkv.kvcore.errors import SqlSyntaxError
from tierkv.sql.calls.ai_call import CallForm
from tierkv.sql.calls.calls import FoundCall, find_calls, find_templates
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.placement import Placement, place_calls
from tierkv.sql.plan.call_sites import CallSite, call_sites, row_sources
from tierkv.sql.plan.changes import query_writes, with_writes
from tierkv.sql.plan.collect import CollectForm, collect_form, columns_form
from tierkv.sql.plan.early_rows import CursorRows, cursor_rows, early_rows, row_bound, stops_early
from tierkv.sql.plan.explain_options import ExplainOptions, explain_options, explaining
from tierkv.sql.plan.filter_plan import FilterPlan, filter_plan
from tierkv.sql.plan.late_items import late_items
from tierkv.sql.plan.refusals import refuse_misplaced, refuse_statement
from tierkv.sql.plan.rewrite import CallRendering, RewrittenSql, SqlRewriter, parameter_names
from tierkv.sql.plan.select_list import missing_aliases
from tierkv.sql.plan.stream_plan import StreamPlan, stream_plan, top_plan
from tierkv.sql.plan.stream_shape import NotStreamableError
from tierkv.sql.text.lexer import SqlText, Token, tokenize
from tierkv.sql.text.statement import StatementKind, classify
from tierkv.sql.views import admin_views_in


class Explain(StrEnum):
    """Kind of EXPLAIN."""

    NO = "no"
    PLAN = "plan"
    ESTIMATE = "estimate"
    ANALYZE = "analyze"


@dataclass(frozen=True, slots=True)
class StatementPlan:
    """How to run a statement.

    Attributes:
        text: the statement.
        kind: kind of the statement; for an EXPLAIN, of the explained statement.
        explain: kind of EXPLAIN, if any.
        explained: for an EXPLAIN with AI calls, the plan of the explained statement alone.
        explain_json: the explanation is one JSON document.
        rows_sql: for an estimate, counts the rows that may need any call, if known.
        sites: AI calls in text order; if empty, the engine runs the statement alone.
        forms: forms of the sites, by key.
        engine_sql: text for the engine.
        collect_sql: the SELECT that meets the same calls, for writing statements.
        stop_after_rows: a LIMIT whose first rows are final, see sql/calls/placement.py.
        admin_views: names of the tierkv views that the statement reads.
        returning_sql: a SELECT with the result columns of a writing statement, from RETURNING or
            after a writing WITH; None for any other statement.
        shows: the statement only shows the engine's catalogue (DESCRIBE, PRAGMA ...).
        dialect: the target engine.
        stream: how to run the statement as a stream; None with ``why_not_stream``, in words.
        filters: how to write the statement with another order of AI filters than ``engine_sql``,
            which keeps the user's order; None if there is nothing to reorder.
        top: how to make calls not needed for the order only for the first rows; None otherwise.
        query_writes: a SELECT that changes tables (INTO, a writing WITH).
        stops_early: PostgreSQL only: a LIMIT may need few rows, so a round asks a few at a time.
        cursor_rows: PostgreSQL only: how a cursor makes calls as its rows are fetched; None
            otherwise.
        with_writes: the WITH writes; then ``collect_sql`` writes too.
    """

    text: str
    kind: StatementKind
    engine_sql: RewrittenSql
    explain: Explain = Explain.NO
    explained: StatementPlan | None = None
    explain_json: bool = False
    rows_sql: RewrittenSql | None = None
    sites: tuple[CallSite, ...] = ()
    forms: tuple[CallForm, ...] = ()
    collect_sql: RewrittenSql | None = None
    stop_after_rows: int | None = None
    admin_views: frozenset[str] = frozenset()
    returning_sql: RewrittenSql | None = None
    shows: bool = False
    dialect: Dialect = Dialect.DUCKDB
    stream: StreamPlan | None = None
    why_not_stream: str = ""
    filters: FilterPlan | None = None
    top: StreamPlan | None = None
    query_writes: bool = False
    stops_early: bool = False
    with_writes: bool = False
    cursor_rows: CursorRows | None = None

    @property
    def writes(self) -> bool:
        """Return whether running the statement changes tables or files."""
        changes = self.kind.writes or self.query_writes
        return changes and self.explain in (Explain.NO, Explain.ANALYZE)


_SHOWS: Final = frozenset({"DESCRIBE", "DESC", "SUMMARIZE", "PRAGMA"})


def plan_statement(
    text: str, *, key_base: int = 0, dialect: Dialect = Dialect.DUCKDB
) -> StatementPlan:
    """Plan one statement.

    Args:
        text: exactly one statement.
        key_base: first form key to give out, a multiple of MAX_FORMS; different in each session.
        dialect: the target engine.

    Raises:
        SqlSyntaxError: a string, bracket or comment has no end.
        UdfArgumentError: an AI call with a wrong argument.
        FeatureNotSupportedError: AI calls in an unsupported place.
    """
    tokens = tokenize(text)
    calls = find_calls(tokens)
    options = explain_options(tokens)
    if options is not None and (calls or options.estimate):
        return _explained(text, tokens, calls, options, key_base, dialect)
    kind = classify(tokens if options is None else tokens[options.start :])
    templates = {found.first: found for found in find_templates(tokens)}
    parameters = parameter_names(tokens, dialect)
    if not calls:
        bare = SqlRewriter(text, tokens, {}, templates, {}, parameters, dialect=dialect)
        return _without_calls(text, tokens, kind, bare, _mode(options))
    refuse_statement(tokens, kind, dialect, position=tokens[calls[0].first].start + 1)
    body = text[tokens[0].start :]
    placement = place_calls(body, *_shifted(tokens, calls), dialect)
    refuse_misplaced(tokens, calls, placement)
    sites = call_sites(tokens, calls, placement, key_base)
    sources = row_sources(tokens, calls, placement, dialect)
    renderings = {
        call.first: (call, CallRendering(site.form.key, kept, sources.get(call.first, ("", ""))))
        for call, (site, kept) in zip(calls, sites, strict=True)
    }
    names = missing_aliases(text, tokens, calls, dialect)
    write = partial(
        SqlRewriter, text, tokens, renderings, templates, names, parameters, dialect=dialect
    )
    rewriter = write()
    late = write(late=late_items(tokens, text, calls)) if dialect is Dialect.DUCKDB else rewriter
    returning = columns_form(tokens, kind)
    collect = _collect_form(tokens, kind, dialect)
    query_changes = kind is StatementKind.QUERY and query_writes(tokens)
    filters, may_stop = _filters(tokens, placement, late, kind)
    whole = late.rewrite([(0, len(tokens))])
    writes = kind.writes or query_changes
    stream, why_not = _stream(tokens, calls, placement, rewriter, writes=writes)
    return StatementPlan(
        text=text,
        kind=kind,
        engine_sql=whole if filters is None else filters.ordered(range(len(filters.filters))),
        filters=filters,
        top=None if writes or filters else top_plan(tokens, calls, placement, rewriter),
        sites=tuple(site for site, _ in sites),
        forms=tuple({site.form.key: site.form for site, _ in sites}.values()),
        collect_sql=late.rewrite(collect.pieces) if collect else None,
        stop_after_rows=placement.stop_after_rows if kind is StatementKind.QUERY else None,
        admin_views=admin_views_in(tokens),
        returning_sql=rewriter.rewrite(returning) if returning else None,
        dialect=dialect,
        stream=stream,
        why_not_stream=why_not,
        query_writes=query_changes,
        with_writes=with_writes(tokens),
        stops_early=may_stop,
        cursor_rows=cursor_rows(tokens, placement, rewriter, kind),
    )


def _collect_form(tokens: list[Token], kind: StatementKind, dialect: Dialect) -> CollectForm | None:
    if not kind.writes:
        return None
    if dialect is Dialect.DUCKDB and kind is not StatementKind.COPY and with_writes(tokens):
        return None  # The SELECT would write, and need an undo like the statement itself.
    return collect_form(tokens, kind)


def _filters(
    tokens: list[Token], placement: Placement, rewriter: SqlRewriter, kind: StatementKind
) -> tuple[FilterPlan | None, bool]:
    """Write the filters in order; also return whether a LIMIT may stop them on PostgreSQL."""
    if kind is not StatementKind.QUERY:
        return None, False
    if rewriter.dialect is not Dialect.POSTGRES:
        return filter_plan(tokens, placement, rewriter), False
    early = early_rows(tokens, placement, rewriter)
    if early is not None:
        return early, True
    may_stop = placement.stop_after_rows is not None
    may_stop = may_stop or stops_early(placement.tree, ordered=False)
    return filter_plan(tokens, placement, rewriter), may_stop


def _without_calls(
    text: str, tokens: list[Token], kind: StatementKind, bare: SqlRewriter, explain: Explain
) -> StatementPlan:
    returning = columns_form(tokens, kind)
    return StatementPlan(
        text,
        kind,
        bare.rewrite([(0, len(tokens))]),
        explain,
        admin_views=admin_views_in(tokens),
        returning_sql=bare.rewrite(returning) if returning else None,
        shows=bool(tokens) and tokens[0].upper in _SHOWS,
        dialect=bare.dialect,
    )


def _stream(
    tokens: list[Token],
    calls: list[FoundCall],
    placement: Placement,
    rewriter: SqlRewriter,
    *,
    writes: bool,
) -> tuple[StreamPlan | None, str]:
    if writes:
        return None, "it writes"
    if rewriter.dialect is not Dialect.DUCKDB:
        return None, "PostgreSQL runs it whole"
    try:
        return stream_plan(tokens, calls, placement, rewriter), ""
    except NotStreamableError as reason:
        return None, str(reason)


def _mode(options: ExplainOptions | None) -> Explain:
    if options is None:
        return Explain.NO
    if options.estimate:
        return Explain.ESTIMATE
    return Explain.ANALYZE if options.analyze else Explain.PLAN


def _explained(
    text: str,
    tokens: list[Token],
    calls: list[FoundCall],
    options: ExplainOptions,
    key_base: int,
    dialect: Dialect,
) -> StatementPlan:
    """Plan an EXPLAIN around the plan of the explained statement; text positions stay."""
    options.check()
    start = tokens[options.start].start if options.start < len(tokens) else len(text)
    query = SqlText(" " * start + text[start:], tokens[options.start :])
    inner = plan_statement(query, key_base=key_base, dialect=dialect)
    if inner.explain is not Explain.NO:
        raise SqlSyntaxError("EXPLAIN can't explain an EXPLAIN", position=start + 1)
    body, analyze = inner.engine_sql, options.analyze
    if calls and options.estimate and dialect is Dialect.POSTGRES:
        # A run on PostgreSQL is rolled back, so PostgreSQL itself can report the calls to be made.
        body, analyze = inner.collect_sql or body, True
    prefix = options.engine_prefix(dialect, analyze=analyze)
    bound = row_bound(tokens, options.start, calls) if options.estimate else None
    parameters = parameter_names(tokens, dialect)
    bare = SqlRewriter(text, tokens, {}, {}, {}, parameters, dialect=dialect)
    return replace(
        inner,
        text=text,
        engine_sql=explaining(prefix, body),
        explain=_mode(options),
        explained=inner,
        explain_json=options.as_json,
        rows_sql=bare.rewrite(bound) if bound is not None else None,
        collect_sql=None,
        returning_sql=None,
    )


def _shifted(tokens: list[Token], calls: list[FoundCall]) -> tuple[list[Token], list[FoundCall]]:
    """Shift token offsets for a text that starts at the first token."""
    offset = tokens[0].start
    if not offset:
        return tokens, calls
    moved = [token._replace(start=token.start - offset, end=token.end - offset) for token in tokens]
    return moved, calls


class SqlStatement(SqlText):
    """A statement of DuckDB's dialect.

    Attributes:
        _plan: None before the first plan, always for long text, and after a plan with AI calls was
            taken.
    """

    __slots__ = ("_plan",)
    _plan: StatementPlan | None

    def __new__(cls, text: str, tokens: list[Token] | None = None) -> Self:
        """Make an unplanned statement."""
        self = super().__new__(cls, text, tokens)
        self._plan = None
        return self

    def plan(self, new_key_base: Callable[[], int]) -> StatementPlan:
        """Plan the statement for a description; ``take_plan`` will return the same plan.

        Args:
            new_key_base: draws a secret key base; called only to make a plan.

        Raises:
            UserError: as ``plan_statement``.
        """
        plan = self._plan or plan_statement(self, key_base=new_key_base())
        if not self.is_long:
            self._plan = plan
        return plan

    def take_plan(self, new_key_base: Callable[[], int]) -> StatementPlan:
        """Plan the statement for a run; arguments and errors as in ``plan``."""
        plan = self.plan(new_key_base)
        if plan.forms:
            self._plan = None
        return plan

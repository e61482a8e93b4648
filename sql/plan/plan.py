"""The plan of one statement: kind, AI calls, and the texts for the engine.

``plan_statement`` is the entry point of the room: text in, frozen plan out. It refuses invalid
statements before anything runs; it knows no tables and never executes anything.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

from tierkv.kvcore.errors import FeatureNotSupportedError, SqlSyntaxError
from tierkv.sql.calls.aggregate_places import refuse_misplaced
from tierkv.sql.calls.ai_call import CallForm
from tierkv.sql.calls.calls import FoundCall, find_calls, find_templates
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import DOCUMENTS
from tierkv.sql.calls.placement import Place, Placement, place_calls
from tierkv.sql.calls.same_calls import call_identities
from tierkv.sql.calls.static_prefix import static_prefix
from tierkv.sql.plan.changes import query_writes, with_writes, writing_bodies
from tierkv.sql.plan.collect import CollectForm, collect_form, columns_form
from tierkv.sql.plan.early_rows import CursorRows, cursor_rows, early_rows, row_bound, stops_early
from tierkv.sql.plan.explain_options import ExplainOptions, explain_options, explaining
from tierkv.sql.plan.filter_plan import FilterPlan, filter_plan
from tierkv.sql.plan.late_items import late_items
from tierkv.sql.plan.rewrite import CallRendering, RewrittenSql, SqlRewriter, parameter_names
from tierkv.sql.plan.row_sources import row_sources
from tierkv.sql.plan.select_list import missing_aliases
from tierkv.sql.plan.stream_plan import StreamPlan, stream_plan, top_plan
from tierkv.sql.plan.stream_shape import NotStreamableError
from tierkv.sql.text.clauses import begins_clause
from tierkv.sql.text.lexer import SqlText, Token, TokenKind, name_value, tokenize
from tierkv.sql.text.statement import StatementKind, classify, command_name
from tierkv.sql.views import admin_views_in

MAX_FORMS: Final = 4096
"""Different AI calls in one statement; the low bits of a form key."""


class Explain(StrEnum):
    """Kind of EXPLAIN."""

    NO = "no"
    PLAN = "plan"
    ESTIMATE = "estimate"
    ANALYZE = "analyze"


@dataclass(frozen=True, slots=True)
class CallSite:
    """One AI call as written; positions count characters from 1.

    Attributes:
        arguments: start of each argument's value, by parameter name.
        shared_head: text at the beginning of every row's prompt, as far as known from the
            statement's text; for display (sql/calls/static_prefix.py).
    """

    number: int
    function: str
    clause: str
    stage: int
    position: int
    form: CallForm
    arguments: tuple[tuple[str, int], ...] = ()
    shared_head: str = ""


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


_MAY_HOLD_CALLS: Final = frozenset(
    {
        StatementKind.QUERY,
        StatementKind.INSERT,
        StatementKind.UPDATE,
        StatementKind.DELETE,
        StatementKind.CREATE_TABLE_AS,
        StatementKind.COPY,
    }
)
_VOLATILE: Final = frozenset(
    {
        "random",
        "gen_random_uuid",
        "uuid",
        "uuidv4",
        "uuidv7",
        "nextval",
        "setseed",
        "clock_timestamp",
        "statement_timestamp",
        "timeofday",
    }
)
_SESSION_LOCKS: Final = frozenset(
    f"pg_{what}{shared}"
    for what in ("advisory_lock", "try_advisory_lock", "advisory_unlock")
    for shared in ("", "_shared")
) | {"pg_advisory_unlock_all"}
_SHOWS: Final = frozenset({"DESCRIBE", "DESC", "SUMMARIZE", "PRAGMA"})
_MEMBERSHIP: Final = frozenset({"IN", "ANY", "ALL", "SOME"})
_SHARED_TEXT: Final = frozenset({"GROUP", "OVER", "DISTINCT", "WINDOW"})


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
    _refuse(tokens, kind, dialect, tokens[calls[0].first].start + 1)
    body = text[tokens[0].start :]
    placement = place_calls(body, *_shifted(tokens, calls), dialect)
    refuse_misplaced(tokens, calls, placement)
    sites = _sites(tokens, calls, placement, key_base)
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


def _refuse(tokens: list[Token], kind: StatementKind, dialect: Dialect, position: int) -> None:
    # PostgreSQL runs a MERGE under a savepoint; DuckDB has no savepoints, and no SELECT meets the
    # calls of a MERGE.
    merges = kind is StatementKind.MERGE and dialect is Dialect.POSTGRES
    if kind not in _MAY_HOLD_CALLS and not merges:
        raise FeatureNotSupportedError(
            f"{command_name(tokens)} can't hold AI calls",
            position=position,
            hint="Put the AI call in a SELECT, INSERT, UPDATE, DELETE or CREATE TABLE AS, "
            "and use the table it fills here.",
        )
    for index, token in enumerate(tokens):
        _refuse_volatile(tokens, index, token)
    for _, verb in writing_bodies(tokens) if dialect is Dialect.DUCKDB else ():
        if tokens[verb].upper == "COPY":
            raise FeatureNotSupportedError(
                "COPY in a WITH can't stand in a statement with AI calls, which is run more than "
                "once: no transaction takes back what is written to files",
                position=tokens[verb].start + 1,
                hint="Run the COPY by itself.",
            )


def _refuse_volatile(tokens: list[Token], index: int, token: Token) -> None:
    following = tokens[index + 1].text if index + 1 < len(tokens) else ""
    is_call = token.kind in (TokenKind.WORD, TokenKind.QUOTED) and following == "("
    name = name_value(token)
    if is_call and name in _SESSION_LOCKS:
        raise FeatureNotSupportedError(
            f"{name}() can't stand in a statement with AI calls: each run of it would take or "
            "release a lock of the session once more",
            position=token.start + 1,
            hint="Use pg_advisory_xact_lock() or pg_try_advisory_xact_lock(), which the "
            "transaction gives back, or a statement of its own.",
        )
    volatile = is_call and name in _VOLATILE
    sampled = (token.upper == "TABLESAMPLE" and begins_clause(tokens, index)) or (
        token.upper == "SAMPLE" and index and tokens[index - 1].upper == "USING"
    )
    if not volatile and not sampled:
        return
    what = f"{name}()" if volatile else "sampling"
    raise FeatureNotSupportedError(
        f"{what} can't stand in a statement with AI calls, which is run more than once",
        position=token.start + 1,
        hint="Store it first: CREATE TEMP TABLE t AS SELECT ..., then call the AI over t.",
    )


def _sites(
    tokens: list[Token], calls: list[FoundCall], placement: Placement, key_base: int
) -> list[tuple[CallSite, bool]]:
    """Group calls into forms; return the site of each call and whether it is kept in place."""
    words = {token.upper for token in tokens}
    shares_text = not words.isdisjoint(_SHARED_TEXT)
    # In an unparsed statement with a membership test any call may be inside the test.
    names_membership = placement.tree is None and not words.isdisjoint(_MEMBERSHIP)
    groups: dict[Hashable, list[int]] = {}
    kept_of: list[bool] = []
    identities = call_identities(tokens, calls)
    for number, call in enumerate(calls):
        constant = not any(_is_column(tokens, index) for index in range(call.first + 2, call.last))
        place = placement.place(number)
        in_membership = names_membership or place.in_membership
        kept = place.kept_in_place or (constant and not shares_text and not in_membership)
        kept_of.append(kept)
        groups.setdefault((kept, identities[number]), []).append(number)
    if len(groups) > MAX_FORMS:
        number = list(groups.values())[MAX_FORMS][0]
        raise FeatureNotSupportedError(
            f"more than {MAX_FORMS} different AI calls in a statement",
            position=tokens[calls[number].first].start + 1,
            hint="Put what differs into rows: one AI call over a table.",
        )
    forms: dict[int, CallForm] = {}
    for order, numbers in enumerate(groups.values()):
        form = _form(key_base + order, calls[numbers[0]], [placement.place(n) for n in numbers])
        forms.update(dict.fromkeys(numbers, form))
    return [
        (
            CallSite(
                number=number + 1,
                function=call.function.name,
                clause=placement.place(number).clause,
                stage=placement.place(number).stage,
                position=tokens[call.first].start + 1,
                form=forms[number],
                arguments=tuple(
                    (name, tokens[argument.first].start + 1)
                    for name, argument in call.arguments.items()
                ),
                shared_head=_shared_head(tokens, call),
            ),
            kept_of[number],
        )
        for number, call in enumerate(calls)
    ]


def _shared_head(tokens: list[Token], call: FoundCall) -> str:
    """Return the common beginning of every row's prompt; documents would come before it."""
    prompt = call.arguments.get("prompt")
    if prompt is None or prompt.constant or DOCUMENTS in call.arguments:
        return ""
    return static_prefix(tokens[prompt.first : prompt.last])


def _form(key: int, call: FoundCall, places: list[Place]) -> CallForm:
    return CallForm(
        key=key,
        function=call.function,
        constants=call.constants(),
        row_parameters=call.row_parameters,
        packed=call.packed,
        always_null=any(
            argument.constant and argument.value is None and call.function.parameter(name).strict
            for name, argument in call.arguments.items()
        ),
        stage=min(place.stage for place in places),
        filters=all(place.filters for place in places),
        unordered=call.gathering is not None and not call.gathering.ordered,
    )


def _is_column(tokens: list[Token], index: int) -> bool:
    """Return whether a token may name a column; types and keywords count too, harmlessly."""
    token = tokens[index]
    if token.kind is TokenKind.QUOTED:
        return True
    if token.kind is not TokenKind.WORD or token.upper in ("NULL", "TRUE", "FALSE", "AS"):
        return False
    following = tokens[index + 1].text if index + 1 < len(tokens) else ""
    return following not in ("(", "=>", ":=", ":") and tokens[index - 1].text != "::"

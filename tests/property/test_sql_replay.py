"""Random tables and random queries: replay answers what a plain function answers."""

from __future__ import annotations

import duckdb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fix_sql import SqlExamples, answer_text, label_odds, short_texts
from tierkv.dbfront.statement.session import DuckDbSession

texts = st.one_of(st.none(), st.sampled_from(["", "a", "b'b", "é\n", "yes"]), short_texts(5))
tables = st.lists(st.tuples(st.integers(0, 3), texts), min_size=1, max_size=25)
words = st.sampled_from(["yes", "no", "maybe", "red", "blue"])


@st.composite
def scalars(draw: st.DrawFn, depth: int = 2) -> str:
    """An expression over ``p``, ``g`` and AI calls."""
    leaf = draw(st.sampled_from([
        "p", "'k'", "p || g", "ai_generate(p)", "ai_generate('q' || p)",
        "ai_classify(p, ['a', 'b'])",
    ]))  # fmt: skip
    if depth == 0:
        return leaf
    inner = scalars(depth - 1)
    shape = draw(st.integers(0, 5))
    if shape == 0:
        return f"ai_generate({draw(inner)})"
    if shape == 1:
        return f"coalesce({draw(inner)}, {draw(inner)})"
    if shape == 2:
        return f"CASE WHEN {draw(conditions(depth - 1))} THEN {draw(inner)} ELSE {draw(inner)} END"
    return f"upper({draw(inner)})" if shape == 3 else leaf


@st.composite
def conditions(draw: st.DrawFn, depth: int = 1) -> str:
    """A predicate over AI calls."""
    value = draw(scalars(min(depth, 1)))
    shapes = [f"{value} = '{draw(words)}'", f"{value} IS NOT NULL", "g > 1"]
    shapes += [f"ai_filter('Is it?', {value})", f"NOT ai_filter('Is it?', {value})"]
    if depth > 0:
        left, right = draw(conditions(depth - 1)), draw(conditions(depth - 1))
        shapes += [f"({left} OR {right})", f"({left} AND {right})", f"NOT ({left})"]
    return draw(st.sampled_from(shapes))


@st.composite
def queries(draw: st.DrawFn) -> str:
    value, where = draw(scalars()), draw(conditions())
    return draw(
        st.sampled_from(
            [
                f"SELECT i, {value} AS v FROM t WHERE {where} ORDER BY i",
                f"SELECT {value} AS v, count(*) AS c FROM t WHERE {where} GROUP BY 1 ORDER BY ALL",
                f"SELECT i FROM t WHERE {where} ORDER BY {value} || '', i LIMIT 3",
                f"SELECT i, (SELECT max({value}) FROM t WHERE t.i = x.i) AS v FROM t x ORDER BY i",
                f"SELECT DISTINCT {value} AS v FROM t ORDER BY v",
                f"SELECT i FROM t WHERE {where} LIMIT 4",
            ]
        )
    )


def is_it(predicate: str | None, text: str | None) -> bool | None:
    """What ai_filter says."""
    if predicate is None or text is None:
        return None
    question = f"Question: {predicate}\nAnswer yes or no."
    odds = label_odds("\n".join(filter(None, (text, question))), ("yes", "Yes", "no", "No"))
    return odds[0] + odds[1] > 0.5


def category(text: str | None, categories: list[str]) -> str | None:
    """What ai_classify says."""
    if text is None:
        return None
    question = f"Question: Which category fits best: {', '.join(categories)}?"
    odds = label_odds("\n".join(filter(None, (text, question))), categories)
    return categories[odds.index(max(odds))]


def replayed(
    examples: SqlExamples, rows: list[tuple[int, str | None]], query: str
) -> list[tuple[object, ...]]:
    async def read(session: DuckDbSession) -> list[tuple[object, ...]]:
        await session.execute("CREATE TABLE t (i INT, g INT, p VARCHAR)")
        for number, (group, text) in enumerate(rows):
            await session.execute("INSERT INTO t VALUES ($1, $2, $3)", [number, group, text])
        return list((await session.execute(query)).rows)

    return examples.play(read)


def make_plain_functions(plain: duckdb.DuckDBPyConnection) -> None:
    plain.create_function(
        "ai_generate",
        lambda prompt: answer_text(prompt),
        ["VARCHAR"],
        "VARCHAR",
        null_handling="special",
    )
    plain.create_function(
        "ai_filter", is_it, ["VARCHAR", "VARCHAR"], "BOOLEAN", null_handling="special"
    )
    plain.create_function(
        "ai_classify", category, ["VARCHAR", "VARCHAR[]"], "VARCHAR", null_handling="special"
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=tables, query=queries())
def test_replay_equals_a_plain_function(
    examples: SqlExamples, rows: list[tuple[int, str | None]], query: str
) -> None:
    plain = examples.plain(make_plain_functions)
    plain.execute("CREATE TABLE t (i INT, g INT, p VARCHAR)")
    for number, (group, text) in enumerate(rows):
        plain.execute("INSERT INTO t VALUES ($1, $2, $3)", [number, group, text])
    expected = plain.execute(query).fetchall()
    matching = plain.execute(query.removesuffix(" LIMIT 4")).fetchall()
    got = replayed(examples, rows, query)
    if query.endswith("LIMIT 4"):
        # Any four matching rows are right; which ones may differ when LIMIT stops early.
        assert set(got) <= set(matching)
        assert len(got) == len(expected)
    else:
        assert got == expected

"""Plans as text: each paragraph of tests/golden/sql_plans.txt is a statement and its plan.

After an intended change, write the file anew with
``python tests/unit/sql/test_plan_golden.py`` and review the diff. Every rewritten query is also
bound by DuckDB, so that the golden text can't hold SQL the engine refuses.
"""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from tierkv.kvcore.errors import UserError
from tierkv.sql.plan.plan import StatementPlan, plan_statement

GOLDEN = Path(__file__).parents[2] / "golden" / "sql_plans.txt"


def describe(plan: StatementPlan) -> str:
    lines = [f"kind: {plan.kind}" + (f", explain {plan.explain}" if plan.explain != "no" else "")]
    lines.append(f"engine: {plan.engine_sql.text}")
    if plan.collect_sql is not None:
        lines.append(f"collect: {plan.collect_sql.text}")
    if plan.returning_sql is not None:
        lines.append(f"returning: {plan.returning_sql.text}")
    lines += [
        f"call {site.number}: {site.clause}, stage {site.stage}, form {site.form.key}, "
        f"at {site.position}{', filters' if site.form.filters else ''}"
        for site in plan.sites
    ]
    if plan.stop_after_rows is not None:
        lines.append(f"stops after: {plan.stop_after_rows}")
    return "\n".join(lines)


def plan_text(statement: str) -> str:
    try:
        return describe(plan_statement(statement))
    except UserError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return f"error: {error.sqlstate} at {error.position}: {error.message}{hint}"


def cases() -> list[tuple[str, str]]:
    """Return (statement, expected plan) pairs."""
    paragraphs = GOLDEN.read_text(encoding="utf-8").strip().split("\n\n")
    pairs = [paragraph.partition("\n") for paragraph in paragraphs if paragraph[:2] != "# "]
    return [(statement.removeprefix("> "), plan) for statement, _, plan in pairs]


@pytest.mark.parametrize(("statement", "expected"), cases())
def test_plan_is_the_golden_one(statement: str, expected: str) -> None:
    assert plan_text(statement) == expected


@pytest.fixture(scope="module")
def engine() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for name in ("call", "call_kept"):
        connection.execute(f"CREATE MACRO tierkv_ai_{name}(a, b) AS b::VARCHAR")
    connection.execute("CREATE TABLE docs (id INT PRIMARY KEY, topic INT, body VARCHAR)")
    connection.execute("CREATE TABLE topics (id INT, name VARCHAR, model VARCHAR)")
    return connection


@pytest.mark.parametrize("statement", [s for s, plan in cases() if not plan.startswith("error")])
def test_rewritten_text_binds(statement: str, engine: duckdb.DuckDBPyConnection) -> None:
    plan = plan_statement(statement)
    for rewritten in (plan.engine_sql, plan.collect_sql, plan.returning_sql):
        if rewritten is not None and plan.kind not in ("copy", "set", "show"):
            engine.begin()
            try:
                engine.execute(rewritten.text, dict.fromkeys(rewritten.parameters, "1") or None)
            finally:
                engine.rollback()


def test_positions_map_back_to_the_users_text() -> None:
    text = "SELECT ai_generate('a', model => 'm') AS x, missing FROM docs"
    engine_sql = plan_statement(text).engine_sql
    position = engine_sql.text.index("missing") + 1
    assert engine_sql.source_position(position) == text.index("missing") + 1
    assert engine_sql.source_position(0) == 0


if __name__ == "__main__":
    old = [statement for statement, _ in cases()]
    body = "\n\n".join(f"> {statement}\n{plan_text(statement)}" for statement in old)
    head = "# Statements and their plans; see tests/unit/sql/test_plan_golden.py."
    GOLDEN.write_text(f"{head}\n\n{body}\n", encoding="utf-8")

"""Every query shape against a reference: DuckDB with a plain Python function that answers at once.

The reference runs the same text on a connection of its own, where ai_generate is an ordinary
deterministic function. Rows, column types and row order must be equal.
"""

from __future__ import annotations

import duckdb
import pytest

from tests.fix_sql import TABLES, InstantGenerator, answer_text
from tierkv.dbfront.statement.session import DuckDbSession

QUERIES = {
    "select list": "SELECT id, ai_generate(body) FROM docs ORDER BY id",
    "expression": "SELECT id, upper(ai_generate('x ' || body)) || '!' FROM docs ORDER BY id",
    "two calls": "SELECT id, ai_generate(body) a, ai_generate('b' || body) b FROM docs ORDER BY 1",
    "constant": "SELECT ai_generate('hello') AS a",
    "constant over rows": "SELECT id, ai_generate('hello') AS a FROM docs ORDER BY id",
    "constant over no rows": "SELECT ai_generate('hello') AS a FROM docs WHERE id < 0",
    "number prompt": "SELECT id, ai_generate(CAST(id AS VARCHAR)) AS a FROM docs ORDER BY id",
    "where": "SELECT id FROM docs WHERE ai_generate(body) = 'yes' ORDER BY id",
    "where not": "SELECT id FROM docs WHERE NOT (ai_generate(body) LIKE 'y%') ORDER BY id",
    "where is null": "SELECT id FROM docs WHERE ai_generate(body) IS NULL ORDER BY id",
    "where or": "SELECT id FROM docs WHERE ai_generate(body) = 'no' "
    "OR ai_generate('z' || body) = 'red' ORDER BY id",
    "where and": "SELECT id FROM docs WHERE topic = 1 AND ai_generate(body) <> 'no' ORDER BY id",
    "where and select": "SELECT id, ai_generate('s' || body) a FROM docs "
    "WHERE ai_generate(body) = 'no' ORDER BY id",
    "where in": "SELECT id FROM docs WHERE ai_generate(body) IN ('no', 'red') ORDER BY id",
    "inner join": "SELECT d.id, ai_generate(d.body || t.name) a FROM docs d "
    "JOIN topics t ON d.topic = t.id ORDER BY d.id",
    "join on": "SELECT d.id, t.id FROM docs d JOIN topics t "
    "ON d.topic = t.id AND ai_generate(d.body) = 'yes' ORDER BY 1, 2",
    "join on both sides": "SELECT d.id, t.id FROM docs d JOIN topics t "
    "ON ai_generate(d.body || t.name) = 'yes' ORDER BY 1, 2",
    "left join on": "SELECT d.id, t.name FROM docs d LEFT JOIN topics t "
    "ON d.topic = t.id AND ai_generate(d.body) = 'yes' ORDER BY 1, 2",
    "full join": "SELECT d.id, t.id, ai_generate(t.name) a FROM docs d "
    "FULL JOIN topics t ON d.topic = t.id ORDER BY 1, 2",
    "join on answers": "SELECT a.id, b.id FROM docs a JOIN docs b "
    "ON ai_generate(a.body) = ai_generate(b.body) AND a.id < b.id ORDER BY 1, 2",
    "group by": "SELECT ai_generate(body) AS a, count(*) FROM docs GROUP BY ai_generate(body) "
    "ORDER BY 1 NULLS LAST",
    "group by another spelling": "SELECT ai_generate(d.body || 'x') AS a, count(*) FROM docs d "
    "GROUP BY ai_generate((\"body\") || E'x') ORDER BY 1 NULLS LAST",
    "group by alias": "SELECT ai_generate(body) AS a, count(*) c FROM docs GROUP BY a ORDER BY a",
    "group by all": "SELECT ai_generate(body) a, sum(id) s FROM docs GROUP BY ALL ORDER BY a",
    "group by number": "SELECT ai_generate(body) a, sum(id) s FROM docs GROUP BY 1 ORDER BY 1",
    "having": "SELECT topic, count(*) c FROM docs GROUP BY topic "
    "HAVING ai_generate(min(body)) <> 'yes' ORDER BY topic",
    "aggregate of answers": "SELECT topic, max(ai_generate(body)) m FROM docs GROUP BY topic "
    "ORDER BY topic",
    "answer over aggregate": "SELECT topic, ai_generate(string_agg(body, ',' ORDER BY id)) a "
    "FROM docs GROUP BY topic ORDER BY topic",
    "filter clause": "SELECT topic, count(*) FILTER (WHERE ai_generate(body) = 'yes') c FROM docs "
    "GROUP BY topic ORDER BY topic",
    "ordered list": "SELECT list(id ORDER BY ai_generate(body), id) l FROM docs",
    "order by": "SELECT id FROM docs ORDER BY ai_generate(body), id",
    "order by limit": "SELECT id, ai_generate(body) a FROM docs ORDER BY ai_generate(body), id "
    "LIMIT 5",
    "order other limit": "SELECT id, ai_generate(body) a FROM docs ORDER BY id DESC LIMIT 3",
    "distinct": "SELECT DISTINCT ai_generate(body) a FROM docs ORDER BY a",
    "distinct on": "SELECT DISTINCT ON (ai_generate(body)) ai_generate(body) a, id FROM docs "
    "ORDER BY ai_generate(body), id",
    "window partition": "SELECT id, row_number() OVER (PARTITION BY ai_generate(body) ORDER BY id) "
    "r FROM docs ORDER BY id",
    "window order": "SELECT id, rank() OVER (ORDER BY ai_generate(body)) r FROM docs ORDER BY id",
    "window over answer": "SELECT id, lag(ai_generate(body)) OVER (ORDER BY id) l FROM docs "
    "ORDER BY id",
    "qualify": "SELECT id FROM docs QUALIFY row_number() OVER (PARTITION BY ai_generate(body) "
    "ORDER BY id) = 1 ORDER BY id",
    "cte": "WITH l AS (SELECT id, ai_generate(body) AS a FROM docs) SELECT a, count(*) c FROM l "
    "GROUP BY a ORDER BY a",
    "cte used twice": "WITH l AS (SELECT id, ai_generate(body) AS a FROM docs) SELECT x.id, y.id "
    "FROM l x JOIN l y ON x.a = y.a AND x.id < y.id ORDER BY 1, 2",
    "materialized cte": "WITH l AS MATERIALIZED (SELECT id, ai_generate(body) AS a FROM docs) "
    "SELECT id FROM l WHERE a = 'yes' ORDER BY id",
    "recursive cte": "WITH RECURSIVE r AS (SELECT 1 AS n, ai_generate('start') AS a UNION ALL "
    "SELECT n + 1, ai_generate(a || n) FROM r WHERE n < 5) SELECT * FROM r ORDER BY n",
    "from subquery": "SELECT a FROM (SELECT id, ai_generate(body) a FROM docs) s WHERE a <> 'no' "
    "ORDER BY id",
    "unnamed in subquery": "SELECT s.ai_generate FROM (SELECT id, ai_generate(body) AS ai_generate "
    "FROM docs) s ORDER BY s.id",
    "scalar subquery": "SELECT (SELECT ai_generate(name) FROM topics WHERE id = 0) a",
    "correlated scalar": "SELECT id, (SELECT ai_generate(t.name || d.body) FROM topics t "
    "WHERE t.id = d.topic) a FROM docs d ORDER BY id",
    "correlated aggregate": "SELECT t.id, (SELECT max(ai_generate(d.body)) FROM docs d "
    "WHERE d.topic = t.id) a FROM topics t ORDER BY 1",
    "exists": "SELECT t.id FROM topics t WHERE EXISTS (SELECT 1 FROM docs d "
    "WHERE d.topic = t.id AND ai_generate(d.body) = 'yes') ORDER BY 1",
    "not exists": "SELECT t.id FROM topics t WHERE NOT EXISTS (SELECT 1 FROM docs d "
    "WHERE d.topic = t.id AND ai_generate(d.body) = 'maybe') ORDER BY 1",
    "in subquery": "SELECT id FROM topics WHERE id IN (SELECT topic FROM docs "
    "WHERE ai_generate(body) = 'yes') ORDER BY 1",
    "in correlated": "SELECT id, 'music' IN (SELECT name FROM topics t WHERE t.id = d.topic "
    "AND ai_generate('b' || t.id) IS NOT NULL) i FROM docs d ORDER BY id",
    "not in correlated": "SELECT id FROM docs d WHERE 'x' NOT IN (SELECT name FROM topics t "
    "WHERE t.id = d.topic AND ai_generate('b' || t.id) IS NOT NULL) ORDER BY id",
    "not in, constant": "SELECT id FROM docs d WHERE 'x' NOT IN (SELECT name FROM topics t "
    "WHERE t.id = d.topic AND ai_generate('b') IS NOT NULL) ORDER BY id",
    "not in answers": "SELECT id FROM docs d WHERE 'no' NOT IN (SELECT ai_generate(name) "
    "FROM topics t WHERE t.id = d.topic) ORDER BY id",
    "not in, below a join": "SELECT id FROM docs d WHERE 'x' NOT IN (SELECT t.name FROM topics t "
    "JOIN topics s ON s.id = t.id AND ai_generate('b' || s.id) <> '' WHERE t.id = d.topic) "
    "ORDER BY id",
    "not in, deeper": "SELECT id FROM docs d WHERE 'x' NOT IN (SELECT name FROM topics t "
    "WHERE t.id = d.topic AND EXISTS (SELECT 1 FROM topics s WHERE s.id = t.id "
    "AND ai_generate('b' || s.id) <> '')) ORDER BY id",
    "not in, lateral": "SELECT d.id, l.n FROM docs d, LATERAL (SELECT count(*) n FROM topics t "
    "WHERE 'x' NOT IN (SELECT name FROM topics s WHERE s.id = d.topic "
    "AND ai_generate('b' || s.id) <> '')) l ORDER BY 1",
    "any": "SELECT id, 'music' = ANY (SELECT name FROM topics t WHERE t.id = d.topic "
    "AND ai_generate('b' || t.id) <> '') a FROM docs d ORDER BY id",
    "all": "SELECT id, 'x' <> ALL (SELECT name FROM topics t WHERE t.id = d.topic "
    "AND ai_generate('b' || t.id) <> '') a FROM docs d ORDER BY id",
    "anti join": "SELECT d.id FROM docs d ANTI JOIN topics t ON t.id = d.topic "
    "AND ai_generate(t.name) <> 'no' ORDER BY 1",
    "lateral and exists": "SELECT d.id, l.n FROM docs d LEFT JOIN LATERAL (SELECT max(name) n "
    "FROM topics t WHERE t.id = d.topic AND EXISTS (SELECT 1 FROM topics s WHERE s.id = t.id "
    "AND ai_generate(s.name) <> 'no')) l ON true ORDER BY 1",
    "lateral": "SELECT t.id, l.a FROM topics t, LATERAL (SELECT ai_generate(t.name) AS a) l "
    "ORDER BY 1",
    "union": "SELECT ai_generate(body) a FROM docs UNION SELECT ai_generate(name) FROM topics "
    "ORDER BY a",
    "union all": "SELECT id, ai_generate(body) a FROM docs UNION ALL SELECT id, ai_generate(name) "
    "FROM topics ORDER BY 1, 2",
    "except": "SELECT ai_generate(body) a FROM docs EXCEPT SELECT ai_generate(name) FROM topics "
    "ORDER BY a",
    "case": "SELECT id, CASE WHEN ai_generate(body) = 'yes' THEN ai_generate('t' || body) "
    "WHEN topic = 2 THEN 'two' ELSE ai_generate('e' || body) END a FROM docs ORDER BY id",
    "coalesce": "SELECT id, coalesce(ai_generate(body), ai_generate('no body'), '?') a FROM docs "
    "ORDER BY id",
    "nullif": "SELECT id, nullif(ai_generate(body), 'yes') a FROM docs ORDER BY id",
    "cast of placeholder": "SELECT id, CAST(coalesce(length(ai_generate(body))::VARCHAR, '0') AS "
    "INTEGER) a FROM docs ORDER BY id",
    "error on placeholder": "SELECT id, CAST(CASE WHEN ai_generate(body) IS NULL AND body IS NOT "
    "NULL THEN 'not a number' ELSE '7' END AS INTEGER) a FROM docs ORDER BY id",
    "nested": "SELECT id, ai_generate(ai_generate(body)) a FROM docs ORDER BY id",
    "nested twice": "SELECT ai_generate('a' || ai_generate('b' || ai_generate(name))) a "
    "FROM topics ORDER BY id",
    "values": "VALUES (1, ai_generate('a')), (2, ai_generate('b'))",
    "from first": "FROM docs SELECT id, ai_generate(body) AS a ORDER BY id",
    "list of answers": "SELECT id, [ai_generate(body), ai_generate('q')] l FROM docs ORDER BY id",
    "struct": "SELECT {'a': ai_generate(name), 'b': id} s FROM topics ORDER BY id",
    "now in prompt": "SELECT length(ai_generate('at ' || now()::VARCHAR)) > 0 AS a",
    "limit offset": "SELECT id, ai_generate(body) a FROM docs ORDER BY id LIMIT 4 OFFSET 3",
    "comment and quotes": "SELECT /* ai_generate( */ id, ai_generate($$it's $$ || body) AS a, "
    "'ai_generate(' AS t -- ai_generate(\nFROM docs ORDER BY id",
    "escape string": r"SELECT ai_generate(E'tab\t' || name) AS a FROM topics ORDER BY id",
    "parentheses": "(SELECT ai_generate(name) AS a FROM topics WHERE id = 1)",
}


def reference() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.create_function(
        "ai_generate",
        lambda prompt: answer_text(prompt),
        ["VARCHAR"],
        "VARCHAR",
        null_handling="special",
    )
    connection.execute(TABLES)
    return connection


@pytest.mark.parametrize("name", QUERIES)
async def test_shape_equals_reference(name: str, session: DuckDbSession) -> None:
    query = QUERIES[name]
    with reference() as plain:
        expected = plain.execute(query)
        types = [str(column[1]) for column in expected.description or ()]
        names = [column[0] for column in expected.description or ()]
        rows = expected.fetchall()
    result = await session.execute(query)
    assert list(result.rows) == rows
    assert result.columns is not None
    assert [column.type_name for column in result.columns] == types
    for column, plain_name in zip(result.columns, names, strict=True):
        assert column.name == plain_name or "ai_generate(" in plain_name
    described = await session.describe(query)
    assert described.columns == result.columns


@pytest.mark.parametrize("name", QUERIES)
async def test_distinct_calls_run_once_and_are_asked_for(
    name: str, session: DuckDbSession, generator: InstantGenerator
) -> None:
    asked: set[str] = set()

    def spy(prompt: str | None) -> str | None:
        if prompt is not None:
            asked.add(prompt)
        return answer_text(prompt)

    if name == "now in prompt":
        pytest.skip("the prompt holds the time")
    with reference() as plain:
        plain.create_function("ai_spy", spy, ["VARCHAR"], "VARCHAR", null_handling="special")
        plain.execute(QUERIES[name].replace("ai_generate(", "ai_spy(")).fetchall()
    await session.execute(QUERIES[name])
    assert len(generator.prompts) == len(set(generator.prompts))
    assert set(generator.prompts) <= asked, "a call was made that plain evaluation does not make"

"""A cascade behind PostgreSQL: the same rows by each as behind DuckDB, told by EXPLAIN ANALYZE."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_cascade import JUDGED, TABLE, TasteGenerator, taste
from tests.fix_postgres import RunningRelay
from tierkv.dbfront.calls.row_sample import SampleSize

pytestmark = pytest.mark.integration

CLASSIFY = "SELECT id, ai_classify(body, ARRAY['low', 'high']) FROM judged ORDER BY id"
SAMPLE = SampleSize.of(JUDGED, 0.9)


@pytest.fixture
def generator() -> TasteGenerator:
    return TasteGenerator(blur=0.1)


@pytest.fixture(params=["extended", "simple"])
def connection(
    ai_relay: RunningRelay, request: pytest.FixtureRequest
) -> Iterator[psycopg.Connection]:
    factory = psycopg.ClientCursor if request.param == "simple" else psycopg.Cursor
    with psycopg.connect(ai_relay.dsn, autocommit=True, cursor_factory=factory) as connection:
        connection.execute("DROP TABLE IF EXISTS judged")
        for statement in TABLE.split(";")[:-1]:
            connection.execute(statement)
        connection.execute("SET tierkv.max_calls = 0")
        connection.execute("SET tierkv.cascade = 0.9")
        yield connection
        connection.execute("DROP TABLE judged")


def test_the_classifier_answers_and_explain_tells(
    connection: psycopg.Connection, generator: TasteGenerator
) -> None:
    rows = connection.execute(CLASSIFY).fetchall()
    questions, vectors = generator.asked()
    assert SAMPLE.total <= questions < 0.8 * JUDGED
    assert vectors == JUDGED
    assert rows[0] == (-1, None)
    right = sum(answer == ("low" if taste(f"row {n}") < 0 else "high") for n, answer in rows[1:])
    assert right > 0.9 * JUDGED
    ((told,),) = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {CLASSIFY}").fetchall()
    (document,) = told if isinstance(told, list) else json.loads(told)
    numbers = document["AI Plan"]["Calls"][0]["Cascade"]
    assert numbers["Used"] and numbers["Model Rows"] == questions
    assert numbers["Model Rows"] + numbers["Classifier Rows"] == JUDGED
    lines = [row[0] for row in connection.execute(f"EXPLAIN ANALYZE {CLASSIFY}")]
    assert any(f"cascade 0.9: rows answered by the model {questions}, by" in line for line in lines)
    assert connection.execute(CLASSIFY).fetchall() == rows


def test_it_says_why_it_was_not_used(
    connection: psycopg.Connection, generator: TasteGenerator
) -> None:
    found: list[str] = []
    connection.add_notice_handler(lambda notice: found.append(notice.message_primary or ""))
    few = CLASSIFY.replace("ORDER", "WHERE id < 10 ORDER")
    connection.execute(few)
    reason = f"10 distinct rows, at least {SampleSize.of(10, 0.9).least_rows} are needed"
    assert found == [f"tierkv.cascade was not used for ai_classify: {reason}"]
    lines = [row[0] for row in connection.execute(f"EXPLAIN ANALYZE {few}")]
    assert any(f"cascade 0.9 not used: {reason}" in line for line in lines)
    assert generator.asked()[1] == 0


def test_a_bad_agreement_is_refused(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"above 0\.5 and below 1"):
        connection.execute("SET tierkv.cascade = 1.5")

"""A cascade over the shipped model: it agrees as promised, and no cache keeps its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import tierkv
from tierkv import dbapi
from tierkv.compute.demo_model import data
from tierkv.dbfront.calls.row_sample import SampleSize

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROWS = 500
ASKED = 0.8
TONE = "ai_classify(review, ['positive', 'negative'], 'Is the review positive or negative?')"
QUERY = f"SELECT id, {TONE} FROM reviews ORDER BY id"


@pytest.fixture(scope="module")
def database() -> Iterator[dbapi.Connection]:
    with tierkv.connect(dmp__capacity="64MiB", compute__l1_capacity="64MiB") as connection:
        connection.execute("CREATE TABLE reviews (id INTEGER, review VARCHAR)")
        for row in data.make_records(ROWS, seed=12):
            text = f"Order {row.order}. {row.review}"
            connection.execute("INSERT INTO reviews VALUES ($1, $2)", [row.record_id, text])
        yield connection


def explained(database: dbapi.Connection) -> dict[str, Any]:
    ((text,),) = database.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {QUERY}").fetchall()
    plan: dict[str, Any] = json.loads(text)["AI Plan"]
    return plan


def test_it_agrees_and_only_answers_of_the_model_are_kept(database: dbapi.Connection) -> None:
    database.execute(f"SET tierkv.cascade = {ASKED}")
    database.execute("SET tierkv.answer_cache = session")
    first = explained(database)
    told, sample = first["Calls"][0]["Cascade"], SampleSize.of(ROWS, ASKED)
    assert told["Used"], told
    assert told["Agreement at Least"] >= ASKED
    assert told["Model Rows"] + told["Classifier Rows"] == ROWS
    assert sample.total <= told["Model Rows"] < ROWS
    assert first["Totals"]["Classified Calls"] == told["Classifier Rows"]
    assert first["Totals"]["Requests"] >= told["Model Rows"] + told["Vectors"]
    # The second run finds all vectors and all answers of the model, and needs no model.
    answers = database.execute(QUERY).fetchall()
    again = explained(database)
    assert again["Calls"][0]["Cascade"] == told
    assert again["Totals"]["Requests"] == 0
    assert again["Totals"]["Cached Answers"] >= told["Model Rows"] + told["Vectors"]
    # Without the cascade, the rows of the classifier are unknown to the answer cache.
    database.execute("SET tierkv.cascade = off")
    alone = explained(database)
    assert alone["Totals"]["Requests"] >= told["Classifier Rows"]
    assert alone["Totals"]["Classified Calls"] == 0
    model = database.execute(QUERY).fetchall()
    equal = sum(one == other for one, other in zip(answers, model, strict=True))
    different = ROWS - equal
    assert different <= (1 - ASKED + 0.1) * told["Classifier Rows"]

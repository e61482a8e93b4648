"""The function family over the shipped model: right answers, and the same without the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import tierkv
from tierkv import dbapi
from tierkv.compute.demo_model import data

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROWS = data.make_records(24, seed=11)
TOPICS = ["delivery", "price", "quality", "support"]


@pytest.fixture(scope="module")
def database() -> Iterator[dbapi.Connection]:
    with tierkv.connect(dmp__capacity="64MiB", compute__l1_capacity="64MiB") as connection:
        connection.execute("CREATE TABLE notes (id INTEGER, note VARCHAR, topic VARCHAR)")
        for row in ROWS:
            connection.execute(
                "INSERT INTO notes VALUES ($1, $2, $3)", [row.record_id, row.text, row.topic]
            )
        connection.execute("SET tierkv.max_tokens = 12")
        yield connection


def by_id(database: dbapi.Connection, expression: str) -> dict[int, object]:
    rows = database.execute(f"SELECT id, {expression} FROM notes ORDER BY id").fetchall()
    return dict(rows)


def right(got: dict[int, object], expected: dict[int, object]) -> float:
    assert got.keys() == expected.keys()
    return sum(got[key] == expected[key] for key in expected) / len(expected)


def test_filter_finds_the_positive_reviews(database: dbapi.Connection) -> None:
    found = database.execute(
        "SELECT id FROM notes WHERE ai_filter('Is the review positive?', note)"
    ).fetchall()
    assert {number for (number,) in found} == {
        row.record_id for row in ROWS if row.sentiment == "positive"
    }


def test_filter_agrees_with_the_generated_answer(database: dbapi.Connection) -> None:
    question = "Is the review about price?"
    chosen = by_id(database, f"ai_filter('{question}', note)")
    said = by_id(database, f"ai_generate(note || E'\\nQuestion: {question}\\nAnswer yes or no.')")
    assert chosen == {number: text == "yes" for number, text in said.items()}


def test_classify_names_the_topic(database: dbapi.Connection) -> None:
    expected: dict[int, object] = {row.record_id: row.topic for row in ROWS}
    instructed = by_id(
        database, f"ai_classify(note, {TOPICS}, instruction => 'What is the review about?')"
    )
    assert right(instructed, expected) == 1.0
    assert right(by_id(database, f"ai_classify(note, {TOPICS})"), expected) >= 0.9


def test_classify_multi_keeps_what_fits(database: dbapi.Connection) -> None:
    got = by_id(database, f"ai_classify_multi(note, {TOPICS}, 'Is the review about {{0}}?')")
    assert right(got, {row.record_id: [row.topic] for row in ROWS}) >= 0.9


def test_extract_reads_the_facts(database: dbapi.Connection) -> None:
    got = by_id(database, "ai_extract(note, ['product', 'city'])")
    facts = {number: json.loads(str(text)) for number, text in got.items()}
    expected = {row.record_id: {"product": row.product, "city": row.city} for row in ROWS}
    same = [facts[n][name] == value for n, row in expected.items() for name, value in row.items()]
    assert sum(same) / len(same) >= 0.95


def test_json_follows_its_schema(database: dbapi.Connection) -> None:
    schema = json.dumps({
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "vip": {"type": "boolean"}},
        "required": ["city", "vip"],
        "additionalProperties": False,
    })  # fmt: skip
    database.execute("SET tierkv.max_tokens = 64")
    rows = database.execute(
        f"SELECT ai_extract(note, '{schema}'), ai_generate_json(note, '{schema}') FROM notes "
        "WHERE id < 4"
    ).fetchall()
    database.execute("SET tierkv.max_tokens = 12")
    for value in (json.loads(text) for row in rows for text in row):
        assert set(value) == {"city", "vip"}
        assert isinstance(value["city"], str)
        assert isinstance(value["vip"], bool)


def test_scores_and_similarities_are_in_their_range(database: dbapi.Connection) -> None:
    rows = database.execute(
        "SELECT ai_score('How happy is the customer?', note), ai_similarity(note, note), "
        "ai_similarity(note, 'Is the review positive?'), len(ai_embed(note)), "
        "ai_count_tokens(note) FROM notes"
    ).fetchall()
    for score, same, other, dimensions, tokens in rows:
        assert 0 <= score <= 1
        assert same == pytest.approx(1.0, abs=1e-5)
        assert -1 <= other < 0.9999
        assert dimensions == 128
        assert 10 < tokens < 300


def test_aggregates_read_groups_of_any_size(database: dbapi.Connection) -> None:
    rows = database.execute(
        "SELECT topic, ai_agg(note, 'What is the review about?' ORDER BY id), "
        "ai_summarize_agg(note ORDER BY id) FROM (SELECT * FROM notes WHERE id <= 3) GROUP BY topic"
    ).fetchall()
    assert all(answer and summary for _, answer, summary in rows)
    first = ROWS[0]
    (asked,) = database.execute(
        "SELECT ai_agg(note, 'What is the review about?') FROM notes WHERE id = 1"
    ).fetchone() or ("",)
    assert asked == first.topic
    # Far beyond the context of the model: answered in levels.
    cursor = database.cursor()
    cursor.execute("SET tierkv.max_tokens = 12")
    cursor.execute(
        "SELECT ai_agg(n.note, 'What is the review about?' ORDER BY n.id, r.i) "
        "FROM notes n, range(4) r(i)"
    )
    assert cursor.fetchall()[0][0]
    assert not cursor.notices


@pytest.mark.parametrize(
    "expression",
    [
        "ai_filter('Is the review positive?', note)",
        f"ai_classify(note, {TOPICS})",
        "ai_extract(note, ['product', 'city'])",
    ],
)
def test_the_cache_changes_no_answer(database: dbapi.Connection, expression: str) -> None:
    warm = [by_id(database, expression) for _ in range(2)]
    database.execute("SET tierkv.cache = off")
    cold = by_id(database, expression)
    database.execute("RESET tierkv.cache")
    assert warm == [cold, cold]


def test_the_cache_changes_numbers_only_by_rounding(database: dbapi.Connection) -> None:
    score, vector = "ai_score('How happy is the customer?', note)", "ai_embed(note)"
    warm = [by_id(database, expression) for expression in (score, vector, score, vector)]
    database.execute("SET tierkv.cache = off")
    cold = [by_id(database, expression) for expression in (score, vector)]
    database.execute("RESET tierkv.cache")
    for got, expected in zip(warm, cold * 2, strict=True):
        for number, value in expected.items():
            assert got[number] == pytest.approx(value, abs=1e-4)

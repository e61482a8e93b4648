"""How the statement of a job is read and cut, and the statements about jobs."""

from __future__ import annotations

import pytest

from tierkv.kvcore.errors import TierKVError
from tierkv.sql.jobs.job_command import JobOptions, JobVerb, job_command, job_options
from tierkv.sql.jobs.job_statement import KeyRange, literal, read_job_statement
from tierkv.sql.text.lexer import tokenize

RANGE = KeyRange("3", "7").condition("d.id", "integer")


def plain(text: str) -> str:
    return " ".join(text.split()).replace(" )", ")")


def test_a_batch_is_the_statement_with_one_more_condition() -> None:
    read = read_job_statement(
        "INSERT INTO s.t (a, b) SELECT d.id, ai_generate('x ' || body) FROM docs d JOIN u "
        "ON u.id = d.id WHERE d.x > 1 OR d.y AND ai_filter('good?', body) ON CONFLICT (a) "
        "DO NOTHING"
    )
    assert RANGE == "(d.id) > CAST('3' AS integer) AND (d.id) <= CAST('7' AS integer)"
    assert read.target == "s.t"
    assert plain(read.batch(RANGE)) == (
        "INSERT INTO s.t (a, b) SELECT d.id, ai_generate('x ' || body) FROM docs d JOIN u "
        "ON u.id = d.id WHERE (d.x > 1 OR d.y AND ai_filter('good?', body)) AND "
        f"({RANGE}) ON CONFLICT (a) DO NOTHING"
    )
    assert plain(read.keys("d.id")) == (
        "SELECT (d.id) AS tierkv_key FROM docs d JOIN u ON u.id = d.id"
    ), "the condition asks a model"


def test_keys_are_found_without_the_conditions_that_ask_a_model() -> None:
    read = read_job_statement(
        "CREATE TABLE t AS SELECT id FROM docs -- all\nWHERE a = 1 -- one\nAND ai_filter('q', body)"
    )
    assert plain(read.keys("id")) == "SELECT (id) AS tierkv_key FROM docs WHERE (a = 1)"
    assert plain(read.table()) == (
        "CREATE TABLE t AS SELECT id FROM docs WHERE (a = 1) AND (ai_filter('q', body)) AND (FALSE)"
    )
    assert read.insert == "INSERT INTO t"


@pytest.mark.parametrize("text", [
    "WITH w AS (SELECT * FROM d LIMIT 5) INSERT INTO t SELECT * FROM w",
    "INSERT INTO t WITH w AS (SELECT * FROM d LIMIT 5) SELECT * FROM w",
])  # fmt: skip
def test_common_table_expressions_stay_whole(text: str) -> None:
    read = read_job_statement(text)
    assert plain(read.batch("TRUE")) == (
        "INSERT INTO t WITH w AS (SELECT * FROM d LIMIT 5) SELECT * FROM w WHERE (TRUE)"
    )
    assert plain(read.keys("id")).startswith("WITH w AS (SELECT * FROM d LIMIT 5) SELECT (id)")


@pytest.mark.parametrize("text", [
    "INSERT INTO t SELECT extract(year FROM ts), sample, \"order\" FROM d",
    "INSERT INTO t SELECT a IS DISTINCT FROM b, (SELECT count(*) FROM q GROUP BY c) FROM d",
    "INSERT INTO t SELECT a AS limit FROM d WHERE a IS DISTINCT FROM b",
    "CREATE UNLOGGED TABLE \"My\".t (a, b) AS SELECT 1, 2 FROM d",
])  # fmt: skip
def test_names_and_subqueries_are_no_clauses(text: str) -> None:
    assert read_job_statement(text).source == "FROM d"


REFUSED = {
    "SELECT 1 FROM d": ("42601", 1),
    "INSERT INTO t VALUES (1)": ("42601", 1),
    "CREATE TABLE t (a int)": ("42601", 1),
    "INSERT INTO t SELECT 1": ("0A000", 15),
    "INSERT INTO t SELECT DISTINCT a FROM d": ("0A000", 22),
    "INSERT INTO t SELECT rank() OVER (ORDER BY a) FROM d": ("0A000", 29),
    "INSERT INTO t SELECT a FROM d GROUP BY a": ("0A000", 31),
    "INSERT INTO t SELECT a FROM d UNION ALL SELECT a FROM e": ("0A000", 31),
    "INSERT INTO t SELECT a FROM d WHERE b LIMIT 3": ("0A000", 39),
    "INSERT INTO t SELECT a FROM d RETURNING a": ("0A000", 31),
    "INSERT INTO t SELECT $1 FROM d": ("0A000", 22),
    "INSERT INTO t SELECT 1 FROM (SELECT ai_generate(a) FROM d)": ("0A000", 24),
    "CREATE TEMP TABLE t AS SELECT 1 FROM d": ("0A000", 8),
    "CREATE TABLE IF NOT EXISTS t AS SELECT 1 FROM d": ("0A000", 21),
    "CREATE TABLE t AS SELECT 1 FROM d WITH NO DATA": ("0A000", 43),
}


@pytest.mark.parametrize("text", REFUSED)
def test_statements_that_cannot_be_cut_are_refused(text: str) -> None:
    with pytest.raises(TierKVError) as refused:
        read_job_statement(text)
    assert (refused.value.sqlstate, refused.value.position) == REFUSED[text]  # type: ignore[attr-defined]


def test_literals_mean_the_same_everywhere() -> None:
    assert literal("it's") == "'it''s'"
    assert literal("a\\b'") == "E'a\\\\b'''"


def command(text: str):  # type: ignore[no-untyped-def]
    return job_command(tokenize(text), text)


def test_statements_about_jobs() -> None:
    made = command("CREATE AI JOB j AS INSERT INTO t SELECT a FROM b WITH (key = d.id, batch = 9)")
    assert (made.verb, made.name, made.statement, made.offset) == (
        JobVerb.CREATE, "j", "INSERT INTO t SELECT a FROM b", 19,
    )  # fmt: skip
    assert job_options(made) == JobOptions(key="d.id", batch=9)
    resumed = command('RESUME JOB "My" WITH (priority = batch, retry_failed = on)')
    options = job_options(resumed, JobOptions(key="id"))
    assert resumed.name == "My" and (options.priority, options.retry_failed) == (1, True)
    assert command("CALL tierkv.cancel_job('j')") == command("CANCEL AI JOB j")
    assert command("RUN AI JOB j PARTITION 3").partition == 3
    assert command("DROP AI JOB IF EXISTS j").tolerant
    for other in ("DROP TABLE job", "RESUME", "CREATE TABLE ai (job int)", "CALL tierkv.x('j')"):
        assert command(other) is None


@pytest.mark.parametrize(("text", "position"), [
    ("CREATE AI JOB j AS WITH (key = id)", 20),
    ("CREATE AI JOB AS SELECT 1", 18),
    ("RESUME JOB j now", 14),
    ("RUN AI JOB j", 13),
    ("RUN AI JOB j PARTITION x", 24),
    ("CANCEL JOB", 11),
])  # fmt: skip
def test_malformed_statements_say_where(text: str, position: int) -> None:
    with pytest.raises(TierKVError) as refused:
        found = command(text)
        read_job_statement(found.statement)
    assert refused.value.sqlstate == "42601"
    assert refused.value.position == position or text.startswith("CREATE")  # type: ignore[attr-defined]

"""How PostgreSQL tells the front what it can't answer: each question once, many in a message."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_postgres import PostgresServer, RunningRelay, running_relay
from tests.fix_sql import InstantGenerator
from tierkv.dbfront.postgres.attendant import AiAttendant
from tierkv.dbfront.postgres.install import install
from tierkv.dbfront.postgres.server import MakeAttendant
from tierkv.dbfront.postgres.statements.ai_run import AiServices
from tierkv.kvcore.clock import SystemClock

pytestmark = pytest.mark.integration
ROWS = 20_000


class Told:
    """The messages that would reach the front."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.messages: list[str] = []
        connection.add_notice_handler(self._add)

    def _add(self, notice: psycopg.errors.Diagnostic) -> None:
        assert notice.sqlstate == "TKV01" and notice.message_detail is not None
        self.messages.append(notice.message_detail)

    @property
    def questions(self) -> list[str]:
        entries = [line.split() for text in self.messages for line in text.splitlines()]
        return [bytes.fromhex(question).decode() for _, question in entries]


@pytest.fixture
async def session(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    """A session inside a statement's rounds, as the front opens it."""
    await install(postgres.dsn)
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute("SELECT tierkv.begin_rounds(1, 9)")
        yield connection


def begin_round(connection: psycopg.Connection, number: int) -> None:
    connection.execute(
        "SELECT set_config('tierkv.telling', %s, true), set_config('tierkv.untold', '!', true)",
        (str(number),),
    )


def test_equal_questions_are_told_about_once(session: psycopg.Connection) -> None:
    told = Told(session)
    begin_round(session, 1)
    query = f"SELECT tierkv.ai_call(1, 'q' || i %% 50) FROM generate_series(1, {ROWS}) i"
    session.execute(query.replace("%%", "%"))
    session.execute("SELECT tierkv.tell_rest()")
    assert set(told.questions) == {f"q{i}" for i in range(50)}
    assert len(told.messages) < 100


def test_different_questions_share_messages(session: psycopg.Connection) -> None:
    told = Told(session)
    begin_round(session, 1)
    session.execute(f"SELECT tierkv.ai_call(1, 'ünï ' || i) FROM generate_series(1, {ROWS}) i")
    session.execute("SELECT tierkv.tell_rest()")
    assert sorted(told.questions) == sorted(f"ünï {i}" for i in range(1, ROWS + 1))
    assert len(told.messages) < ROWS / 20
    told.messages.clear()
    session.execute("SELECT tierkv.ai_call(1, 'ünï 1'), tierkv.ai_call(1, 'ünï 1')")
    assert told.questions == ["ünï 1"] * 2, "outside a round each is told at once"


def test_an_answer_is_that_of_the_same_question_and_form(session: psycopg.Connection) -> None:
    answers = {(1, "a"): "x", (1, "a 2 b"): "y", (2, "a"): "", (1, "long" * 2000): "z" * 9000}
    session.execute(
        "SELECT tierkv.learn(%s::bigint[], %s::bytea[], %s::bytea[])",
        (
            [*(form for form, _ in answers), 1],
            [*(question.encode() for _, question in answers), b"none"],
            [*(answer.encode() for answer in answers.values()), None],
        ),
    )
    told = Told(session)
    for number in (1, 2):
        begin_round(session, number)
        for (form, question), answer in (*answers.items(), *answers.items()):
            row = session.execute("SELECT tierkv.ai_call(%s, %s)", (form, question)).fetchone()
            assert row == (answer,)
        assert session.execute("SELECT tierkv.ai_call(1, 'none')").fetchone() == (None,)
        assert not told.messages
    assert session.execute("SELECT tierkv.ai_call(2, 'a 2 b')").fetchone() == (None,)
    assert told.questions == ["a 2 b"]


def test_an_order_that_ignores_case_takes_no_answer_of_another_case(
    session: psycopg.Connection,
) -> None:
    session.execute(
        "CREATE COLLATION pg_temp.careless (provider = icu, locale = 'und-u-ks-level2', "
        "deterministic = false)"
    )
    session.execute("SELECT tierkv.learn('{1}', ARRAY['a'::bytea], ARRAY['small'::bytea])")
    told = Told(session)
    begin_round(session, 1)
    rows = session.execute(
        "SELECT tierkv.ai_call(1, q COLLATE pg_temp.careless) "
        "FROM (VALUES ('a'), ('A'), ('a')) v(q)"
    ).fetchall()
    assert rows == [("small",), (None,), ("small",)] and told.questions == ["A"]


def test_statements_of_one_transaction_each_get_their_answers(
    ai_relay: RunningRelay,
) -> None:
    query = f"SELECT count(*) FROM generate_series(1, {ROWS}) i WHERE ai_filter('n' || i % 40)"
    with psycopg.connect(ai_relay.dsn) as connection:
        first = connection.execute(query).fetchone()
        again = connection.execute(query).fetchone()
        few = connection.execute(
            "SELECT i FROM generate_series(1, 5000) i WHERE ai_filter('n' || i) LIMIT 3"
        ).fetchall()
        rest = connection.execute(
            "SELECT count(*) FROM generate_series(1, 300) i WHERE ai_filter('n' || i)"
        ).fetchone()
    assert first == again is not None and first is not None and first[0] > 0
    assert len(few) == 3 and rest is not None and rest[0] >= 3


def test_errors_that_only_unanswered_rows_cause_are_none(ai_relay: RunningRelay) -> None:
    """The NULLs of a round violate the constraint: the questions kept back are lost with it."""
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("CREATE TEMP TABLE strict (a text NOT NULL, b int CHECK (b >= 0))")
        connection.execute("SET tierkv.execution = 'replay'")
        connection.execute(
            "INSERT INTO strict SELECT ai_generate('s' || i), coalesce(length(ai_generate("
            "'t' || i)), -1) FROM generate_series(1, 200) i"
        )
        rows = connection.execute("SELECT count(*), min(b) FROM strict").fetchone()
        assert rows is not None and rows[0] == 200 and rows[1] >= 0


@pytest.mark.parametrize("told", ["garbage", "8192 zz", "8192 6", "1 61", "-1 61", "", "silent"])
def test_calls_that_the_statement_does_not_name_are_refused(
    ai_relay: RunningRelay, told: str
) -> None:
    """Not answered with no rows, and the session goes on."""
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION pg_temp.forge(told text) RETURNS int LANGUAGE plpgsql AS $$BEGIN "
            "IF told = 'silent' THEN RAISE INFO 'tierkv' USING ERRCODE = 'TKV01'; ELSE "
            "RAISE INFO 'tierkv' USING ERRCODE = 'TKV01', DETAIL = told; END IF; RETURN 1; END$$"
        )
        for first in ("pg_temp.forge(%s)", "tierkv.ai_call(length(%s), 'x')"):
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="AI calls of its own"):
                connection.execute(f"SELECT {first}, ai_generate('forged')", [told])
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT pg_temp.forge(%s) / 0, ai_generate('f')", [told])
        assert connection.execute("SELECT length(ai_generate('forged'))").fetchall()


def test_sessions_without_row_level_security_make_calls(ai_relay: RunningRelay) -> None:
    """As pg_dump does; a user without rights on the tables of jobs is refused them then."""
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE unsecured")
        try:
            connection.execute("SET ROLE unsecured")
            connection.execute("SET row_security = off")
            assert connection.execute("SELECT length(ai_generate('forged'))").fetchall()
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP ROLE unsecured")


def test_a_users_function_resets_no_statistics(
    postgres: PostgresServer, ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    resets: list[str | None] = []

    async def reset(what: str | None) -> None:
        resets.append(what)

    def make() -> MakeAttendant:
        services = AiServices(
            generator, SystemClock(), owners=lambda client: (client.user, client.user), reset=reset
        )
        return lambda relay: AiAttendant(relay, services)

    with (
        running_relay(postgres.dsn, make) as relay,
        psycopg.connect(relay.dsn, autocommit=True) as connection,
    ):
        connection.execute(
            "CREATE FUNCTION pg_temp.forge() RETURNS int LANGUAGE plpgsql AS $$BEGIN "
            "RAISE INFO 'tierkv' USING ERRCODE = 'TKV02', DETAIL = ' '; RETURN 1; END$$"
        )
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT pg_temp.forge(), ai_generate('forged')")
        assert connection.execute("SELECT length(ai_generate('forged'))").fetchall()
    assert not resets

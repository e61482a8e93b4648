"""lastval() and currval() of a session, as ORMs ask for the key of the row they inserted."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_pgwire import RunningServer, running_pgwire

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


def test_a_session_has_its_own_last_values(server: RunningServer) -> None:
    with (
        psycopg.connect(server.dsn, autocommit=True) as one,
        psycopg.connect(server.dsn, autocommit=True) as two,
    ):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="lastval"):
            one.execute("SELECT lastval()")
        one.execute("CREATE TABLE kept (id SERIAL PRIMARY KEY, a TEXT)")
        done = one.execute("INSERT INTO kept (a) VALUES (%s)", ["x"])
        assert (done.statusmessage, done.description) == ("INSERT 0 1", None)
        two.execute("INSERT INTO public.kept (a) VALUES ('y'), ('z') -- two")
        named = "currval('kept_id_seq'), currval(pg_get_serial_sequence('public.kept', 'id'))"
        asked = f"SELECT lastval(), {named}"
        assert one.execute(asked).fetchone() == (1, 1, 1)
        assert two.execute(asked).fetchone() == (3, 3, 3)
        assert one.execute("INSERT INTO kept (a) VALUES ('w') RETURNING a, id").fetchall() == [
            ("w", 4)
        ]
        one.execute("INSERT INTO kept VALUES (90, 'given')")
        assert one.execute("SELECT lastval()").fetchone() == (4,)


def test_values_drawn_by_name_and_tables_made_anew(server: RunningServer) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as db:
        db.execute("CREATE SEQUENCE drawn START 50")
        db.execute("SELECT nextval('public.drawn')")
        assert db.execute("SELECT currval('drawn'), lastval()").fetchone() == (50, 50)
        for name in ("first", "second"):
            db.execute(f"CREATE OR REPLACE TABLE anew ({name} SERIAL, a TEXT)")
            db.execute("INSERT INTO anew (a) VALUES ('x')")
            assert db.execute("SELECT lastval()").fetchone() == (1,)
        db.execute("CREATE OR REPLACE TABLE anew (a TEXT)")
        db.execute("INSERT INTO anew (a) VALUES ('x')")
        with pytest.raises(psycopg.errors.UndefinedTable):
            db.execute("INSERT INTO nowhere (a) VALUES ('x')")


def test_tools_find_the_sequence_of_a_column(server: RunningServer) -> None:
    """DBD::Pg, TypeORM and SQLAlchemy read it out of the default."""
    asked = r"""SELECT pg_get_expr(adbin, adrelid),
        substring(pg_get_expr(adbin, adrelid) FROM $r$^nextval\('(.+)'::[\w\s]+\)$$r$),
        pg_get_serial_sequence('counted', 'id')
        FROM pg_attrdef WHERE adrelid = 'counted'::regclass"""
    with psycopg.connect(server.dsn, autocommit=True) as db:
        db.execute("CREATE TABLE public.counted (id SERIAL)")
        assert db.execute(asked).fetchall() == [
            ("nextval('counted_id_seq'::regclass)", "counted_id_seq", "public.counted_id_seq")
        ]

"""SQLAlchemy with psycopg and asyncpg: inspection, reflection, and an ORM's life."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from decimal import Decimal

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.dialects.postgresql.base import PGInspector
from sqlalchemy.ext.asyncio import create_async_engine

from tests.fix_pgwire import RunningServer, running_pgwire

pytestmark = pytest.mark.integration

SETUP = (
    "CREATE TABLE docs (id INTEGER PRIMARY KEY, body VARCHAR NOT NULL DEFAULT 'x', "
    "price DECIMAL(10,2) CHECK (price > 0), tags VARCHAR[], made TIMESTAMPTZ, "
    "UNIQUE (body, price))",
    "CREATE INDEX docs_price ON docs (price, body)",
    "CREATE VIEW cheap AS SELECT id, price FROM docs WHERE price < 5",
    "CREATE TABLE lines (a INTEGER, b INTEGER, doc INTEGER REFERENCES docs (id), "
    "PRIMARY KEY (a, b))",
    "COMMENT ON TABLE docs IS 'papers'",
    "COMMENT ON COLUMN docs.body IS 'the text'",
    "CREATE SEQUENCE numbers",
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE SCHEMA sales",
    "CREATE TABLE sales.totals (id INTEGER PRIMARY KEY, doc INTEGER)",
)


class Base(orm.DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str] = orm.mapped_column(sa.String(50), unique=True)
    pay: orm.Mapped[Decimal | None] = orm.mapped_column(sa.Numeric(10, 2))
    made: orm.Mapped[dt.datetime | None] = orm.mapped_column(sa.DateTime(timezone=True))
    born: orm.Mapped[dt.date | None]
    data: orm.Mapped[dict | None] = orm.mapped_column(sa.JSON)
    blob: orm.Mapped[bytes | None]
    uid: orm.Mapped[uuid.UUID | None]
    tags: orm.Mapped[list[str] | None] = orm.mapped_column(sa.ARRAY(sa.String))
    wait: orm.Mapped[dt.timedelta | None] = orm.mapped_column(sa.Interval)
    flag: orm.Mapped[bool | None]
    share: orm.Mapped[float | None]
    mails: orm.Mapped[list[Mail]] = orm.relationship(back_populates="user", order_by="Mail.id")


class Mail(Base):
    __tablename__ = "mails"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    address: orm.Mapped[str]
    user_id: orm.Mapped[int] = orm.mapped_column(sa.ForeignKey("users.id"))
    user: orm.Mapped[User] = orm.relationship(back_populates="mails")


def url(server: RunningServer, driver: str) -> str:
    return f"postgresql+{driver}://alice@127.0.0.1:{server.port}/shop"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


@pytest.fixture(scope="module")
def engine(server: RunningServer) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url(server, "psycopg"))
    with engine.begin() as conn:
        for statement in SETUP:
            conn.exec_driver_sql(statement)
    yield engine
    engine.dispose()


def test_names(engine: sa.Engine) -> None:
    seen = sa.inspect(engine)
    assert isinstance(seen, PGInspector)
    assert seen.default_schema_name == "public"
    assert {"public", "sales", "tierkv"} <= set(seen.get_schema_names())
    assert {"docs", "lines"} <= set(seen.get_table_names())
    assert seen.get_table_names(schema="sales") == ["totals"]
    assert seen.get_view_names() == ["cheap"]
    assert "numbers" in seen.get_sequence_names()  # A dropped SERIAL leaves its own behind.
    assert [(enum["name"], enum["labels"]) for enum in seen.get_enums()] == [
        ("mood", ["sad", "ok"])
    ]
    assert seen.has_table("docs")
    assert not seen.has_table("totals")


def test_columns(engine: sa.Engine) -> None:
    columns = {column["name"]: column for column in sa.inspect(engine).get_columns("docs")}
    assert list(columns) == ["id", "body", "price", "tags", "made"]
    assert isinstance(columns["id"]["type"], sa.INTEGER)
    assert repr(columns["price"]["type"]) == "NUMERIC(precision=10, scale=2)"
    assert isinstance(columns["tags"]["type"], sa.ARRAY)
    made = columns["made"]["type"]
    assert isinstance(made, sa.DateTime) and made.timezone is True
    assert (columns["body"]["nullable"], columns["body"]["default"]) == (False, "'x'")
    assert columns["body"]["comment"] == "the text"
    view = sa.inspect(engine).get_columns("cheap")
    assert [column["name"] for column in view] == ["id", "price"]


def test_keys_indexes_and_constraints(engine: sa.Engine) -> None:
    seen = sa.inspect(engine)
    assert seen.get_pk_constraint("lines")["constrained_columns"] == ["a", "b"]
    (foreign,) = seen.get_foreign_keys("lines")
    assert foreign["constrained_columns"] == ["doc"]
    assert (foreign["referred_table"], foreign["referred_columns"]) == ("docs", ["id"])
    indexes = {index["name"]: index for index in seen.get_indexes("docs")}
    assert indexes["docs_price"]["column_names"] == ["price", "body"]
    assert indexes["docs_price"]["unique"] is False
    (unique,) = seen.get_unique_constraints("docs")
    assert unique["column_names"] == ["body", "price"]
    (check,) = seen.get_check_constraints("docs")
    assert check["sqltext"] == "price > 0"
    assert seen.get_table_comment("docs") == {"text": "papers"}
    assert "price < 5" in (seen.get_view_definition("cheap") or "")


def test_reflection(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    metadata.reflect(engine, only=["docs", "lines", "cheap"], views=True)
    lines = metadata.tables["lines"]
    assert [column.name for column in lines.primary_key] == ["a", "b"]
    assert {key.target_fullname for key in lines.foreign_keys} == {"docs.id"}
    with engine.connect() as conn:
        assert conn.execute(sa.select(metadata.tables["docs"])).all() == []


@pytest.fixture
def tables(engine: sa.Engine) -> Iterator[None]:
    Base.metadata.create_all(engine)
    Base.metadata.create_all(engine)  # finds them
    yield
    Base.metadata.drop_all(engine)


@pytest.mark.usefixtures("tables")
def test_an_objects_life(engine: sa.Engine) -> None:
    values = {
        "pay": Decimal("12.50"),
        "made": dt.datetime(2024, 1, 2, 3, 4, 5, 678, tzinfo=dt.UTC),
        "born": dt.date(1999, 1, 2),
        "data": {"a": [1, None]},
        "blob": b"\0\xff",
        "uid": uuid.UUID(int=7),
        "tags": ["a", 'b"c', None],
        "wait": dt.timedelta(days=1, seconds=3),
        "flag": True,
        "share": 1.5,
    }
    with orm.Session(engine) as session:
        ann = User(name="ann", **values, mails=[Mail(address="a@b"), Mail(address="c@d")])
        session.add_all([ann, User(name="bob"), User(name="cid")])
        session.commit()
        ann = session.scalars(sa.select(User).where(User.name == "ann")).one()
        assert {name: getattr(ann, name) for name in values} == values
        assert [mail.address for mail in ann.mails] == ["a@b", "c@d"]
        changed = session.execute(
            sa.update(User).where(User.name.in_(["bob", "cid"])).values(flag=False)
        )
        assert isinstance(changed, sa.CursorResult) and changed.rowcount == 2
        session.execute(sa.delete(User).where(User.name == "cid"))
        session.commit()
        counted = sa.select(User.name, sa.func.count(Mail.id)).join(Mail, isouter=True)
        rows = session.execute(counted.group_by(User.name).order_by(User.name)).all()
        assert [tuple(row) for row in rows] == [("ann", 2), ("bob", 0)]


@pytest.mark.usefixtures("tables")
def test_upsert_and_numbers_that_start_anew(engine: sa.Engine) -> None:
    with engine.begin() as conn:
        added = insert(User).values(name="ann", share=1.0).returning(User.id)
        assert conn.execute(added).scalar() == 1
        again = insert(User).values(name="ann", share=1.0)
        again = again.on_conflict_do_update(index_elements=["name"], set_={"share": 9.0})
        assert conn.execute(again.returning(User.id, User.share)).all() == [(1, 9.0)]


@pytest.mark.usefixtures("tables")
def test_nested_transactions(engine: sa.Engine) -> None:
    with orm.Session(engine) as session:
        with pytest.raises(sa.exc.ProgrammingError), session.begin_nested():
            session.execute(sa.text("SELECT * FROM nowhere"))
        session.add(User(name="kept"))
        with session.begin_nested():
            session.add(User(name="kept too"))
        session.commit()
        before = User(name="before")
        session.add(before)
        session.flush()
        with pytest.raises(sa.exc.IntegrityError), session.begin_nested():
            session.add(User(name="kept"))
            session.flush()
        session.add(User(name="behind"))
        session.commit()
        names = session.scalars(sa.select(User.name).order_by(User.id)).all()
        assert names == ["kept", "kept too", "before", "behind"]


def test_streaming_and_isolation(engine: sa.Engine) -> None:
    with engine.connect().execution_options(stream_results=True, max_row_buffer=100) as conn:
        rows = conn.execute(sa.text("SELECT range FROM range(1000)"))
        assert sum(row[0] for row in rows) == 499_500
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        assert conn.execute(sa.text("SHOW transaction_isolation")).scalar() == "repeatable read"


async def test_asyncpg(server: RunningServer, engine: sa.Engine) -> None:
    async_engine = create_async_engine(url(server, "asyncpg"))
    async with async_engine.connect() as conn:
        names = await conn.run_sync(lambda sync: sa.inspect(sync).get_table_names())
        columns = await conn.run_sync(lambda sync: sa.inspect(sync).get_columns("docs"))
        keys = await conn.run_sync(lambda sync: sa.inspect(sync).get_foreign_keys("lines"))
        indexes = await conn.run_sync(lambda sync: sa.inspect(sync).get_indexes("docs"))
        await conn.rollback()
    assert {"docs", "lines"} <= set(names)
    assert [column["name"] for column in columns] == ["id", "body", "price", "tags", "made"]
    assert keys[0]["referred_columns"] == ["id"]
    assert {index["name"] for index in indexes} >= {"docs_price"}
    async with async_engine.begin() as conn:
        await conn.run_sync(Base.metadata.create_all)
        made = dt.datetime(2024, 1, 2, tzinfo=dt.UTC)
        added = sa.insert(User).values(name="zoe", pay=Decimal("1.25"), made=made, tags=["x"])
        assert (await conn.execute(added.returning(User.id))).scalar() == 1
        row = (await conn.execute(sa.select(User.name, User.pay, User.made, User.tags))).one()
        assert tuple(row) == ("zoe", Decimal("1.25"), made, ["x"])
        await conn.run_sync(Base.metadata.drop_all)
    await async_engine.dispose()

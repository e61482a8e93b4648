"""Rights on AI functions and models, and whose rows views show, on both SQL doors and over REST."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import wait_for
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tests.integration.test_namespace_sql import DOORS, TwoDoors

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
CALL = "SELECT ai_generate('Say it: ' || i, options => '{\"max_tokens\": 2}') FROM range(2) t(i)"
POSTGRES_CALL = CALL.replace("range(2)", "generate_series(0, 1)")
CALLS = dict(zip(DOORS, (CALL, POSTGRES_CALL), strict=True))
GRANTED = "SELECT role_name, right_kind, granted FROM tierkv.rights ORDER BY 1, 2, 3"


class Guarded(TwoDoors):
    """Both doors, with a user bob beside the administrator."""

    def run(self, door: str, statement: str, user: str = "bob") -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        with psycopg.connect(self.dsn(door, user), password=PASSWORD, autocommit=True) as session:
            cursor = session.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def state(self, door: str, statement: str, user: str = "bob") -> str:
        """Return the SQLSTATE of a statement; empty if it succeeds."""
        try:
            self.run(door, statement, user)
        except psycopg.Error as error:
            return error.sqlstate or "?"
        return ""


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[Guarded]:
    roles = Guarded(tmp_path_factory.mktemp("guarded"), postgres)
    try:
        with psycopg.connect(postgres.dsn, autocommit=True) as server:
            server.execute(f"CREATE ROLE bob LOGIN PASSWORD '{PASSWORD}'")
            server.execute("CREATE ROLE analysts")
        roles.start("meta")
        roles.start("dmp-0", "compute-0", *DOORS)
        yield roles
    finally:
        roles.stop()


@pytest.fixture(autouse=True)
def usual_rights(cluster: Guarded) -> Iterator[None]:
    yield
    for statement in (
        "GRANT EXECUTE ON ALL AI FUNCTIONS TO PUBLIC",
        "GRANT USAGE ON ALL MODELS TO PUBLIC",
        "REVOKE EXECUTE ON ALL AI FUNCTIONS FROM bob, analysts",
        "REVOKE USAGE ON ALL MODELS FROM bob, analysts",
        "REVOKE analysts, tierkv_admin FROM bob",
    ):
        cluster.run(DOORS[0], statement, USER)
    for door in DOORS:
        wait_for(lambda door=door: not cluster.state(door, CALLS[door]), what="everybody may call")


@pytest.mark.parametrize("door", DOORS)
def test_a_function_is_revoked_from_everybody_and_granted_to_one(
    cluster: Guarded, door: str
) -> None:
    assert not cluster.state(door, CALLS[door])
    done = cluster.psql(
        door, "REVOKE EXECUTE ON FUNCTION ai_generate, ai_filter, ai_forget FROM PUBLIC"
    )
    assert done.stdout.strip() == "REVOKE", done.stderr
    for each in DOORS:
        wait_for(lambda each=each: cluster.state(each, CALLS[each]) == "42501", what="refused")
    # Before any call, without a row, and in EXPLAIN too; what is not revoked goes on.
    assert cluster.state(door, "SELECT ai_generate('x') WHERE false") == "42501"
    assert cluster.state(door, "EXPLAIN " + CALLS[door]) == "42501"
    for call in ("ai_forget('x')", "tierkv.forget('x')"):
        assert cluster.state(door, f"SELECT {call}") == "42501"
    assert not cluster.state(door, "SELECT ai_count_tokens('x')")
    assert not cluster.state(door, CALLS[door], USER), "the administrator may"
    told = cluster.psql(door, CALLS[door], "SELECT 'alive'", user="bob")
    assert "permission denied for function ai_generate" in told.stderr
    assert 'GRANT EXECUTE ON FUNCTION ai_generate TO "bob"' in told.stderr
    assert "alive" in told.stdout
    cluster.run(door, "GRANT EXECUTE ON FUNCTION ai_generate(text) TO bob", USER)
    for each in DOORS:
        wait_for(lambda each=each: not cluster.state(each, CALLS[each]), what="bob may")
    rows = [row for row in cluster.run(door, GRANTED) if row[1] == "function"]
    assert rows == [
        ("bob", "function", "ai_generate"),
        ("public", "function", "all but ai_filter, ai_forget, ai_generate"),
    ]


@pytest.mark.parametrize("door", DOORS)
def test_a_role_gives_its_members_a_model(
    cluster: Guarded, postgres: PostgresServer, door: str
) -> None:
    (model,) = {name for (name,) in cluster.run(door, "SELECT model_name FROM tierkv.models")}
    cluster.run(door, "REVOKE USAGE ON ALL MODELS FROM PUBLIC", USER)
    cluster.run(door, f'GRANT USAGE ON MODEL "{model}" TO analysts', USER)
    wait_for(lambda: cluster.state(door, CALLS[door]) == "42501", what="bob is refused")
    if door == "front-post":  # PostgreSQL keeps the roles.
        with psycopg.connect(postgres.dsn, autocommit=True) as server:
            server.execute("GRANT analysts TO bob")
            assert not cluster.state(door, CALLS[door])
            server.execute("REVOKE analysts FROM bob")
    else:
        assert cluster.psql(door, "GRANT analysts TO bob").stdout.strip() == "GRANT ROLE"
        assert not cluster.state(door, CALLS[door])
        cluster.run(door, "REVOKE analysts FROM bob", USER)
    assert cluster.state(door, CALLS[door]) == "42501"
    denied = (
        "SELECT subject, detail FROM tierkv.audit_log WHERE who = 'bob' AND outcome = 'refused'"
    )
    wait_for(
        lambda: (f"model {model}", "permission denied") in cluster.run(door, denied),
        what="the refusal is in the audit log",
    )


@pytest.mark.parametrize("door", DOORS)
def test_a_user_sees_the_own_rows_and_an_administrator_all(cluster: Guarded, door: str) -> None:
    for user in ("bob", USER):
        cluster.run(door, CALLS[door], user)
    users = "SELECT DISTINCT {} FROM tierkv.{} ORDER BY 1"
    assert {n for (n,) in cluster.run(door, users.format("usename", "stat_activity"))} == {"bob"}
    for column, view in (
        ("userid", "stat_statements"),
        ("user_name", "usage_history"),
        ("user_name", "query_log"),
        ("cache_scope", "kvcache_blocks"),
        ("cache_scope", "kvcache_prefixes"),
    ):
        seen = {name for (name,) in cluster.run(door, users.format(column, view))}
        assert seen <= {"bob"}, view
        everything = {name for (name,) in cluster.run(door, users.format(column, view), USER)}
        assert everything >= seen, view
        if view in ("stat_statements", "usage_history"):
            assert everything >= {"bob", USER}, view


def test_a_member_of_tierkv_admin_administers(cluster: Guarded) -> None:
    door = DOORS[0]
    assert cluster.state(door, "CREATE KV NAMESPACE red") == "42501"
    cluster.run(door, "GRANT tierkv_admin TO bob", USER)
    assert not cluster.state(door, "CREATE KV NAMESPACE red")
    assert not cluster.state(door, "DROP KV NAMESPACE red")
    seen = cluster.run(door, "SELECT who, action, subject, detail FROM tierkv.audit_log")
    assert (USER, "GRANT ROLE", "bob", "role tierkv_admin") in seen
    cluster.run(door, "REVOKE tierkv_admin FROM bob", USER)
    assert cluster.state(door, "CREATE KV NAMESPACE red") == "42501"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("statement", "code", "says"),
    [
        ("GRANT EXECUTE ON FUNCTION ai_generat TO bob", "42883", "Did you mean ai_generate?"),
        ("GRANT EXECUTE ON FUNCTION ai_generate FROM bob", "42601", "expected TO"),
        ("REVOKE USAGE ON MODEL FROM bob", "42601", "expected FROM"),
        ("GRANT USAGE ON ALL MODELS TO", "42601", "the name of a role at end of input"),
    ],
)
def test_a_right_that_can_not_be_is_refused(
    cluster: Guarded, door: str, statement: str, code: str, says: str
) -> None:
    told = cluster.psql(door, statement, "SELECT 'alive'")
    assert code in told.stderr and says in told.stderr, told.stderr
    assert "alive" in told.stdout


@pytest.mark.parametrize("door", DOORS)
def test_only_an_administrator_grants(cluster: Guarded, door: str) -> None:
    assert cluster.state(door, "GRANT USAGE ON ALL MODELS TO bob") == "42501"


@pytest.mark.parametrize("door", DOORS)
def test_only_an_administrator_resets_statistics(cluster: Guarded, door: str) -> None:
    assert cluster.state(door, "SELECT tierkv.stat_reset('functions')") == "42501"
    assert not cluster.state(door, "SELECT tierkv.stat_reset('functions')", USER)


def test_a_user_cancels_the_own_statements_only(cluster: Guarded) -> None:
    door = DOORS[0]
    pid = "SELECT pid FROM tierkv.stat_activity WHERE application_name = 'watched'"
    with (
        psycopg.connect(cluster.dsn(door, USER), password=PASSWORD, application_name="watched"),
        psycopg.connect(
            cluster.dsn(door, "bob"), password=PASSWORD, application_name="watched"
        ) as own,
    ):
        of_admin = max(n for (n,) in cluster.run(door, pid, USER) if n != own.info.backend_pid)
        assert cluster.state(door, f"SELECT pg_cancel_backend({of_admin})") == "42501"
        assert cluster.run(door, pid) == [(own.info.backend_pid,)]
        cancel = f"SELECT pg_cancel_backend({own.info.backend_pid})"
        assert cluster.run(door, cancel) == cluster.run(door, cancel, USER) == [(True,)]
    assert cluster.state(door, "SELECT tierkv_cancel(1, 1)") == "42501"


def test_roles_are_made_and_dropped(cluster: Guarded) -> None:
    door = DOORS[0]
    made = cluster.psql(door, "CREATE ROLE support", "GRANT support TO bob", "CREATE ROLE support")
    assert made.stdout.split("\n")[:2] == ["CREATE ROLE", "GRANT ROLE"]
    assert "42710" in made.stderr
    assert ("bob", "role", "support") in cluster.run(door, GRANTED)
    dropped = cluster.psql(
        door, "DROP ROLE support", "DROP ROLE suport", "DROP ROLE IF EXISTS support",
        "CREATE USER eve PASSWORD 'secret'", "SELECT 'alive'",
    )  # fmt: skip
    assert dropped.stdout.split("\n")[:2] == ["DROP ROLE"] * 2
    assert "42704" in dropped.stderr and "55000" in dropped.stderr, "nobody needs a password"
    assert "front.users" in dropped.stderr and "alive" in dropped.stdout
    assert ("bob", "role", "support") not in cluster.run(door, GRANTED)

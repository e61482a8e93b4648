"""Limits of AI calls on both SQL doors and over REST, and shared by fronts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import psycopg
import pytest

from tests.fix_cluster import wait_for
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tests.fix_valkey import valkey_server
from tests.integration.test_cluster import make_prompts
from tests.integration.test_namespace_sql import DOORS, TwoDoors

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
CALL = (
    "SELECT ai_generate('Say it: ' || i, options => '{\"max_tokens\": 2}') FROM (VALUES (%s)) t(i)"
)
MINE = "SELECT limit_name, allowed, remaining, refused FROM tierkv.my_limits ORDER BY 1"


class Limited(TwoDoors):
    """Two SQL doors and a REST door that share a Valkey, over one compute node."""

    def __init__(self, folder: Any, postgres: PostgresServer, valkey: str) -> None:
        super().__init__(folder, postgres)
        self._valkey = valkey

    def _settings(self, name: str) -> Iterator[str]:
        yield from super()._settings(name)
        if name.startswith("front"):
            yield f"front.shared_state={self._valkey}"

    def one(self, door: str, statement: str, user: str = USER) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        with psycopg.connect(self.dsn(door, user), password=PASSWORD, autocommit=True) as session:
            cursor = session.execute(statement)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[Limited]:
    folder = tmp_path_factory.mktemp("limited")
    with valkey_server(folder / "valkey") as valkey:
        roles = Limited(folder, postgres, valkey)
        try:
            roles.start("meta")
            roles.start("dmp-0", "compute-0", "front", *DOORS)
            yield roles
        finally:
            roles.stop()


@pytest.fixture(autouse=True)
def no_limits(cluster: Limited) -> Iterator[None]:
    yield
    for subject in (f"ROLE {USER}", "TENANT default", f"KV NAMESPACE {USER}"):
        cluster.one(DOORS[0], f"ALTER {subject} RESET AI LIMIT")
    for door in DOORS:
        wait_for(lambda door=door: not cluster.one(door, MINE), what="the limits are gone")


@pytest.mark.parametrize("door", DOORS)
def test_a_limit_is_obeyed_at_every_door_and_shows_what_is_left(
    cluster: Limited, door: str
) -> None:
    rate = {"front-duck": "3/day", "front-post": "3/h"}[door]  # Each rate has its own bucket.
    done = cluster.psql(door, f"ALTER ROLE {USER} SET AI LIMIT (requests = '{rate}')")
    assert done.stdout.strip() == "ALTER AI LIMIT", done.stderr
    for each in DOORS:
        wait_for(lambda each=each: cluster.one(each, MINE), what="the limit is known")
    for number, each in enumerate((*DOORS, door)):
        assert cluster.one(each, CALL % number)
    ((name, allowed, left, _),) = cluster.one(door, MINE)
    assert (name, allowed, round(left)) == ("requests", rate, 0)
    for each in DOORS:
        refused = cluster.psql(each, CALL % 9, "SELECT 'alive'")
        assert "53400" in refused.stderr and "alive" in refused.stdout, refused.stderr
        assert f"tenant {USER} has used its limit of requests: {rate}" in refused.stderr
        assert "Try again after" in refused.stderr
    assert cluster.one("front-duck", CALL % 9, user="other")


@pytest.mark.parametrize("door", DOORS)
def test_a_statement_of_many_calls_is_slowed_and_not_failed(cluster: Limited, door: str) -> None:
    cluster.one(door, f"ALTER KV NAMESPACE {USER} SET AI LIMIT (requests = '20/s', burst = 1)")
    wait_for(lambda: cluster.one(door, MINE), what="the limit is known")
    many = (
        "SELECT count(ai_generate('Row ' || i, options => '{\"max_tokens\": 1}')) "
        "FROM generate_series(1, 30) t(i)"
    )
    began = time.monotonic()
    assert cluster.one(door, many) == [(30,)]
    assert time.monotonic() - began >= 29 / 20


@pytest.mark.parametrize("door", DOORS)
def test_a_statement_that_waits_for_hours_is_seen_to_wait(cluster: Limited, door: str) -> None:
    rate = {"front-duck": "20/h", "front-post": "21/h"}[door]
    cluster.one(door, f"ALTER ROLE {USER} SET AI LIMIT (requests = '{rate}', smooth = on)")
    wait_for(lambda: cluster.one(door, MINE), what="the limit is known")
    told = (
        "SELECT waiting, next_call_s FROM tierkv.my_limits WHERE waiting > 0 AND next_call_s > 60"
    )
    with psycopg.connect(cluster.dsn(door), password=PASSWORD, autocommit=True) as session:
        ends = ThreadPoolExecutor(1).submit(session.execute, CALL % "1), (2), (3")
        ((waiting, next_s),) = wait_for(lambda: cluster.one(door, told), what="calls wait")
        assert 1 <= waiting <= 2 and next_s <= 180
        session.cancel()
        with pytest.raises(psycopg.errors.QueryCanceled):
            ends.result(30)
    waits = "SELECT waiting, next_call_s FROM tierkv.my_limits"
    wait_for(lambda: cluster.one(door, waits) == [(0, None)], what="nothing waits")


def test_rest_is_refused_with_429_and_retry_after(cluster: Limited) -> None:
    (prompt,) = make_prompts(3, 1)
    cluster.one(DOORS[0], "ALTER TENANT default SET AI LIMIT (completion_tokens = '40/day')")

    def refused() -> HTTPError | None:
        try:
            cluster.complete(prompt)
        except HTTPError as error:
            return error
        return None

    error = wait_for(refused, what="the budget is used")
    assert error.code == 429 and int(error.headers["Retry-After"]) >= 1
    body = json.loads(error.__notes__[0])["error"]
    assert body["code"] == "limit_exceeded" and "completion_tokens: 40/day" in body["message"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("(request = '1/s')", "42601", "Did you mean requests?"),
        ("(requests = 'often')", "22023", "write 50/s, 600/min"),
        ("(requests = '0/s')", "22023", "must be above 0"),
        ("(max_in_flight = -1)", "42601", "expected a value"),
        ("(max_in_flight = '-1')", "22023", "between"),
        ("(smooth = perhaps)", "22023", "smooth"),
        ("requests = '1/s'", "42601", 'expected "("'),
    ],
)
def test_bad_limits_are_refused_with_the_cure(
    cluster: Limited, door: str, options: str, code: str, says: str
) -> None:
    done = cluster.psql(door, f"ALTER ROLE {USER} SET AI LIMIT {options}", "SELECT 'alive'")
    assert code in done.stderr and says in done.stderr, done.stderr
    assert "alive" in done.stdout


@pytest.mark.parametrize("door", DOORS)
def test_the_audit_log_tells_who_did_what_and_who_was_refused(cluster: Limited, door: str) -> None:
    name = f"audited-{door}"
    cluster.one(door, f'CREATE KV NAMESPACE "{name}" WITH (ttl = 1h)')
    cluster.psql(door, f'ALTER KV NAMESPACE "{name}" SET (ttl = never)')
    cluster.psql("front-duck", f'DROP KV NAMESPACE "{name}"', user="mallory")
    cluster.one(door, f'DROP KV NAMESPACE "{name}"')
    lines = (
        "SELECT who, action, outcome, detail, times FROM tierkv.audit_log "
        f"WHERE subject = '{name}' ORDER BY happened_at"
    )
    told = cluster.one(door, lines)
    assert [line[:3] for line in told] == [
        (USER, "CREATE KV NAMESPACE", "done"),
        (USER, "ALTER KV NAMESPACE", "failed"),
        ("mallory", "DROP KV NAMESPACE", "refused"),
        (USER, "DROP KV NAMESPACE", "done"),
    ]
    assert told[0][3] == "ttl = 1h" and "may not change" in told[2][3]
    mine = cluster.one("front-duck", "SELECT DISTINCT who FROM tierkv.audit_log", user="mallory")
    assert mine == [("mallory",)]


def test_refused_calls_are_audited_together(cluster: Limited) -> None:
    cluster.one(DOORS[0], "ALTER TENANT eve SET AI LIMIT (requests = '1/day')")
    wait_for(lambda: cluster.one("front-duck", MINE, user="eve"), what="the limit is known")
    for _ in range(3):
        cluster.psql("front-duck", CALL % 1, CALL % 2, user="eve")
    cluster.one(DOORS[0], "ALTER TENANT eve RESET AI LIMIT")
    lines = (
        "SELECT outcome, detail, times FROM tierkv.audit_log "
        "WHERE who = 'eve' AND action = 'AI call'"
    )
    told = wait_for(
        lambda: [line for line in cluster.one(DOORS[0], lines) if line[0] == "refused"],
        what="the refusals are told",
    )
    assert told[0][1] == "limit of requests" and 1 <= told[0][2] <= 5 and len(told) == 1


def test_postgres_keeps_its_own_alter_role(cluster: Limited) -> None:
    done = cluster.psql("front-post", f"ALTER ROLE {USER} SET work_mem = '8MB'")
    assert done.stdout.strip() == "ALTER ROLE", done.stderr


def test_who_is_no_admin_sets_nothing_and_sees_only_its_own(cluster: Limited) -> None:
    cluster.one(DOORS[0], f"ALTER ROLE {USER} SET AI LIMIT (max_in_flight = 4)")
    done = cluster.psql("front-duck", "ALTER USER eve RESET AI LIMIT", user="eve")
    assert "42501" in done.stderr
    wait_for(lambda: cluster.one("front-duck", MINE), what="the limit is known")
    everything = "SELECT subject FROM tierkv.call_limits"
    assert cluster.one("front-duck", everything) == [(USER,)]
    assert cluster.one("front-duck", everything, user="eve") == []

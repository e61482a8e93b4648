"""Conversations kept by fronts: ``ai_chat`` in SQL, REST, several fronts, kills and restarts."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import psycopg
import pytest

import tierkv
from tests.fix_cluster import free_port, wait_for
from tests.fix_postgres import PASSWORD, USER, PostgresServer
from tests.fix_roles import Roles
from tests.fix_valkey import valkey_server
from tierkv.dbapi import Connection, DataError, ProgrammingError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FACT = "Mia bought a kettle in Porto. Question: What did Mia buy?"
SHORT = '{"max_tokens": 6}'


@pytest.fixture(scope="module")
def embedded() -> Iterator[Connection]:
    with tierkv.connect(dmp__capacity="64MiB", compute__l1_capacity="64MiB") as connection:
        yield connection


def rows(connection: Connection, sql: str, values: Any = ()) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    cursor.execute(sql, values)
    return cursor.fetchall()


def turns(connection: Connection, session: str) -> int:
    found = rows(connection, "SELECT turns FROM tierkv.sessions WHERE session_id = ?", (session,))
    return found[0][0] if found else 0


def test_a_turn_reads_the_turns_before(embedded: Connection) -> None:
    (first,), (second,) = (
        rows(embedded, "SELECT ai_chat(session => 'mia', message => ?)", (text,))[0]
        for text in (FACT, "Question: Where?")
    )
    told = rows(
        embedded,
        "SELECT turn, status, input_tokens > 0, output_tokens > 0, model_name FROM "
        "tierkv.session_turns WHERE session_id = 'mia' ORDER BY turn",
    )
    assert first.startswith("kettle") and second
    assert [row[0] for row in told] == [1, 2]
    assert {row[1:4] for row in told} == {("completed", True, True)}
    assert rows(
        embedded,
        "SELECT kind, turns, items, metadata, model_name, expires_at > last_seen, "
        "input_tokens > prompt_tokens FROM tierkv.sessions WHERE session_id = 'mia'",
    ) == [("conversation", 2, 4, "{}", told[0][4], True, True)]


def test_rows_of_a_statement_are_turns_in_order(embedded: Connection) -> None:
    asked = rows(
        embedded,
        "SELECT s, m, ai_chat(s, m, options => ?) FROM (VALUES ('p', 'one'), ('q', 'uno'), "
        "('p', 'two'), ('p', NULL), (NULL, 'x'), ('p', 'three'), ('q', 'due'), ('p', 'one')) "
        "t(s, m)",
        (SHORT,),
    )
    assert [row[2] is None for row in asked] == [False] * 3 + [True, True] + [False] * 3
    # The last row equals the first, so both are one call.
    assert (turns(embedded, "p"), turns(embedded, "q")) == (3, 2)
    one = asked[0][2]
    assert asked[-1][2] == one
    alone = [
        rows(embedded, "SELECT ai_chat('alone', ?, options => ?)", (text, SHORT))[0][0]
        for text in ("one", "two", "three")
    ]
    assert alone == [asked[index][2] for index in (0, 2, 5)]


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE told AS SELECT ai_chat('w', m, options => {'max_tokens': 4}) a "
        "FROM (VALUES ('x'), ('y')) t(m)",
        "INSERT INTO heard SELECT ai_chat('w', m, options => {'max_tokens': 4}) "
        "FROM (VALUES ('v'), ('z')) t(m)",
        "SELECT count(*) FROM (SELECT m FROM (VALUES ('1'), ('2')) t(m) "
        "WHERE ai_chat('w', m, options => {'max_tokens': 4}) IS NOT NULL)",
        "SELECT ai_generate(ai_chat('w', m, options => {'max_tokens': 4})) "
        "FROM (VALUES ('n1'), ('n2')) t(m)",
    ],
)
def test_a_statement_stores_each_turn_once(embedded: Connection, sql: str) -> None:
    before = turns(embedded, "w")
    embedded.cursor().execute("CREATE TABLE IF NOT EXISTS heard (a text)")
    embedded.cursor().execute(sql)
    assert turns(embedded, "w") == before + 2


def test_what_asks_no_model_stores_nothing(embedded: Connection) -> None:
    for sql in (
        "EXPLAIN SELECT ai_chat('x', 'hi')",
        "EXPLAIN (AI_ESTIMATE) SELECT ai_chat('x', 'hi')",
    ):
        assert rows(embedded, sql)
    cursor = embedded.cursor()
    cursor.execute("SET tierkv.dry_run = on")
    cursor.execute("SELECT ai_chat('x', 'hi')")
    assert cursor.fetchall() == [(None,)]
    cursor.execute("RESET tierkv.dry_run")
    assert turns(embedded, "x") == 0


def test_the_answer_cache_has_no_turns(embedded: Connection) -> None:
    cursor = embedded.cursor()
    cursor.execute("SET tierkv.answer_cache = tenant")
    for number in (1, 2):
        cursor.execute("SELECT ai_chat('again', 'hi')")
        assert turns(embedded, "again") == number
    cursor.execute("RESET tierkv.answer_cache")


@pytest.mark.parametrize(
    ("sql", "kind", "text"),
    [
        ("SELECT ai_chat('a b', 'x')", DataError, "not a valid name"),
        ("SELECT ai_chat('', 'x')", DataError, "not a valid name"),
        ("SELECT ai_chat('conv_1', 'x')", ProgrammingError, "not found"),
        ("SELECT ai_chat('resp_1', 'x')", ProgrammingError, "not found"),
        ("SELECT ai_chat('e', '')", DataError, "no answer"),
        ("SELECT ai_chat('e')", DataError, "message"),
        ("SELECT ai_chat('e', 'x', model => 'none')", ProgrammingError, "no model"),
        ("SELECT ai_chat('e', 'x', options => {'max_tokens': 0})", DataError, "max_tokens"),
    ],
)
def test_errors_store_nothing(
    embedded: Connection, sql: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        rows(embedded, sql)
    assert turns(embedded, "e") == 0


def test_a_message_that_does_not_fit_fails_its_row_alone(embedded: Connection) -> None:
    asked = rows(
        embedded,
        "SELECT ai_chat('long', m, options => ?) FROM (VALUES ('a'), (repeat('long ', 50000)), "
        "('b')) t(m)",
        (SHORT,),
    )
    assert [row[0] is None for row in asked] == [False, True, False]
    assert turns(embedded, "long") == 2


KEYS = {"key-alice": USER, "key-bob": "bob"}


class Fronts(Roles):
    """Roles with fronts that keep conversations in PostgreSQL; ``front-file`` has a file.

    The first one has DuckDB, ``front-pg`` has the same PostgreSQL behind. Alice administrates.
    Fronts ``front-valkey`` and ``front-valkey-2`` keep theirs in Valkey.
    """

    NAMES = ("front-duck", "front-pg", "front-file", "front-valkey", "front-valkey-2")

    def __init__(self, folder: Path, postgres: PostgresServer, valkey: str) -> None:
        users = json.dumps({USER: PASSWORD, "bob": PASSWORD})
        environment = {"TIERKV_FRONT_USERS": users, "TIERKV_FRONT_API_KEYS": json.dumps(KEYS)}
        super().__init__(folder, environment=environment)
        self.url = f"postgresql://{USER}:{quote(PASSWORD)}@127.0.0.1:{postgres.port}/app"
        self._behind, self._valkey = postgres.dsn, valkey
        self._clients: dict[tuple[str, str], openai.OpenAI] = {}
        self.ports = {name: (free_port(), free_port()) for name in self.NAMES}

    def _settings(self, name: str) -> Iterator[str]:
        yield from super()._settings(name)
        if name in self.ports:
            pg_port, http_port = self.ports[name]
            yield from (f"front.pg_port={pg_port}", f"front.http_port={http_port}")
            place = str(self._folder / "kept") if name == "front-file" else self.url
            place = self._valkey if "valkey" in name else place
            yield from (f"front.sessions={place}", f"front.admins={USER}")
        if name == "front-pg":
            yield f"front.postgres={self._behind}"

    def client(self, front: str, user: str = USER) -> openai.OpenAI:
        """Return a client of a front; it is closed by ``close_clients``."""
        if (front, user) in self._clients:
            return self._clients[front, user]
        url = f"http://127.0.0.1:{self.ports[front][1]}/v1"
        key = next(key for key, tenant in KEYS.items() if tenant == user)
        made = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        self._clients[front, user] = made
        return made

    def close_clients(self) -> None:
        """Close the clients' connections."""
        for client in self._clients.values():
            client.close()

    def sql(self, front: str, sql: str, *values: Any, user: str = USER) -> list[tuple[Any, ...]]:
        """Run a statement."""
        with psycopg.connect(
            host="127.0.0.1", port=self.ports[front][0], user=user, password=PASSWORD,
            dbname="app" if front == "front-pg" else "main", autocommit=True,
        ) as connection:  # fmt: skip
            return connection.execute(sql.encode(), values).fetchall()

    def kill_hard(self, name: str) -> None:
        """Send SIGKILL to a process."""
        process = self._processes.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer) -> Iterator[Fronts]:
    stack = ExitStack()
    valkey = stack.enter_context(valkey_server(tmp_path_factory.mktemp("valkey")))
    roles = Fronts(tmp_path_factory.mktemp("fronts"), postgres, valkey)
    try:
        with psycopg.connect(postgres.dsn, autocommit=True) as server:
            server.execute(f"CREATE ROLE bob LOGIN PASSWORD '{PASSWORD}'")
        roles.start("meta", "dmp-0", "compute-0", "front-duck", "front-pg")
        yield roles
    finally:
        roles.close_clients()
        roles.stop()
        stack.close()


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.responses.create(input=text, temperature=0, max_output_tokens=6, **more)


def test_any_front_goes_on_with_any_conversation(fronts: Fronts) -> None:
    duck, pg = fronts.client("front-duck"), fronts.client("front-pg")
    kept = duck.conversations.create(metadata={"topic": "kettles"})
    first = ask(duck, FACT, conversation=kept.id)
    second = ask(pg, "Question: Where?", conversation=kept.id)
    chat = duck.chat.completions.create(
        model=first.model,
        messages=[
            {"role": "user", "content": FACT},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Question: Where?"},
        ],
        temperature=0,
        max_tokens=6,
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
    branch = ask(pg, "Question: Where?", previous_response_id=first.id)
    assert branch.output_text == second.output_text
    assert pg.responses.retrieve(first.id).output_text == first.output_text
    listed = duck.conversations.items.list(kept.id, order="asc").data
    assert len(listed) == 4
    pg.responses.delete(branch.id)
    with pytest.raises(openai.NotFoundError):
        duck.responses.retrieve(branch.id)


@pytest.mark.parametrize("front", ["front-duck", "front-pg"])
def test_sql_and_rest_share_conversations(fronts: Fronts, front: str) -> None:
    name = f"shared-{front}"
    call = "SELECT ai_chat(session => %s, message => %s, options => %s)"
    ((answer,),) = fronts.sql(front, call, name, FACT, SHORT)
    assert answer.startswith("kettle")
    told = ask(fronts.client("front-duck"), "Question: Where?", conversation=name)
    ((answer,),) = fronts.sql(front, call, name, "Question: Who?", SHORT)
    items = fronts.client("front-pg").conversations.items.list(name, order="asc").data
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts[::2] == [FACT, "Question: Where?", "Question: Who?"]
    assert (texts[3], texts[5]) == (told.output_text, answer)
    view = "SELECT turns, items, metadata::text FROM tierkv.sessions WHERE session_id = %s"
    assert fronts.sql(front, view, name) == [(3, 6, "{}")]
    of = "SELECT turn, response_id FROM tierkv.session_turns WHERE session_id = %s ORDER BY turn"
    found = fronts.sql(front, of, name)
    assert [row[0] for row in found] == [1, 2, 3] and found[1][1] == told.id


@pytest.mark.parametrize("front", ["front-duck", "front-pg"])
def test_sql_steers_the_kv_of_prompts_and_conversations(fronts: Fronts, front: str) -> None:
    def told(call: str, *values: object) -> dict[str, Any]:
        ((answer,),) = fronts.sql(front, f"SELECT {call}", *values)
        return dict(answer if isinstance(answer, dict) else json.loads(answer))

    name, text = f"steered-{front}", f"{front} speaks about parcels and rivers. " * 12
    fronts.sql(front, "SELECT ai_chat(%s, %s, options => %s)", name, text, SHORT)
    warmed = told("tierkv.kv_prefetch(session => %s)", name)
    assert warmed["outcome"] == "accepted" and warmed["tier"] == "l1" and warmed["tokens"] > 128
    pinned = told("ai_kv_pin(session => %s, keep => '1 minute')", name)
    assert (pinned["outcome"], pinned["tier"]) == ("accepted", "pool") and pinned["tokens"] > 64
    told("tierkv.kv_prefetch(%s)", "A prompt " + text)
    there = told("tierkv.kv_locate(session => %s)", name)
    assert there["outcome"] in ("accepted", "clipped") and there["memory_tokens"] > 64, there
    assert there["memory_tokens"] <= there["tokens"] and there["memory_bytes"] > 0
    kept = told("tierkv.kv_retain(%s, '1 minute')", "A prompt " + text)
    assert kept["outcome"] in ("accepted", "clipped"), kept
    moved = told("tierkv.kv_demote(%s)", "A prompt " + text)
    assert moved["l1_bytes"] > 0 and moved["outcome"] in ("accepted", "clipped")
    assert told("ai_kv_demote(%s)", "A prompt " + text)["outcome"] == "missing"
    demoted = told("ai_locate(%s)", "A prompt " + text)
    assert demoted["l1_tokens"] == demoted["l1_bytes"] == 0 < demoted["memory_tokens"]
    gone = told("tierkv.kv_forget(session => %s)", name)
    assert gone["outcome"] == "accepted" and gone["bytes"] > 0
    assert told("tierkv.kv_forget(session => %s)", name)["outcome"] == "missing"
    assert told("ai_kv_locate(session => %s)", name)["outcome"] == "missing"
    assert told("tierkv.kv_pin('a', '1 minute')")["outcome"] == "rejected"
    rows = fronts.sql(
        front,
        "SELECT s, tierkv.kv_forget(session => s) IS NULL FROM (VALUES (%s), (NULL)) t(s)", name,
    )  # fmt: skip
    assert set(rows) == {(None, True), (name, False)}
    for wrong, state in (
        ("tierkv.kv_pin(session => 'conv_unknown', keep => '1 h')", "42704"),
        ("tierkv.kv_forget('x', session => 's')", "22023"),
        ("tierkv.kv_forget(model => 'm')", "22023"),
        ("tierkv.kv_pin('x')", "22023"),
        ("tierkv.kv_pin('x', 'soon')", "22023"),
    ):
        with pytest.raises(psycopg.Error) as caught:
            fronts.sql(front, f"SELECT {wrong}")
        assert caught.value.sqlstate == state, wrong


def test_turns_from_two_fronts_at_once_are_all_stored(fronts: Fronts) -> None:
    kept = fronts.client("front-duck").conversations.create()
    problems: list[openai.APIError] = []

    def run(front: str) -> None:
        try:
            for number in range(4):
                ask(fronts.client(front), f"{front} {number}", conversation=kept.id)
        except openai.APIError as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in fronts.NAMES[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    items = fronts.client("front-pg").conversations.items.list(kept.id, order="asc", limit=100)
    texts = [item.content[0].text for item in items.data]  # type: ignore[union-attr]
    assert [item.role for item in items.data] == ["user", "assistant"] * 8  # type: ignore[union-attr]
    for front in fronts.NAMES[:2]:
        assert [text for text in texts if text.startswith(front)] == [
            f"{front} {number}" for number in range(4)
        ]


def test_a_front_killed_in_a_turn_leaves_the_conversation_to_another(fronts: Fronts) -> None:
    duck, pg = fronts.client("front-duck"), fronts.client("front-pg")
    kept = duck.conversations.create()
    first = ask(duck, FACT, conversation=kept.id)
    stream = duck.responses.create(
        input="Tell a story", conversation=kept.id, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    lost = duck.responses.create(input="x", background=True, extra_body={"ignore_eos": True})
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    fronts.kill_hard("front-duck")
    stream.close()
    second = ask(pg, "Question: Where?", conversation=kept.id)  # After the dead front's lock.
    texts = [
        item.content[0].text  # type: ignore[union-attr]
        for item in pg.conversations.items.list(kept.id, order="asc").data
    ]
    assert texts == [FACT, first.output_text, "Question: Where?", second.output_text]
    ended = wait_for(lambda: of_final(pg, lost.id), what="the lost response to fail")
    assert ended.status == "failed" and ended.error is not None
    fronts.start("front-duck")
    again = ask(fronts.client("front-duck"), "Question: Who?", conversation=kept.id)
    assert again.usage.input_tokens > second.usage.input_tokens


def of_final(client: openai.OpenAI, response_id: str) -> Any:
    told = client.responses.retrieve(response_id)
    return None if told.status in ("queued", "in_progress") else told


def test_a_front_with_a_file_goes_on_after_its_restart(fronts: Fronts) -> None:
    fronts.start("front-file")
    kept = fronts.client("front-file").conversations.create()
    first = ask(fronts.client("front-file"), FACT, conversation=kept.id)
    alone = ask(fronts.client("front-file"), FACT)
    fronts.kill_hard("front-file")
    fronts.start("front-file")
    client = fronts.client("front-file")
    assert client.responses.retrieve(first.id) == first
    second = ask(client, "Question: Where?", conversation=kept.id)
    follow = ask(client, "Question: Where?", previous_response_id=alone.id)
    assert second.output_text == follow.output_text
    assert second.usage.input_tokens == follow.usage.input_tokens
    with pytest.raises(openai.NotFoundError):  # Another place, another set of conversations.
        fronts.client("front-pg").conversations.retrieve(kept.id)


def test_with_valkey_a_front_goes_on_when_another_is_killed_between_turns(fronts: Fronts) -> None:
    one, other = "front-valkey", "front-valkey-2"
    fronts.start(one, other)
    kept = fronts.client(one).conversations.create(metadata={"topic": "kettles"})
    first = ask(fronts.client(one), FACT, conversation=kept.id)
    tree = ask(fronts.client(one), FACT)
    call = "SELECT ai_chat('told', %s, options => %s)"
    fronts.sql(one, call, FACT, SHORT)
    fronts.kill_hard(one)
    client = fronts.client(other)
    assert client.responses.retrieve(first.id) == first
    second = ask(client, "Question: Where?", conversation=kept.id)
    follow = ask(client, "Question: Where?", previous_response_id=tree.id)
    assert second.output_text == follow.output_text
    assert second.usage.input_tokens == follow.usage.input_tokens
    ((answer,),) = fronts.sql(other, call, "Question: Where?", SHORT)
    assert answer == second.output_text
    fronts.start(one)
    view = "SELECT turns, items FROM tierkv.sessions WHERE session_id = %s"
    assert fronts.sql(one, view, "told") == fronts.sql(one, view, kept.id) == [(2, 4)]
    of = "SELECT turn FROM tierkv.session_turns WHERE session_id = 'told' ORDER BY 1"
    assert fronts.sql(one, of) == [(1,), (2,)]
    found = fronts.client(one).get("/conversations?metadata[topic]=kettles", cast_to=dict[str, Any])
    assert [each["id"] for each in found["data"]] == [kept.id]
    with pytest.raises(psycopg.Error) as caught:
        fronts.sql(one, "SELECT tierkv.kv_forget(session => %s)", kept.id, user="bob")
    assert caught.value.sqlstate == "42704"
    client.conversations.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        fronts.client(one).conversations.retrieve(kept.id)


@pytest.mark.parametrize("front", ["front-duck", "front-pg"])
def test_a_user_sees_and_continues_only_own_conversations(fronts: Fronts, front: str) -> None:
    name = f"own-{front}"
    call = "SELECT ai_chat(%s, 'Hello', options => %s)"
    for user in (USER, "bob", "bob"):
        fronts.sql(front, call, name, SHORT, user=user)
    view = "SELECT tenant, turns FROM tierkv.sessions WHERE session_id = %s ORDER BY 1"
    assert fronts.sql(front, view, name, user="bob") == [("bob", 2)]
    assert fronts.sql(front, view, name) == [(USER, 1), ("bob", 2)]
    of = "SELECT DISTINCT tenant FROM tierkv.session_turns ORDER BY 1"
    assert fronts.sql(front, of, user="bob") == [("bob",)]
    assert {(USER,), ("bob",)} <= set(fronts.sql(front, of))
    made = fronts.client(front).conversations.create()
    with pytest.raises(psycopg.Error) as caught:
        fronts.sql(front, call, made.id, SHORT, user="bob")
    assert caught.value.sqlstate == "42704"
    with pytest.raises(openai.NotFoundError):
        fronts.client(front, "bob").conversations.retrieve(made.id)
    assert fronts.client(front, "bob").conversations.retrieve(name).id == name


def test_turns_of_one_session_from_two_connections_are_all_stored(fronts: Fronts) -> None:
    call = "SELECT ai_chat('both', %s || n, options => %s) FROM (VALUES (1), (2), (3)) t(n)"
    problems: list[psycopg.Error] = []

    def run(front: str) -> None:
        try:
            fronts.sql(front, call, front, SHORT)
        except psycopg.Error as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in fronts.NAMES[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    items = fronts.client("front-pg").conversations.items.list("both", order="asc").data
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    for front in fronts.NAMES[:2]:
        assert [text for text in texts[::2] if text.startswith(front)] == [
            f"{front}{number}" for number in (1, 2, 3)
        ]

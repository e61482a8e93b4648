"""The SessionStore contract: in an SQLite file, in PostgreSQL, in Valkey, and in Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from valkey import Valkey

from tests.fix_cluster import wait_for
from tests.fix_valkey import redis_server, valkey_server
from tierkv.dbfront.sessions.session_database import SessionDatabase
from tierkv.dbfront.sessions.session_file import SessionFile
from tierkv.dbfront.sessions.session_store import (
    ChatSession,
    ItemPage,
    SessionItem,
    SessionQuery,
    SessionStore,
    SessionTurn,
    TurnStatus,
)
from tierkv.dbfront.sessions.session_valkey import SessionValkey
from tierkv.kvcore import limits
from tierkv.kvcore.errors import SessionFullError, SessionStoreError
from tierkv.kvcore.request import HitTokens

Opens = Callable[[], SessionStore]
NOW = 1_700_000_000.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of servers with expiry of fields, and without."""
    folder = tmp_path_factory.mktemp("servers")
    with valkey_server(folder / "v") as valkey, redis_server(folder / "r") as redis:
        yield {"valkey": valkey, "redis": redis}


@pytest.fixture(params=["file", "postgres", "valkey", "redis"])
def opens(
    request: pytest.FixtureRequest, tmp_path: Path, servers: dict[str, str]
) -> Iterator[Opens]:
    """Opens the same store again and again."""
    made: list[SessionStore] = []
    place = request.getfixturevalue("front_url") if request.param == "postgres" else ""
    server = servers.get(request.param, "")
    if server:
        with Valkey.from_url(server) as client:
            client.flushdb()

    def open_one() -> SessionStore:
        store: SessionStore = SessionFile(str(tmp_path / "s"))
        if place:
            store = SessionDatabase(place)
        elif server:
            store = SessionValkey(server)
        made.append(store)
        return store

    yield open_one
    for store in made:
        store.close()


@pytest.fixture
def store(opens: Opens) -> SessionStore:
    return opens()


def session(name: str = "s", tenant: str = "a", **changes: object) -> ChatSession:
    fresh = ChatSession(tenant, name, created_s=NOW, seen_s=NOW)
    return replace(fresh, **changes)  # type: ignore[arg-type]


def item(name: str, text: str = "hi", **changes: object) -> SessionItem:
    body = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return SessionItem(f"msg_{name}", body, **changes)  # type: ignore[arg-type]


def turn(name: str, session_id: str = "s", parent: str = "", **changes: object) -> SessionTurn:
    fresh = SessionTurn(
        "a", name, session_id, TurnStatus.COMPLETED, {"model": "m"}, NOW, parent=parent,
        model="m", ended_s=NOW + 1, input_tokens=7, output_tokens=2, hits=HitTokens(1, 2, 0, 0),
    )  # fmt: skip
    return replace(fresh, **changes)  # type: ignore[arg-type]


def of(name: str) -> list[SessionItem]:
    """The two items of a turn."""
    return [
        item(f"{name}_in", response_id=name),
        item(f"{name}_out", response_id=name, is_output=True),
    ]


def ids(items: list[SessionItem] | None) -> list[str] | None:
    return None if items is None else [each.item_id.removeprefix("msg_") for each in items]


def tree(store: SessionStore, *names: str) -> None:
    """Turns in a row, each the next one's parent."""
    store.create(session(is_list=False))
    for before, name in zip(("", *names), names, strict=False):
        assert store.put_turn(turn(name, parent=before), of(name)) is not None


def test_1_a_session_is_its_tenants_only(store: SessionStore) -> None:
    made = session(metadata={"case": "é\0\ud800"}, ttl_s=9.0)
    assert store.create(made, [item("1")])
    assert store.create(session(tenant="b"))
    found = store.session("a", "s", NOW)
    assert found == replace(made, items=1, size_bytes=len(item("1").to_json()))
    assert store.session("b", "s", NOW) == session(tenant="b")
    assert store.session("c", "s", NOW) is None
    assert store.session("a", "s\0", NOW) is None and store.turn("a", "\0", NOW) is None
    assert ids(store.items("b", "s")) == []
    one = ItemPage(only="msg_1")
    assert store.items("b", "s", one) == [] and store.items("a", "s", one) == [item("1")]
    assert store.items("a", "s", ItemPage(only="msg_2")) == []
    assert not store.delete_item("b", "s", "msg_1")
    assert not store.delete("c", "s")


def test_1_after_its_time_a_session_is_gone_with_its_turns(store: SessionStore) -> None:
    store.create(session(ttl_s=10.0, is_list=False))
    store.put_turn(turn("r1"), of("r1"))  # seen at NOW + 1
    assert store.session("a", "s", NOW + 10.9) is not None
    assert ids(store.history("a", "r1", NOW + 10.9)) == ["r1_in", "r1_out"]
    for late in (NOW + 11, NOW + 99):
        assert store.session("a", "s", late) is None
        assert store.turn("a", "r1", late) is None
        assert store.history("a", "r1", late) is None
        assert store.sessions(SessionQuery("a"), late) == store.turns("a", 9, late) == []
        assert store.change("a", "s", late, metadata={}) is None
        assert not store.add_items("a", "s", [item("2")], late)
    assert store.prune(NOW + 10) == 0
    assert store.prune(NOW + 11) == 1
    assert store.turn_items("a", "r1") == []
    assert store.session("a", "s", NOW) is None


def test_2_others_see_what_was_stored(opens: Opens) -> None:
    one, other = opens(), opens()
    one.create(session())
    assert other.add_items("a", "s", [item("1")], NOW + 5)
    one.close()
    again = opens()
    assert ids(again.items("a", "s")) == ["1"]
    found = again.session("a", "s", NOW)
    assert found is not None and found.seen_s == NOW + 5


def test_3_a_name_is_free_again_when_its_session_expired(store: SessionStore) -> None:
    assert store.create(session(ttl_s=5.0), [item("1")])
    assert not store.create(session())
    assert store.create(session(created_s=NOW + 6, seen_s=NOW + 6))
    assert store.items("a", "s") == []


def test_4_one_owner_at_a_time(opens: Opens) -> None:
    one, other = opens(), opens()
    assert not one.lock("a", "s", "x", now_s=NOW, until_s=NOW + 5)  # no such session
    one.create(session())
    assert one.lock("a", "s", "x", now_s=NOW, until_s=NOW + 5)
    assert not other.lock("a", "s", "y", now_s=NOW + 4.9, until_s=NOW + 9)
    assert one.lock("a", "s", "x", now_s=NOW + 4, until_s=NOW + 8)
    assert not other.lock("a", "s", "y", now_s=NOW + 7.9, until_s=NOW + 9)
    other.unlock("a", "s", "y")  # Not its owner.
    assert not other.lock("a", "s", "y", now_s=NOW + 7.9, until_s=NOW + 9)
    one.unlock("a", "s", "x")
    assert other.lock("a", "s", "y", now_s=NOW, until_s=NOW + 5)
    assert one.lock("a", "s", "x", now_s=NOW + 5, until_s=NOW + 9)  # The other one's has ended.


def test_4_of_many_that_try_at_once_one_has_it(opens: Opens) -> None:
    opens().create(session())
    stores = [opens() for _ in range(6)]
    got: list[str] = []

    def take(number: int) -> None:
        name = str(number)
        if stores[number].lock("a", "s", name, now_s=NOW, until_s=NOW + 5):
            got.append(name)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_5_a_turn_joins_its_conversation_and_gives_the_lock_back(store: SessionStore) -> None:
    store.create(session(), [item("0")])
    assert store.lock("a", "s", "x", now_s=NOW, until_s=NOW + 5)
    stored = store.put_turn(turn("r1"), of("r1"), owner="x")
    assert stored == replace(turn("r1"), number=1)
    assert store.turn("a", "r1", NOW) == stored
    assert store.turns("a", 9, NOW) == store.turns(None, 9, NOW) == [stored]
    assert store.turns("b", 9, NOW) == []
    assert ids(store.items("a", "s")) == ["0", "r1_in", "r1_out"]
    assert store.lock("a", "s", "y", now_s=NOW, until_s=NOW + 5)
    found = store.session("a", "s", NOW)
    assert found is not None
    assert (found.turns, found.items, found.model, found.seen_s) == (1, 3, "m", NOW + 1)
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (7, 3, 2)
    assert (found.prompt_tokens, found.hits) == (7, HitTokens(1, 2, 0, 0))
    again = store.put_turn(replace(turn("r1"), status=TurnStatus.FAILED), [], owner="y")
    assert again == stored  # Final stays final.


def test_5_a_turn_without_the_lock_is_not_stored(store: SessionStore) -> None:
    store.create(session())
    assert store.lock("a", "s", "x", now_s=NOW, until_s=NOW + 1)
    assert store.lock("a", "s", "y", now_s=NOW + 2, until_s=NOW + 5)
    assert store.put_turn(turn("r1"), of("r1"), owner="x") is None
    assert store.items("a", "s") == [] and store.turn("a", "r1", NOW) is None
    assert store.put_turn(turn("r2", "nowhere"), of("r2")) is None
    assert store.put_turn(turn("r3", parent="gone"), of("r3")) is None


def test_5_an_open_turn_is_outside_until_it_is_answered(store: SessionStore) -> None:
    store.create(session())
    waiting = turn("r1", status=TurnStatus.QUEUED, ended_s=0.0)
    asked = of("r1")[:1]
    assert store.put_turn(waiting, asked) is not None
    assert store.items("a", "s") == [] and store.turn_items("a", "r1") == asked
    assert store.history("a", "r1", NOW) is None
    assert store.put_turn(replace(waiting, status=TurnStatus.IN_PROGRESS), asked) is not None
    assert store.sign("a", "r1", NOW + 3) and not store.sign("b", "r1", NOW)
    alive = store.turn("a", "r1", NOW)
    assert alive is not None and alive.alive_s == NOW + 3
    assert store.put_turn(turn("r1"), of("r1"), opened=True) is not None
    assert not store.sign("a", "r1", NOW)
    assert ids(store.items("a", "s")) == ["r1_in", "r1_out"]
    assert store.turn_items("a", "r1") == of("r1")
    found = store.session("a", "s", NOW)
    assert found is not None and (found.items, found.turns) == (2, 1)
    store.put_turn(replace(waiting, response_id="r2"), of("r2")[:1])
    assert store.delete_turn("a", "r2")
    assert store.put_turn(turn("r2"), of("r2"), opened=True) is None


def test_6_the_history_of_a_response_is_its_path(store: SessionStore) -> None:
    tree(store, "r1", "r2", "r3")
    store.put_turn(turn("other", parent="r1"), of("other"))
    assert ids(store.history("a", "r3", NOW)) == [
        "r1_in", "r1_out", "r2_in", "r2_out", "r3_in", "r3_out",
    ]  # fmt: skip
    assert ids(store.history("a", "other", NOW)) == ["r1_in", "r1_out", "other_in", "other_out"]
    assert store.history("b", "r3", NOW) is None
    assert store.history("a", "r9", NOW) is None
    store.put_turn(turn("bad", parent="r3", status=TurnStatus.FAILED), of("bad")[:1])
    assert store.history("a", "bad", NOW) is None


def test_6_responses_may_follow_a_turn_of_a_conversation(store: SessionStore) -> None:
    store.create(session(), [item("0")])
    store.put_turn(turn("r1"), of("r1"))
    store.put_turn(turn("r2"), of("r2"))
    store.create(session("t", is_list=False))
    store.put_turn(turn("r3", "t", parent="r1"), of("r3"))
    assert ids(store.history("a", "r3", NOW)) == ["0", "r1_in", "r1_out", "r3_in", "r3_out"]
    assert store.delete_item("a", "s", "msg_r1_in")
    assert ids(store.history("a", "r3", NOW)) == ["0", "r1_out", "r3_in", "r3_out"]
    assert store.delete("a", "s")
    assert store.history("a", "r3", NOW) is None


def test_7_what_follows_a_deleted_response_has_no_history(store: SessionStore) -> None:
    tree(store, "r1", "r2")
    assert store.delete_turn("a", "r1")
    assert not store.delete_turn("a", "r1")
    assert not store.delete_turn("b", "r2")
    assert store.turn_items("a", "r1") == [] and store.history("a", "r2", NOW) is None
    found = store.session("a", "s", NOW)
    assert found is not None and found.items == 2
    assert found.size_bytes == sum(len(each.to_json()) for each in of("r2"))
    assert store.delete_turn("a", "r2")
    assert store.session("a", "s", NOW) is None  # Nothing is left of the tree.


def test_7_a_conversation_keeps_the_items_of_a_deleted_response(store: SessionStore) -> None:
    store.create(session())
    store.put_turn(turn("r1"), of("r1"))
    assert store.delete_turn("a", "r1") and store.turn("a", "r1", NOW) is None
    assert ids(store.items("a", "s")) == ["r1_in", "r1_out"]
    assert store.delete("a", "s") and store.items("a", "s") == []


def test_8_bounds(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SESSION_ITEMS", 4)
    monkeypatch.setattr(limits, "MAX_SESSIONS_OF_TENANT", 2)
    store.create(session(), [item("0"), item("1"), item("2")])
    with pytest.raises(SessionFullError):
        store.put_turn(turn("r1"), of("r1"))
    with pytest.raises(SessionFullError):
        store.add_items("a", "s", [item("3"), item("4")], NOW)
    assert ids(store.items("a", "s")) == ["0", "1", "2"]
    store.create(session("t", is_list=False))
    store.put_turn(turn("r2", "t"), of("r2"))
    store.put_turn(turn("r3", "t", parent="r2"), of("r3"))
    store.put_turn(turn("r4", "t", parent="r2"), of("r4"))  # Another path of four items.
    with pytest.raises(SessionFullError):
        store.put_turn(turn("r5", "t", parent="r3"), of("r5"))
    with pytest.raises(SessionFullError):
        store.create(session("u"))
    assert store.create(session("u", tenant="b"))


def test_items_are_listed_in_pages(store: SessionStore) -> None:
    store.create(session(), [item(str(number)) for number in range(7)])
    assert ids(store.items("a", "s", ItemPage(3))) == ["0", "1", "2"]
    assert ids(store.items("a", "s", ItemPage(3, "msg_2"))) == ["3", "4", "5"]
    assert ids(store.items("a", "s", ItemPage(3, "msg_5", newest_first=True))) == ["4", "3", "2"]
    assert ids(store.items("a", "s", ItemPage(9, "msg_6"))) == []
    assert store.delete_item("a", "s", "msg_3")
    assert ids(store.items("a", "s", ItemPage(2, "msg_2"))) == ["4", "5"]
    assert store.add_items("a", "s", [item("7")], NOW)
    assert store.add_items("a", "s", [item("7")], NOW)  # The reply to the first try was lost.
    found = store.session("a", "s", NOW)
    assert found is not None and found.items == 7


def test_sessions_are_found_by_metadata_last_used_first(store: SessionStore) -> None:
    for number in range(5):
        kind = "odd" if number % 2 else "even"
        made = session(str(number), metadata={"kind": kind, "n'\"": "%_"}, seen_s=NOW + number)
        store.create(made)
    store.create(session("tree", is_list=False, seen_s=NOW - 1))
    store.create(session("9", tenant="b", metadata={"kind": "odd"}, seen_s=NOW + 9))

    def names(**query: object) -> list[str]:
        asked = {"tenant": "a", "most": 9} | query
        return [s.session_id for s in store.sessions(SessionQuery(**asked), NOW)]  # type: ignore[arg-type]

    assert names() == ["4", "3", "2", "1", "0", "tree"]
    assert names(lists_only=True) == ["4", "3", "2", "1", "0"]
    assert names(metadata={"kind": "odd"}) == ["3", "1"]
    assert names(metadata={"kind": "odd", "n'\"": "%_"}, most=1) == ["3"]
    assert names(metadata={"kind": "odd"}, after="3") == ["1"]
    assert names(metadata={"kind": "od"}) == []
    assert names(tenant=None, metadata={"kind": "odd"}) == ["9", "3", "1"]
    changed = store.change("a", "3", NOW + 20, metadata={"kind": "even"}, ttl_s=60.0)
    assert changed is not None
    assert (changed.metadata, changed.seen_s, changed.ttl_s) == ({"kind": "even"}, NOW + 20, 60.0)
    assert names(metadata={"kind": "even"}) == ["3", "4", "2", "0"]


def test_a_place_that_cannot_be_used_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "s").write_bytes(b"not a database" * 500)
    damaged = SessionFile(str(tmp_path / "s"))
    with pytest.raises(SessionStoreError, match="conversations can't be read") as told:
        damaged.session("a", "s", NOW)
    assert str(tmp_path) not in f"{told.value.message} {told.value.detail} {told.value.hint}"
    assert str(tmp_path) in caplog.text  # For the administrator.
    assert (tmp_path / "s").read_bytes().startswith(b"not a database")
    places: list[SessionStore] = [
        SessionDatabase("postgresql://me:secret@127.0.0.1:1/db"),
        SessionValkey("redis://me:secret@127.0.0.1:1/0"),
    ]
    for away in places:
        with pytest.raises(SessionStoreError) as caught:
            away.session("a", "s", NOW)
        assert "secret" not in str(caught.value)
        assert "secret" not in away.place


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_server_drops_a_session_by_itself_and_lists_lose_what_it_dropped(
    servers: dict[str, str], kind: str
) -> None:
    store = SessionValkey(servers[kind])
    with Valkey.from_url(servers[kind]) as client:
        client.flushdb()
        store.create(session(ttl_s=100.0))
        store.put_turn(turn("r1"), of("r1"))
        assert store.lock("a", "s", "x", now_s=NOW, until_s=NOW + 5)
        (key,) = client.keys("*:s:s")
        assert 90 < client.ttl(key) <= 100
        if kind == "valkey":  # A lock ends by itself, some time after its end.
            (left_s,) = client.execute_command("HTTL", key, "FIELDS", 1, "owner")
            assert 5 < left_s <= 65
        client.pexpire(key, 1)
        wait_for(lambda: not client.exists(key), what="the server has dropped the session")
        assert store.session("a", "s", NOW) is None and store.turn("a", "r1", NOW) is None
        assert store.sessions(SessionQuery("a"), NOW) == store.turns("a", 9, NOW) == []
        assert store.create(session("t", ttl_s=0.0))
        assert store.prune(NOW + 200) == 1
        assert sorted(key.rpartition(b":")[2] for key in client.keys("*")) == [
            b"seen", b"sessions", b"t",
        ]  # fmt: skip
        assert store.change("a", "t", NOW, ttl_s=50.0) is not None
        (key,) = client.keys("*:s:t")
        assert 0 < client.ttl(key) <= 50
        store.change("a", "t", NOW, ttl_s=0.0)
        assert client.ttl(key) == -1
    store.close()

"""An engine's door to a real pool that is late, killed, full, locked, or shared with others."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fix_cluster import ROOT, free_port, wait_for
from tests.fix_door import IDENTITY, LAYOUT, MakeDoor
from tests.fix_serve_dmp import StartNode
from tierkv.dmp.client.pool import Pool
from tierkv.integrations.engine_report import Complaints
from tierkv.integrations.membership import MANIFEST_LOOK_S, PERIOD_S, SLOTS, Manifest
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore import limits
from tierkv.kvcore.clock import ManualClock, SystemClock
from tierkv.kvcore.ids import NodeId

pytestmark = pytest.mark.integration


def put(door: PoolDoor, key: str, value: bytes = b"value") -> bool:
    return door.submit(lambda pool: pool.put(key, value), False, name="store").result(30)


def get(door: PoolDoor, key: str) -> bytes | None:
    return door.submit(lambda pool: pool.get(key), None, name="lookup").result(30)


def wait_up(door: PoolDoor) -> None:
    wait_for(lambda: door.up, what="the door is up")


def wait_complaint(door: PoolDoor, code: str) -> str:
    def note() -> str:
        return next((n for n in door.notes() if n.startswith(f"{code} (")), "")

    return wait_for(note, what=f"a complaint {code}, not only {door.notes()}")


def test_a_pool_that_is_late_is_used_when_it_comes(
    start_node: StartNode, make_door: MakeDoor
) -> None:
    port = free_port()
    door = make_door({"pool": f"127.0.0.1:{port}"})
    wait_complaint(door, "pool_down")
    assert not door.up and "no pool node" in door.why_down
    early = door.submit(lambda pool: pool.put("a", b"1"), False, name="store")
    assert early.done() and early.result() is False
    start_node("--port", str(port))
    wait_up(door)
    assert put(door, "a") and get(door, "a") == b"value"
    wait_for(lambda: not door.notes(), what="the complaint is over")
    assert door.counts()["complaints_pool_down"] == 1 and door.why_down == ""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_node_is_misses_until_it_is_back(
    start_node: StartNode, make_door: MakeDoor, transport: str
) -> None:
    node = start_node("--port", "0")
    door = make_door({"pool": node.address, "transport": transport})
    wait_up(door)
    assert put(door, "a")
    assert door.submit(lambda pool: pool.pin("a"), False, name="hold").result(30)
    node.end(signal.SIGKILL)
    for n in range(100):  # Whatever comes of them, they end.
        put(door, f"lost-{n}", bytes(100_000))
    assert wait_complaint(door, "pool_down").count(node.address) == 1
    assert not door.up and get(door, "a") is None
    start_node("--port", node.port)
    wait_up(door)
    assert get(door, "a") == b"value"
    assert not [name for name in door.counts() if name.endswith("_failed")]


def test_a_wrong_token_is_said_and_the_right_one_comes_from_a_file(
    start_node: StartNode, make_door: MakeDoor, tmp_path: Path
) -> None:
    node = start_node("--port", "0", "--set", "cluster.token=right")
    wrong = make_door({"pool": node.address, "token": "wrong"})
    assert "wants another cluster token" in wait_complaint(wrong, "wrong_token")
    assert not wrong.up and get(wrong, "a") is None
    file = tmp_path / "token"
    file.write_text("right\n")
    right = make_door({"pool": node.address, "token_file": str(file)})
    wait_up(right)
    assert put(right, "a")


def test_a_full_pool_is_said_and_the_engine_goes_on(
    start_node: StartNode, make_door: MakeDoor
) -> None:
    door = make_door({"pool": start_node("--port", "0").address})
    wait_up(door)
    block = bytes(8 << 20)

    def fill(pool: Pool) -> list[bool]:
        done = []
        for n in range(10):  # 80 MiB into 64.
            done.append(pool.put(f"block-{n}", block) and pool.pin(f"block-{n}"))
        return done

    stored = door.submit(fill, [], name="store").result(60)
    assert stored[0] and not stored[-1]
    assert "dmp.capacity" in wait_complaint(door, "pool_full")
    assert door.up and get(door, "block-0") == block
    wait_for(lambda: not door.notes(), what="the complaint is over when nothing is refused")


def test_work_that_raises_is_a_default_and_is_told(
    start_node: StartNode, make_door: MakeDoor
) -> None:
    door = make_door({"pool": start_node("--port", "0").address})
    wait_up(door)
    for _ in range(3):
        failed = door.submit(lambda pool: pool.put("", b""), False, name="store")
        assert failed.result(30) is False
    assert door.counts() == {"store_failed": 3, "complaints_store_failed": 3}
    assert "ValueError: a key must not be empty" in wait_complaint(door, "store_failed")


def test_too_much_work_is_refused_at_once(start_node: StartNode, make_door: MakeDoor) -> None:
    door = make_door({"pool": start_node("--port", "0").address, "threads": 1})
    wait_up(door)
    gate, entered = threading.Event(), threading.Event()

    def hang(pool: Pool) -> bool:
        entered.set()
        return gate.wait(30)

    first = door.submit(hang, False, name="store")
    assert entered.wait(30)
    waiting = [
        door.submit(lambda pool: True, False, name="store") for _ in range(limits.MAX_ENGINE_WORK)
    ]
    over = door.submit(lambda pool: True, False, name="store")
    assert over.done() and over.result() is False
    assert door.counts()["store_overflow"] == 1
    gate.set()
    assert first.result(30) and all(future.result(30) for future in waiting)


def test_a_frozen_node_is_misses_until_it_goes_on(
    start_node: StartNode, make_door: MakeDoor
) -> None:
    node = start_node("--port", "0")
    door = make_door({"pool": node.address, "transport": "tcp", "timeout_ms": 100})
    wait_up(door)
    assert put(door, "a")
    node.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: get(door, "a") is None and not door.up, what="a silent node is left alone")
        late = door.submit(lambda pool: pool.get("a"), None, name="lookup")
        assert late.done()
        wait_complaint(door, "pool_down")
    finally:
        node.process.send_signal(signal.SIGCONT)
    wait_up(door)
    assert get(door, "a") == b"value"


def test_a_door_that_was_never_opened_can_be_closed_and_used() -> None:
    door = PoolDoor(PoolAccess.read({"meta": "127.0.0.1:1"}), IDENTITY)
    door.close()
    assert not door.up and put(door, "a") is False
    door.complain("late", "after the end")
    assert door.notes() == ("late (1): after the end",)
    door.close()


def test_a_closed_door_answers_defaults(start_node: StartNode, make_door: MakeDoor) -> None:
    door = make_door({"pool": start_node("--port", "0").address})
    wait_up(door)
    door.close()
    door.close()
    assert not door.up and door.why_down == "closed" and put(door, "a") is False


def test_engines_that_can_t_share_are_told_in_what_they_differ(
    start_node: StartNode, make_door: MakeDoor
) -> None:
    address = start_node("--port", "0").address
    first = make_door({"pool": address}, part="first")
    wait_up(first)
    assert put(first, "the manifest is left soon")
    wait_for(lambda: left_in(address) == 1, what="the first engine's manifest")
    same = make_door({"pool": address}, part="same")
    other = make_door(
        {"pool": address},
        part="other",
        version="0.32.1",
        layout=replace(LAYOUT, block_tokens=128),
        ranks=2,
    )
    note = wait_complaint(other, "layout_mismatch")
    assert "tensor parallel 2 here, 1 there, block size 128 here, 16 there" in note
    assert "vllm 0.32.0" in note and "-first" in note
    assert other.up and put(other, "b") and other.base_key != first.base_key
    wait_for(lambda: left_in(address) == 2, what="the other engine's manifest")
    wait_up(same)
    assert same.base_key == first.base_key


def test_secrets_and_tenants_are_different_keys(start_node: StartNode, make_door: MakeDoor) -> None:
    address = start_node("--port", "0").address
    given = [{}, {"tenant": "acme"}, {"secret": "x" * 16}, {"secret": "x" * 16, "tenant": "acme"}]
    doors = [make_door({"pool": address} | more) for more in given]
    assert len({door.base_key for door in doors}) == 4
    assert make_door({"pool": address, "tenant": "acme"}).base_key == doors[1].base_key


def test_unknown_weights_are_never_shared(start_node: StartNode, make_door: MakeDoor) -> None:
    door = make_door({"pool": start_node("--port", "0").address}, revision="", version="9.9")
    assert "vllm 9.9 was not tested" in wait_complaint(door, "untested_version")
    assert "can't be told" in wait_complaint(door, "model_revision")
    assert door.base_key is None and not door.up and not put(door, "a")


def left_in(address: str) -> int:
    """Count the manifests of the model that are in a pool."""
    period = int(SystemClock().wall() // PERIOD_S)
    names = [f"tierkv-manifest-1|tiny|{period}|{slot}" for slot in range(SLOTS)]
    with Pool.connect(address) as pool:
        return sum(pool.exists_many(names))


def test_a_manifest_is_forgotten_after_two_periods(start_node: StartNode) -> None:
    with Pool.connect(start_node("--port", "0").address) as pool:
        clock = ManualClock()
        old = Manifest(replace(IDENTITY, revision="old"), NodeId("old"), Complaints(), clock)
        old.look(pool)
        complaints = Complaints()
        new = Manifest(IDENTITY, NodeId("new"), complaints, clock)
        new.look(pool)
        (note,) = complaints.notes()
        assert "(old) keeps tiny" in note and "revision abc here, old there" in note
        clock.advance(2 * PERIOD_S + MANIFEST_LOOK_S)
        new.look(pool)
        assert complaints.notes() == ()
        clock.advance(MANIFEST_LOOK_S)
        old.look(pool)
        clock.advance(MANIFEST_LOOK_S)
        new.look(pool)
        assert complaints.notes() == (note.replace("(1)", "(2)"),)


def test_nonsense_in_place_of_a_manifest_is_passed_over(start_node: StartNode) -> None:
    with Pool.connect(start_node("--port", "0").address) as pool:
        clock = ManualClock()
        period = int(clock.wall() // PERIOD_S)
        nonsense = [
            b"{", b"[]", b'{"engine": 1, "node": "n", "fields": {}}', b"x" * 20_000,
            b'{"engine": "e", "node": "n", "fields": {"a": 1}}', b"\xff", b"[" * 15_000,
        ]  # fmt: skip
        for slot, value in enumerate(nonsense):
            assert pool.put(f"tierkv-manifest-1|tiny|{period}|{slot}", value)
        complaints = Complaints()
        manifest = Manifest(IDENTITY, NodeId("me"), complaints, clock)
        manifest.look(pool)
        assert complaints.notes() == ()
        assert pool.exists(f"tierkv-manifest-1|tiny|{period}|{len(nonsense)}")


FORKING = """
import os, sys, threading
from dataclasses import replace
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.settings import PoolAccess
from tests.fix_door import IDENTITY

door = PoolDoor(PoolAccess.read({"pool": sys.argv[1]}), IDENTITY)
def wait_up():
    wait = threading.Event()
    for _ in range(1_000):
        if door.up:
            return
        wait.wait(0.01)
    raise SystemExit("the door did not come up")
wait_up()
parent = door.node_id
assert door.submit(lambda pool: pool.put("parent", b"1"), False, name="store").result(10)
child = os.fork()
if not child:
    wait_up()
    assert door.node_id != parent
    assert door.submit(lambda pool: pool.get("parent"), None, name="get").result(10) == b"1"
    assert door.submit(lambda pool: pool.put("child", b"2"), False, name="store").result(10)
    door.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert door.submit(lambda pool: pool.get("child"), None, name="get").result(10) == b"2"
door.close()
"""


def test_a_forked_child_has_a_door_of_its_own(start_node: StartNode) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING, start_node("--port", "0").address],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")

"""Our tier under vLLM's own tiering manager: what is stored is found, also by others and later."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.engines.vllm.tier_rig import MakeEngine, Server, keys_of, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_chunks_come_back_after_memory_gave_them_away(
    make_engine: MakeEngine, transport: str
) -> None:
    engine = make_engine(8, tier={"transport": transport})
    keys = keys_of("a", 6)
    engine.store(keys)
    engine.push_out(8)
    assert engine.manager.primary_tier.lookup(keys[0], engine.request()) is LookupResult.MISS
    assert engine.check(keys) == 6
    counts = engine.counts()
    assert counts["hit_tokens"] == 6 * 16 and counts["read_bytes"] == 6 * engine.size
    assert engine.pinned() == 0


def test_another_engine_finds_them(make_engine: MakeEngine) -> None:
    first, second = make_engine(), make_engine()
    keys = keys_of("a", 5)
    first.store(keys)
    assert second.check([*keys, *keys_of("b", 2)]) == 5
    # Both compute the same: nothing is sent twice.
    second.store(keys_of("c", 2))
    first.store(keys_of("c", 2))
    assert first.counts()["stored_tokens"] == 5 * 16


def test_an_engine_started_again_finds_them(make_engine: MakeEngine) -> None:
    keys = keys_of("a", 5)
    first = make_engine()
    first.store(keys)
    first.manager.shutdown()
    assert make_engine().check(keys) == 5


def test_a_salt_is_another_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(16)
    engine.store(keys_of("a", 3, salt="tenant one / @ \u00e9"))
    assert engine.check(keys_of("a", 3, salt="tenant two")) == 0
    assert engine.check(keys_of("a", 3)) == 0
    assert engine.check(keys_of("a", 3, salt="tenant one / @ \u00e9")) == 3


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"chunk_bytes": 128 << 10}, "chunk bytes"),
        ({"dtype": "fp8"}, "kv dtype"),
        ({"tp_size": 2, "world_size": 2}, "ranks"),
    ],
)
def test_engines_that_differ_share_nothing_and_say_so(
    make_engine: MakeEngine, other: dict[str, Any], field: str
) -> None:
    first = make_engine()
    keys = keys_of("a", 3)
    first.store(keys)
    second = make_engine(**other)
    assert second.check(keys) == 0
    second.store(keys)
    assert second.check(keys) == first.check(keys) == 3

    def told() -> str:
        return next((note for note in second.door.notes() if field in note), "")

    assert "layout_mismatch" in wait_for(told, what="the mismatch is told")


def test_tenants_share_nothing(make_engine: MakeEngine) -> None:
    make_engine(tier={"tenant": "one"}).store(keys_of("a", 3))
    assert make_engine(tier={"tenant": "two"}).check(keys_of("a", 3)) == 0
    assert make_engine(tier={"tenant": "one"}).check(keys_of("a", 3)) == 3


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_node_is_misses_and_keeps_its_chunks(
    make_engine: MakeEngine, node: Server, transport: str
) -> None:
    engine = make_engine(8, tier={"transport": transport})
    keys = keys_of("a", 6)
    engine.store(keys)
    engine.push_out(8)
    node.end(signal.SIGKILL)
    engine.store(keys_of("lost", 3))
    assert engine.check(keys) == 0
    wait_for(lambda: not engine.door.up, what="the door is down")
    assert engine.check(keys) == 0
    engine.push_out(8)
    wait_for(lambda: "complaints_pool_down" in engine.counts(), what="the loss is said")
    node.start()
    wait_for(lambda: engine.door.up, what="the door is up again")
    assert engine.check(keys) == 6


def test_a_pool_that_is_not_there_yet(make_engine: MakeEngine, node: Server) -> None:
    node.end(signal.SIGKILL)
    engine = make_engine(wait=False)
    keys = keys_of("a", 3)
    engine.store(keys)
    assert engine.check(keys_of("b", 2)) == 0 and engine.check(keys) == 3
    node.start()
    wait_for(lambda: engine.door.up, what="the door is up")
    engine.store(keys_of("c", 2))
    engine.push_out(8)
    assert engine.check(keys_of("c", 2)) == 2

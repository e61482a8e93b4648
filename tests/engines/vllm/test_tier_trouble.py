"""What goes wrong under vLLM's tiering manager with our tier: it ends as a miss, said once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from vllm.utils.hashing import sha256, xxhash
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult

from tests.engines.vllm.tier_rig import (
    Engine,
    MakeEngine,
    Server,
    flip_bits,
    keys_of,
    wait_for,
)
from tierkv.kvcore.errors import ConfigError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def wait_note(engine: Engine, code: str) -> str:
    def note() -> str:
        engine.step()
        return next((n for n in engine.door.notes() if n.startswith(code)), "")

    return wait_for(note, what=f"the engine says {code}")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_damaged_chunks_are_never_used(
    make_engine: MakeEngine, tmp_path: Path, transport: str
) -> None:
    engine = make_engine(8, tier={"transport": transport})
    keys = keys_of("a", 6)
    engine.store(keys)
    assert flip_bits(tmp_path)
    engine.push_out(8)
    assert engine.check(keys) == 0
    assert "6 of 6 chunks could not be read" in wait_note(engine, "load_failed")
    assert engine.pinned() == 0
    # They are computed again, and stored again beside the slots that are damaged.
    engine.push_out(8)
    engine.store(keys)
    engine.push_out(8)
    assert engine.check(keys) == 6


def test_one_damaged_chunk_costs_only_itself(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(8)
    keys = keys_of("a", 6)
    engine.store(keys[4:5])
    assert flip_bits(tmp_path)
    engine.store([*keys[:4], keys[5]])
    engine.push_out(8)
    request = engine.request()
    assert engine.check(keys, request) == 4
    # The last one was loaded too: the failed one is all that is missing.
    assert engine.manager.primary_tier.lookup(keys[5], request) is LookupResult.HIT
    engine.finish(request)


def test_a_full_pool_refuses_and_the_engine_goes_on(make_engine: MakeEngine) -> None:
    big = 4 << 20
    engine = make_engine(16, chunk_bytes=big)
    held = keys_of("held", 3)
    engine.store(held)
    engine.push_out(16)
    request = engine.request()

    def all_held() -> bool:
        found = [engine.tier.lookup(key, request) for key in held]
        engine.step()
        return all(answer is LookupResult.HIT for answer in found)

    wait_for(all_held, what="three chunks are held")
    for n in range(10):  # 160 MiB.
        engine.store(keys_of(f"more-{n}", 4))
    assert engine.check(held, request) == 3
    engine.finish(request)
    engine.push_out(16)
    assert engine.check(keys_of("more-9", 4)) == 4
    assert engine.pinned() == 0


def test_a_chunk_that_no_node_can_take_is_said(make_engine: MakeEngine) -> None:
    engine = make_engine(3, chunk_bytes=40 << 20)
    engine.store(keys_of("a", 1))
    assert "smaller block_size" in wait_note(engine, "chunk_too_large")


def test_aborted_requests_leave_no_reservations(make_engine: MakeEngine) -> None:
    engine = make_engine(8)
    prompts = [keys_of(f"p{n}", 8) for n in range(4)]
    for keys in prompts:
        engine.store(keys)
    engine.push_out(8)
    requests = [engine.request() for _ in prompts]
    for keys, request in zip(prompts, requests, strict=True):
        for key in keys:
            assert engine.tier.lookup(key, request) is LookupResult.RETRY
    engine.finish(requests[0])  # Before it was asked, ...
    engine.step()
    engine.finish(requests[1])  # ... while it is, ...
    last = prompts[3][-1]

    def answered() -> bool:
        return engine.tier.lookup(last, requests[3]) is LookupResult.HIT

    wait_for(answered, what="the pool has answered")
    assert wait_for(engine.pinned, what="chunks are pinned") >= 16
    engine.finish(requests[2])  # ... and when they are held.
    engine.finish(requests[3])

    def let_go() -> bool:
        engine.step()
        return engine.pinned() == 0

    wait_for(let_go, what="all are let go")
    engine.tier._core.check_invariants()


def test_a_request_that_goes_on_lets_go_of_what_it_did_not_load(make_engine: MakeEngine) -> None:
    engine = make_engine(2)  # Room for less than the pool has.
    keys = keys_of("a", 6)
    for key in keys:
        engine.store([key])
    request = engine.request()

    def look() -> int:
        for key in keys:
            engine.manager.lookup(key, request)
        engine.step()
        return engine.pinned()

    wait_for(look, what="the pool keeps chunks for the request")
    engine.step(new=[request.req_id])
    wait_for(lambda: (engine.step(), engine.pinned() == 0)[1], what="nothing is held")
    engine.finish(request)


def test_a_pool_that_hangs_delays_nobody_for_long(
    make_engine: MakeEngine, node: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("a", 6)
    other = make_engine(8)
    other.store(keys)
    monkeypatch.setattr("tierkv.integrations.vllm.tier_core.PATIENCE_S", 0.2)
    engine = make_engine(8)
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    try:
        request = engine.request()
        # It is asked where chunks are and does not answer; the request goes on without.
        assert engine.hits([*keys, *keys_of("b", 2)], request) == 0
        engine.finish(request)
    finally:
        node.process.send_signal(signal.SIGCONT)
    wait_for(lambda: engine.door.up, what="the door is up")

    def let_go() -> bool:
        engine.step()
        return not engine.manager.has_pending_work() and engine.pinned() == 0

    wait_for(let_go, what="what came late was let go")
    other.push_out(8)
    assert other.check(keys) == 6


def test_chunks_of_an_outage_are_stored_later(
    make_engine: MakeEngine, node: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.integrations.vllm.tier_owed.RETRY_S", 0.0)
    engine = make_engine(8)
    node.end(signal.SIGKILL)
    keys = keys_of("much used", 4)
    engine.store(keys)
    node.start()
    wait_for(lambda: engine.door.up, what="the door is up")
    other = make_engine(8)
    assert other.check(keys) == 0
    engine.store(keys)  # They are in CPU memory: vLLM alone would never offer them again.
    assert other.check(keys) == 4
    assert not engine.tier._core.wants_all


@pytest.mark.parametrize("reset", ["forget", "keep"])
def test_a_reset_forgets_what_was_stored(make_engine: MakeEngine, reset: str) -> None:
    engine, other = make_engine(8, tier={"reset": reset}), make_engine(8)
    keys = keys_of("a", 6)
    engine.store(keys)
    engine.manager.reset_cache()
    assert engine.check(keys) == (6 if reset == "keep" else 0)
    engine.push_out(8)
    engine.store(keys)
    engine.push_out(8)
    assert engine.check(keys) == 6  # Stored after the reset.
    assert other.check(keys) == 6  # By an engine that was not reset, before.
    assert engine.pinned() == 0


def test_a_reset_waits_for_copies_under_way(make_engine: MakeEngine) -> None:
    engine = make_engine(16, chunk_bytes=1 << 20)
    keys = keys_of("a", 8)
    engine.store(keys)
    engine.push_out(16)
    for round_ in range(5):
        request = engine.request()
        engine.begin_store(keys_of(f"round {round_}", 6), request)
        for key in keys:
            engine.manager.lookup(key, request)
        engine.step()
        engine.manager.reset_cache()
        # No thread writes any more: what is written now stays.
        before = bytes(engine.memory)
        engine.step()
        assert bytes(engine.memory) == before
        engine.finish(request)
    wait_for(lambda: (engine.step(), engine.pinned() == 0)[1], what="nothing is held")


def test_a_shut_down_engine_leaves_no_memory_mapped(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(8)
    engine.store(keys_of("a", 6))
    engine.push_out(8)
    assert engine.check(keys_of("a", 6)) == 6
    region = engine.manager.primary_tier._mmap_region
    engine.close()
    assert region.mmap_obj is None and "Failed to close" not in caplog.text


def test_a_random_seed_is_said(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(xxhash)
    try:
        assert "PYTHONHASHSEED=0" in wait_note(make_engine(), "hash_seed")
    finally:
        kv_cache_utils.init_none_hash(sha256)


def test_engines_whose_hashes_differ_say_so(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_engine()
    first.step()
    assert first.check(keys_of("a", 1)) == 0
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    kv_cache_utils.init_none_hash(sha256)
    try:
        second = make_engine()
        assert "another algorithm or seed" in wait_note(second, "hash_seed")
    finally:
        monkeypatch.delenv("PYTHONHASHSEED")
        kv_cache_utils.init_none_hash(sha256)


def test_a_setting_that_can_t_be_meant_is_refused_at_the_start(node: Server) -> None:
    with pytest.raises(ConfigError, match="did you mean tenant"):
        Engine(tier={"pool": node.address, "tenent": "x"}, wait=False)


def test_a_model_whose_weights_are_unknown_stores_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(tier={"revision": "main"}, wait=False)
    engine.store(keys_of("a", 2))
    assert engine.check(keys_of("b", 2)) == 0
    assert "commit" in wait_note(engine, "model_revision")

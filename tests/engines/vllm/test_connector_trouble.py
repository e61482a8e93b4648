"""Our connector while everything around it breaks: the engine serves on, with the same tokens."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engine_process import (
    EngineProcess,
    cached_of,
    connector,
    prompt,
    tokens_of,
    write_model,
)
from tests.engines.vllm.server_rig import Server, flip_bits, pool_node, wait_for
from tierkv.dmp.client.pool import Pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Start = Callable[..., EngineProcess]
PROMPTS = [prompt(f"trouble {n}", n) for n in (200, 500, 900)]
LOADABLE = [128, 384, 896]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM as it is answers."""
    engine = EngineProcess(tmp_path_factory.mktemp("plain") / "engine.log", model, None).ready()
    answers = tokens_of(engine.generate(PROMPTS))
    engine.kill()
    return answers


@pytest.fixture
def start(model: str, tmp_path: Path) -> Iterator[Start]:
    """Starts engines that are killed at the end."""
    with ExitStack() as stack:

        def begin(transfer: dict[str, Any] | None, **more: Any) -> EngineProcess:
            engine = EngineProcess(tmp_path / "engine.log", model, transfer, **more)
            stack.callback(engine.kill)
            return engine

        yield begin


_servers: list[Server] = []


def node_in(folder: Path, *arguments: str, capacity: str = "64MiB") -> Server:
    """Start a pool node that ends with the test, however that ends."""
    _servers.append(pool_node(folder, *arguments, capacity=capacity))
    return _servers[-1]


@pytest.fixture(autouse=True)
def end_servers() -> Iterator[None]:
    yield
    while _servers:
        _servers.pop().end()


def fill_cache(engine: EngineProcess) -> None:
    """Have other prompts take the place of all that is in an engine's own cache."""
    engine.generate([prompt(f"filler {random.random()}", 1_400) for _ in range(4)], tokens=1)


def complaint(engine: EngineProcess, code: str) -> None:
    wait_for(lambda: engine.count(f"complaints_{code}") > 0, what=f"complaint {code}")


def test_a_pool_that_dies_and_comes_back(
    expected: list[list[int]], start: Start, tmp_path: Path
) -> None:
    node = node_in(tmp_path)
    node.end()
    # Down when the engine starts.
    engine = start(connector(node.address, timeout_ms=500)).ready()
    assert tokens_of(engine.generate(PROMPTS)) == expected
    complaint(engine, "pool_down")
    node.start()
    engine.reach_pool()
    fill_cache(engine)
    assert tokens_of(engine.generate(PROMPTS)) == expected
    engine.settle()
    fill_cache(engine)
    assert cached_of(engine.generate(PROMPTS)) == LOADABLE

    # Killed while requests load and save.
    node.end(signal.SIGKILL)
    for _ in range(3):
        fill_cache(engine)
        assert tokens_of(engine.generate(PROMPTS)) == expected
    assert engine.do("idle") == engine.do("blocks") - 1
    node.start()
    engine.reach_pool()
    # It still has what was stored before.
    fill_cache(engine)
    again = engine.generate(PROMPTS)
    assert (tokens_of(again), cached_of(again)) == (expected, LOADABLE)
    engine.settle()

    # Frozen: nothing is refused, nothing answered.
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    fill_cache(engine)
    assert tokens_of(engine.generate(PROMPTS)) == expected
    node.process.send_signal(signal.SIGCONT)
    engine.reach_pool()
    fill_cache(engine)
    assert tokens_of(engine.generate(PROMPTS)) == expected
    engine.settle()
    node.end()


def test_a_meta_server_that_dies_and_comes_back(
    expected: list[list[int]], start: Start, tmp_path: Path
) -> None:
    meta = Server(tmp_path, "meta", "--set", "cluster.secret=00112233445566778899aabbccddeeff")
    _servers.append(meta)
    address = f"cluster.meta_address={meta.address}"
    node = node_in(tmp_path, "--set", address)
    meta.end(signal.SIGKILL)
    first, second = (start(connector(meta=meta.address)).ready() for _ in range(2))
    # Without it nobody knows the names of blocks.
    assert tokens_of(first.generate(PROMPTS)) == expected
    assert first.count("stored_tokens") == 0
    meta.start()
    first.reach_pool()
    second.reach_pool()
    fill_cache(first)
    assert tokens_of(first.generate(PROMPTS)) == expected
    first.settle()
    meta.end(signal.SIGKILL)
    shared = second.generate(PROMPTS)
    assert (tokens_of(shared), cached_of(shared)) == (expected, LOADABLE)
    meta.start()
    assert second.do("up")
    fill_cache(second)
    again = second.generate(PROMPTS)
    assert (tokens_of(again), cached_of(again)) == (expected, LOADABLE)
    second.settle()
    node.end()
    meta.end()


def test_a_full_pool(expected: list[list[int]], start: Start, tmp_path: Path) -> None:
    node = node_in(tmp_path, capacity="32MiB")
    engine = start(connector(node.address)).ready().reach_pool()
    with Pool.connect(node.address) as other:
        # Somebody else has all of it, and lets nothing go.
        names = [f"held {n}" for n in range(64)]
        kept = [name for name in names if other.put(name, bytes(1 << 20)) and other.pin(name)]
        assert 0 < len(kept) < len(names)
        small = (f"small {n}" for n in range(1_000))
        while other.put(name := next(small), bytes(64 << 10)) and other.pin(name):
            pass
        for _ in range(3):
            assert tokens_of(engine.generate(PROMPTS)) == expected
            fill_cache(engine)
        complaint(engine, "pool_full")
        engine.settle()
        assert engine.count("hit_tokens") == 0
    # Now there is room.
    fill_cache(engine)
    assert tokens_of(engine.generate(PROMPTS)) == expected
    engine.settle()
    fill_cache(engine)
    again = engine.generate(PROMPTS)
    assert (tokens_of(again), cached_of(again)) == (expected, LOADABLE)
    node.end()


@pytest.mark.parametrize("kind", ["made up", "window"])
def test_an_engine_whose_kv_cannot_be_shared(kind: str, model: str, tmp_path: Path) -> None:
    node = node_in(tmp_path)
    more = {"load_format": "dummy"} if kind == "made up" else {}
    folder = write_model(tmp_path / "windowed", window=256) if kind == "window" else model
    engine = EngineProcess(tmp_path / "engine.log", folder, connector(node.address), **more).ready()
    answers = tokens_of(engine.generate(PROMPTS))
    complaint(engine, "unsupported")
    assert tokens_of(engine.generate(PROMPTS)) == answers
    assert (engine.count("stored_tokens"), engine.count("hit_tokens")) == (0, 0)
    engine.kill()
    node.end()


def test_a_reset_cache_is_not_read(expected: list[list[int]], start: Start, tmp_path: Path) -> None:
    node = node_in(tmp_path)
    engine = start(connector(node.address)).ready().reach_pool()
    assert tokens_of(engine.generate(PROMPTS)) == expected
    engine.settle()
    assert engine.do("reset_prefix_cache", connector=True)
    fresh = engine.generate(PROMPTS)
    assert (tokens_of(fresh), cached_of(fresh)) == (expected, [0, 0, 0])
    complaint(engine, "cache_reset")
    engine.settle()
    node.end()


def test_a_slow_answer_is_not_waited_for(
    expected: list[list[int]], start: Start, tmp_path: Path
) -> None:
    node = node_in(tmp_path)
    hasty = connector(
        node.address, lookup_timeout_ms=1, load_timeout_ms=1, load_mode="layer_by_layer"
    )
    engine = start(hasty).ready().reach_pool()
    for _ in range(3):
        assert tokens_of(engine.generate(PROMPTS)) == expected
        fill_cache(engine)
    engine.settle()
    node.end()


def test_what_is_not_understood_is_refused_at_the_start(start: Start, tmp_path: Path) -> None:
    engine = start(connector("127.0.0.1:7401", load_modes="layer_by_layer"))
    try:
        code = engine.process.wait(120)
    except subprocess.TimeoutExpired:
        pytest.fail("the engine started")
    assert code != 0
    assert "unknown setting 'load_modes'. Did you mean load_mode?" in engine.log.read_text()


@pytest.mark.timeout(1_200)
def test_any_afternoon_of_two_engines(model: str, start: Start, tmp_path: Path) -> None:
    """Chats that grow and branch on two engines and a pool that is killed and damaged at random."""
    chance = random.Random(20_261_122)
    node = node_in(tmp_path)
    plain = start(None)
    engines = [
        start(connector(node.address, load_mode=mode, timeout_ms=500), max_num_batched_tokens=512)
        for mode in ("between_steps", "layer_by_layer")
    ]
    plain.ready()
    for engine in engines:
        engine.ready().reach_pool()
    chats = [prompt(f"chat {n}", 200) for n in range(4)]
    for _ in range(20):
        engine = chance.choice(engines)
        picked = [chance.choice(chats) for _ in range(chance.randint(1, 5))]
        asked = [
            (ids + [chance.randrange(2, 512) for _ in range(chance.randint(1, 300))])[-1_700:]
            for ids in picked
        ]
        salts = [chance.choice([None, None, "other"]) for _ in asked]
        tokens = chance.randint(1, 60)
        answers = tokens_of(engine.generate(asked, tokens=tokens, salts=salts))
        assert answers == tokens_of(plain.generate(asked, tokens=tokens))
        chats[chance.randrange(len(chats))] = asked[0][:1_200] + answers[0]
        match chance.randrange(8):
            case 0:
                node.end(signal.SIGKILL)
                node.start()
            case 1:
                flip_bits(tmp_path)
            case 2:
                engine.do("abort", prompts=asked, steps=chance.randrange(6))
            case 3:
                fill_cache(engine)
    assert sum(engine.count("hit_tokens") for engine in engines) > 0
    for engine in engines:
        assert engine.do("idle") == engine.do("blocks") - 1
    node.end()

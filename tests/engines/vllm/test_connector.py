"""Our connector in real vLLM engines: the same tokens as without it, and real hits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engine_process import (
    BLOCK,
    EngineProcess,
    cached_of,
    connector,
    prompt,
    tokens_of,
    write_model,
)
from tests.engines.vllm.server_rig import Server, flip_bits, pool_node

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Start = Callable[..., EngineProcess]
MODES = ["between_steps", "layer_by_layer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """vLLM as it is, with the answers that all others must give too."""
    engine = EngineProcess(tmp_path_factory.mktemp("plain") / "engine.log", model, None)
    yield engine.ready()
    engine.kill()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Server]:
    # Without a scrubber: what is damaged shall be met by a load.
    server = pool_node(tmp_path, "--set", "dmp.scrub_rate=0")
    yield server
    server.end()


@pytest.fixture
def start(model: str, tmp_path: Path) -> Iterator[Start]:
    """Starts engines that are killed at the end."""
    with ExitStack() as stack:

        def begin(transfer: dict[str, Any], **more: Any) -> EngineProcess:
            engine = EngineProcess(tmp_path / "engine.log", model, transfer, **more)
            stack.callback(engine.kill)
            return engine

        yield begin


def full_blocks(prompts: list[list[int]]) -> list[int]:
    """Return how many tokens of prompts can be loaded: full blocks, never all."""
    return [(len(ids) - 1) // BLOCK * BLOCK for ids in prompts]


@pytest.mark.parametrize("mode", MODES)
def test_engines_share_what_either_computed(
    plain: EngineProcess, start: Start, node: Server, mode: str
) -> None:
    first, second = (start(connector(node.address, load_mode=mode)) for _ in range(2))
    # Lengths around multiples of a block; together more than either engine's own 23 blocks.
    prompts = [prompt(f"{mode}-{n}", n) for n in (5, 127, 128, 129, 640, 641, 700, 900, 1_400)]
    expected = tokens_of(plain.generate(prompts))
    first.ready().reach_pool()
    cold = first.generate(prompts)
    assert tokens_of(cold) == expected
    assert cached_of(cold) == [0] * len(prompts)
    first.settle()
    # Blocks that the answer filled too; its last token was never computed.
    stored = sum((len(ids) + 8 - 1) // BLOCK * BLOCK for ids in prompts)
    assert first.count("stored_tokens") == stored

    # Its own cache is too small, so that most comes from the pool.
    warm = first.generate(prompts)
    assert tokens_of(warm) == expected
    assert cached_of(warm) == full_blocks(prompts)
    assert first.count("hit_tokens") > 0
    first.settle()

    second.ready().reach_pool()
    shared = second.generate(prompts)
    assert tokens_of(shared) == expected
    assert cached_of(shared) == full_blocks(prompts)
    # Requests that are preempted load again what they had.
    assert second.count("hit_tokens") >= sum(full_blocks(prompts))
    second.settle()
    # Nothing is stored twice.
    assert (first.count("stored_tokens"), second.count("stored_tokens")) == (stored, 0)
    assert second.count("load_failed_tokens") == 0

    # A new life of the first engine finds what its former one stored.
    first.kill()
    again = start(connector(node.address, load_mode=mode)).ready().reach_pool()
    assert tokens_of(again.generate(prompts)) == expected
    assert again.count("hit_tokens") >= sum(full_blocks(prompts))


def test_prefill_and_decode_in_two_engines(
    plain: EngineProcess, start: Start, node: Server
) -> None:
    prefill = start(connector(node.address, role="kv_producer"))
    decode = start(connector(node.address, role="kv_consumer", load_mode="layer_by_layer"))
    prompts = [prompt(f"handoff-{n}", n) for n in (100, 300, 1_000)]
    expected = tokens_of(plain.generate(prompts, tokens=20))
    prefill.ready().reach_pool()
    decode.ready().reach_pool()
    for ids, wanted in zip(prompts, expected, strict=True):
        (begun,) = prefill.generate([ids], tokens=1)
        blocks = len(ids) // BLOCK
        promise = {"tierkv": {"blocks": blocks, "block_tokens": BLOCK}} if blocks else None
        assert begun["params"] == promise
        # At once: the decode engine waits until the blocks have arrived.
        (ended,) = decode.generate([ids], tokens=20, params=begun["params"])
        assert ended["tokens"] == wanted
        assert ended["cached"] == blocks * BLOCK
    prefill.settle()
    decode.settle()
    assert decode.count("stored_tokens") == 0
    assert prefill.count("hit_tokens") == 0
    assert prefill.generate([prompts[2]], tokens=1)[0]["tokens"] == expected[2][:1]

    # A promise that nobody keeps, or that makes no sense, costs some waiting and no answer.
    other = prompt("never computed", 400)
    for promised in (3, 1 << 40, -1, "3"):
        lie = {"tierkv": {"blocks": promised, "block_tokens": BLOCK}}
        (alone,) = decode.generate([other], tokens=4, params=lie)
        assert alone["tokens"] == tokens_of(plain.generate([other], tokens=4))[0]
        assert alone["cached"] in (0, 384)  # The latter from its own cache, later.


@pytest.mark.parametrize("mode", MODES)
def test_damaged_blocks_are_computed_again(
    plain: EngineProcess, start: Start, node: Server, tmp_path: Path, mode: str
) -> None:
    engine = start(connector(node.address, load_mode=mode)).ready().reach_pool()
    shared = prompt("damaged", 600)
    prompts = [shared + prompt(f"tail {i}", 200) for i in range(3)]
    expected = tokens_of(plain.generate(prompts))
    assert tokens_of(engine.generate(prompts)) == expected
    engine.settle()
    fill_cache(engine)
    assert flip_bits(tmp_path)
    # Together, so that some share the blocks whose load fails.
    assert tokens_of(engine.generate(prompts)) == expected
    assert engine.count("load_failed_tokens") > 0
    engine.settle()
    # What was computed behind a failed load went nowhere: neither here nor in the pool.
    assert tokens_of(engine.generate(prompts)) == expected
    fill_cache(engine)
    assert tokens_of(engine.generate(prompts)) == expected
    engine.settle()
    fresh = start(connector(node.address, load_mode=mode)).ready().reach_pool()
    again = fresh.generate(prompts)
    assert tokens_of(again) == expected
    assert cached_of(again) == full_blocks(prompts)


def test_tenants_share_nothing(plain: EngineProcess, start: Start, node: Server) -> None:
    engine = start(connector(node.address)).ready().reach_pool()
    ids = prompt("salted", 500)
    (expected,) = tokens_of(plain.generate([ids]))
    salts: list[str | None] = ["a", "b", "ä ☃ \u202e", "tierkv1.not.ours", "x" * 128, None]
    for salt in salts:
        (first,) = engine.generate([ids], salts=[salt])
        assert (first["tokens"], first["cached"]) == (expected, 0), salt
        engine.settle()
    fill_cache(engine)
    hits = engine.count("hit_tokens")
    for index, salt in enumerate(salts, start=1):
        (again,) = engine.generate([ids], salts=[salt])
        assert (again["tokens"], again["cached"]) == (expected, 384), salt
        assert engine.count("hit_tokens") == hits + index * 384
    engine.settle()


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_end_as_if_they_were_not(
    plain: EngineProcess, start: Start, node: Server, mode: str
) -> None:
    tight = start(
        connector(node.address, load_mode=mode),
        num_gpu_blocks_override=14,
        max_num_batched_tokens=256,
        max_model_len=1_536,
    )
    shared = prompt("tight", 300)
    prompts = [shared + prompt(f"own {i}", 150) for i in range(6)]
    expected = tokens_of(plain.generate(prompts, tokens=300))
    tight.ready().reach_pool()
    assert tokens_of(tight.generate(prompts, tokens=300)) == expected
    assert tight.do("preemptions") > 0
    tight.settle()
    # A chat's next turn: answers were stored too.
    turns = [ids + answer for ids, answer in zip(prompts, expected, strict=True)]
    assert tokens_of(tight.generate(turns, tokens=5)) == tokens_of(plain.generate(turns, tokens=5))
    assert tight.count("hit_tokens") > 0
    tight.settle()
    assert tight.count("load_failed_tokens") == 0


def test_aborted_requests_leave_nothing_behind(start: Start, node: Server) -> None:
    engine = start(connector(node.address)).ready().reach_pool()
    prompts = [prompt(f"abort {i}", 600) for i in range(4)]
    engine.generate(prompts)
    engine.settle()
    fill_cache(engine)
    for steps in (0, 1, 2, 3, 5, 9):
        assert engine.do("abort", prompts=prompts, steps=steps) == 4
        engine.settle()


def test_many_requests_with_common_beginnings(
    plain: EngineProcess, start: Start, node: Server
) -> None:
    engines = [start(connector(node.address), max_num_batched_tokens=384) for _ in range(2)]
    system = prompt("system", 400)
    prompts = [system + prompt(f"user {i % 5}", 150) + prompt(f"ask {i}", 90) for i in range(24)]
    expected = tokens_of(plain.generate(prompts, tokens=12))
    for engine in engines:
        engine.ready().reach_pool()
        assert tokens_of(engine.generate(prompts, tokens=12)) == expected
        engine.settle()
    assert engines[1].count("hit_tokens") > 0


def fill_cache(engine: EngineProcess) -> None:
    """Have other prompts take the place of all that is in an engine's own cache."""
    engine.generate([prompt(f"filler {random.random()}", 1_400) for _ in range(4)], tokens=1)
    engine.settle()

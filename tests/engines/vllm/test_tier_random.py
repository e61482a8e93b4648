"""Anything in any order under vLLM's tiering manager: bytes are never wrong, nothing stays behind.

Two engines share a pool that is smaller than what they store, is damaged, hangs up and comes back.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from tests.engines.vllm.tier_rig import (
    Engine,
    Server,
    be_patient,
    content,
    flip_bits,
    keys_of,
    pool_node,
    wait_for,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
CHUNK_BYTES = 256 << 10
PROMPTS = [keys_of(f"prompt {n}", 6) for n in range(12)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("node")
    server = pool_node(folder, "--set", "dmp.scrub_rate=0", capacity="64MiB")
    yield server
    server.end()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_bytes_are_never_wrong(
    node: Server, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    monkeypatch.setattr("tierkv.integrations.vllm.tier_owed.RETRY_S", 0.0)
    Anything.node, Anything.transport = node, transport
    run_state_machine_as_test(
        Anything,
        settings=settings(
            max_examples=3,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


class Anything(RuleBasedStateMachine):
    """Two engines, their requests, and a pool that has its moods."""

    node: Server
    transport: str

    engine_numbers = st.integers(0, 1)
    prompts = st.sampled_from(PROMPTS)

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engines = [self._engine(), self._engine()]
        self.requests: list[list[ReqContext]] = [[], []]
        self.read_back = 0

    def _engine(self) -> Engine:
        tier = {"pool": self.node.address, "transport": self.transport, "tenant": "random"}
        return Engine(10, tier=tier, chunk_bytes=CHUNK_BYTES)

    @rule(number=engine_numbers)
    def request(self, number: int) -> None:
        if len(self.requests[number]) < 4:
            self.requests[number].append(self.engines[number].request())

    def _some_request(self, number: int) -> ReqContext | None:
        return self.random.choice(self.requests[number]) if self.requests[number] else None

    @rule(number=engine_numbers, keys=prompts, count=st.integers(1, 6))
    def store(self, number: int, keys: list[OffloadKey], count: int) -> None:
        if request := self._some_request(number):
            self.engines[number].begin_store(keys[:count], request)

    @rule(number=engine_numbers, keys=prompts)
    def look(self, number: int, keys: list[OffloadKey]) -> None:
        """Look once, as a scheduler's step does; read whatever is said to be there."""
        engine, request = self.engines[number], self._some_request(number)
        if request is None:
            return
        ready = []
        for key in keys:
            found = engine.manager.lookup(key, request)
            if found is LookupResult.MISS:
                break
            if found is LookupResult.HIT:
                ready.append(key)
        assert engine.read(ready, request) == [content(key, CHUNK_BYTES) for key in ready]

    @rule(number=engine_numbers, keys=prompts)
    def load(self, number: int, keys: list[OffloadKey]) -> None:
        self.read_back += self.engines[number].check(keys)

    @rule(number=engine_numbers)
    def step(self, number: int) -> None:
        new = [request.req_id for request in self.requests[number] if self.random.random() < 0.3]
        self.engines[number].step(new)

    @rule(number=engine_numbers)
    def settle(self, number: int) -> None:
        self.engines[number].settle()

    @rule(number=engine_numbers)
    def finish(self, number: int) -> None:
        if request := self._some_request(number):
            self.requests[number].remove(request)
            self.engines[number].finish(request)

    @rule(number=engine_numbers)
    def reset(self, number: int) -> None:
        if self.random.random() < 0.3:
            self.engines[number].manager.reset_cache()

    @rule(number=engine_numbers)
    def restart(self, number: int) -> None:
        if self.random.random() < 0.6:
            return
        self.engines[number].close()
        self.engines[number] = self._engine()
        self.requests[number].clear()

    @rule()
    def damage(self) -> None:
        flip_bits(self.node.folder)

    @rule()
    def kill(self) -> None:
        if self.random.random() < 0.6:
            return
        self.node.end(signal.SIGKILL)
        for engine in self.engines:
            engine.settle()
        self.node.start()
        wait_for(lambda: all(e.door.up for e in self.engines), what="the doors are up")

    @precondition(lambda self: hasattr(self, "engines"))
    @invariant()
    def books_agree(self) -> None:
        for engine in self.engines:
            engine.tier._core.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        for engine, requests in zip(self.engines, self.requests, strict=True):
            for request in requests:
                engine.finish(request)
            engine.settle()
            wait_for(lambda: _nothing_held(engine), what="nothing is held")  # noqa: B023
            engine.close()


def _nothing_held(engine: Engine) -> bool:
    engine.step()
    return engine.pinned() == 0

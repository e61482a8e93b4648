"""The engines' own publishers of KV events, heard by us: what they encode, number, replay and lose.

One test for each thing that can happen, with vLLM's ZmqEventPublisher and with SGLang's, which are
threads of this process; a restart is a new publisher at the same addresses.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conformance.interfaces import load
from tests.fix_engine_events import (
    CLEARED,
    MODEL,
    WIDTH,
    Claimed,
    engine_names,
    namespace,
    removed,
    salt,
    stored,
    until,
)
from tierkv.integrations.events.feed import EngineEvents
from tierkv.integrations.events.listener import EventEndpoint, event_endpoints
from tierkv.integrations.events.messages import (
    EngineRemoved,
    EngineStored,
    decode_batch,
    token_numbers,
)
from tierkv.kvcore.block import block_keys

MODULES = {
    "vllm": "vllm.distributed.kv_events",
    "sglang": "sglang.srt.disaggregation.kv_events",
}
PROMPT = list(range(100, 112))
OTHER = list(range(200, 208))


class Publisher:
    """An engine's publisher, given events as its scheduler gives them."""

    def __init__(self, engine: str, folder: Path, *, keeps: int = 10_000, replays: bool = True):
        self.engine, self.keeps = engine, keeps
        self.events = f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/replay" if replays else None
        self.clock_s = 0.0
        self.start()

    def start(self) -> None:
        """Begin a life."""
        make = load(f"{MODULES[self.engine]}:ZmqEventPublisher")
        self.publisher = make(0, self.events, self.replay, buffer_steps=self.keeps)

    def restart(self) -> None:
        """End a life and begin another."""
        self.publisher.shutdown()
        self.start()

    def made(self, event: dict[str, Any]) -> Any:
        """Make an event of the engine's own class; SGLang's has the salt in a field of its own."""
        kind = load(f"{MODULES[self.engine]}:{event['type']}")
        fields = {name: value for name, value in event.items() if name != "type"}
        if self.engine == "sglang":
            extra = fields.pop("extra_keys", None)
            if extra and extra[0]:
                fields["cache_salt"] = extra[0][0]
            fields = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
            for name in ("block_hashes", "parent_block_hash"):
                fields[name] = _signed(fields[name]) if name in fields else None
            fields = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
        return kind(**fields)

    def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        """Send a batch; ``lost``: it is kept for replay, but the socket had no room for it."""
        self.clock_s += 1.0
        batch = load(f"{MODULES[self.engine]}:KVEventBatch")
        published = batch(self.clock_s, [self.made(event) for event in events])
        if lost:
            socket, self.publisher._pub = self.publisher._pub, _Full()
            self.publisher.publish(published)
            self.publisher._event_queue.join()
            self.publisher._pub = socket
        else:
            self.publisher.publish(published)


class _Full:
    """A socket at its high-water mark: PUB drops."""

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        """Lose the message."""


def _signed(names: Any) -> Any:
    """Return 64 bits of a name, as SGLang has them."""
    if isinstance(names, list):
        return [_signed(name) for name in names]
    return None if names is None else int.from_bytes(names[:8], "big", signed=True)


@pytest.fixture(params=sorted(MODULES))
def engine(request: pytest.FixtureRequest) -> str:
    """An engine whose classes can be imported."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip("runs in .venv-interfaces")
    if request.param == "sglang":
        from tests.engines.sglang.stand_ins import install

        install()
    name: str = request.param
    return name


Start = Callable[..., Publisher]


@pytest.fixture
async def start(engine: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Start publishers, which end with the test."""
    made: list[Publisher] = []

    def begin(**options: Any) -> Publisher:
        made.append(Publisher(engine, tmp_path, **options))
        return made[-1]

    yield begin
    for each in made:
        each.publisher.shutdown()


class Listening:
    """A feed on a publisher, and the directory it feeds."""

    def __init__(self, publisher: Publisher, *, check_s: float = 600.0) -> None:
        self.directory = Claimed()
        endpoint = EventEndpoint(0, publisher.events, publisher.replay or "")
        self.feed = EngineEvents([endpoint], model=MODEL, reporter=self.directory, check_s=check_s)

    def has(self, tokens: Sequence[int], tenant: int = 0) -> int:
        """Return how many leading blocks of a prompt the directory would find."""
        keys = block_keys(namespace(tenant), tokens, block_tokens=WIDTH)
        return next((i for i, key in enumerate(keys) if key not in self.directory.keys), len(keys))

    async def until_has(self, tokens: Sequence[int], blocks: int) -> None:
        """Wait for that many leading blocks."""
        await until(lambda: self.has(tokens) == blocks, f"{blocks} blocks: {self.feed.counters()}")

    def count(self, name: str) -> int:
        """Return one of the feed's counters."""
        return self.feed.counters().get(name, 0)


@pytest.fixture
async def listen() -> AsyncIterator[Callable[..., Any]]:
    """Start feeds, which end with the test."""
    made: list[Listening] = []

    async def begin(publisher: Publisher, **options: Any) -> Listening:
        listening = Listening(publisher, **options)
        await listening.feed.start()
        made.append(listening)
        return listening

    yield begin
    for each in made:
        await each.feed.stop()
        assert not each.directory.keys


Listen = Callable[..., Any]


async def test_what_came_before_and_what_comes_now(start: Start, listen: Listen) -> None:
    publisher = start()
    publisher.publish(stored(PROMPT[:8], salt()))
    listening = await listen(publisher)
    await listening.until_has(PROMPT, 2)
    publisher.publish(stored(PROMPT, salt(), first=2))
    await listening.until_has(PROMPT, 3)
    assert listening.has(PROMPT, tenant=1) == 0
    assert not listening.feed.wants_full_report
    publisher.publish(removed(engine_names(PROMPT, salt())[1]))
    await listening.until_has(PROMPT, 1)
    publisher.publish(CLEARED)
    await until(lambda: not listening.directory.keys, "cleared")


async def test_a_feed_can_be_stopped_at_any_moment(start: Start) -> None:
    publisher = start()
    for _ in range(40):
        publisher.publish(stored(PROMPT, salt()))
    for more in range(40):
        listening = Listening(publisher)
        async with asyncio.timeout(30.0):
            await listening.feed.start()
            await listening.until_has(PROMPT, 3)
            for _ in range(more):  # Also between an answer's coming and its reader's waking.
                await asyncio.sleep(0)
            await listening.feed.stop()
        assert not listening.directory.keys


async def test_a_message_that_was_dropped_is_asked_for(start: Start, listen: Listen) -> None:
    publisher = start()
    publisher.publish(stored(PROMPT[:4], salt()))
    listening = await listen(publisher)
    await listening.until_has(PROMPT, 1)
    publisher.publish(stored(PROMPT[:8], salt(), first=1), lost=True)
    publisher.publish(stored(PROMPT, salt(), first=2))
    await listening.until_has(PROMPT, 3)
    assert listening.count("gaps") == 1 and not listening.count("losses")


async def test_a_last_message_that_was_dropped_is_found_by_asking(
    start: Start, listen: Listen
) -> None:
    publisher = start()
    publisher.publish(stored(PROMPT, salt()))
    listening = await listen(publisher, check_s=0.2)
    await listening.until_has(PROMPT, 3)
    publisher.publish(CLEARED, lost=True)
    await until(lambda: not listening.directory.keys, "cleared")
    assert not listening.count("gaps") and not listening.count("losses")


async def test_a_batch_the_engine_fails_to_pack_is_a_loss_and_no_end(
    start: Start, listen: Listen
) -> None:
    publisher = start()
    publisher.publish(stored(PROMPT, salt()))
    listening = await listen(publisher)
    await listening.until_has(PROMPT, 3)
    publisher.publish(stored(OTHER, "odd \ud800"))  # No UTF-8: its number is used up.
    publisher.publish(stored(OTHER, salt()))
    await listening.until_has(OTHER, 2)
    assert listening.has(PROMPT) == 0 and listening.count("losses") == 1
    publisher.publish(removed(engine_names(OTHER, salt())[1]))
    await listening.until_has(OTHER, 1)
    assert listening.count("losses") == 1


async def test_without_replay_a_dropped_message_voids_what_was_known(
    start: Start, listen: Listen
) -> None:
    publisher = start(replays=False)
    listening = await listen(publisher)
    await until(lambda: not listening.feed.notes(), "connected")
    # Its subscription is on its way: only what it is sure to get counts.
    while not listening.has(PROMPT):
        publisher.publish(CLEARED, stored(PROMPT[:8], salt()))
        await until(lambda: publisher.publisher._event_queue.empty(), "sent")
    publisher.publish(removed(engine_names(PROMPT, salt())[0]), lost=True)
    publisher.publish(stored(OTHER, salt()))
    await listening.until_has(OTHER, 2)
    assert listening.has(PROMPT) == 0
    assert listening.feed.wants_full_report


async def test_history_that_is_not_kept_any_more_is_said_to_be_lost(
    start: Start, listen: Listen
) -> None:
    publisher = start(keeps=1)
    publisher.publish(stored(PROMPT[:8], salt()))
    publisher.publish(stored(PROMPT, salt(), first=2))
    publisher.publish(stored(OTHER, salt()))
    await until(lambda: publisher.publisher._event_queue.empty(), "sent")
    listening = await listen(publisher)
    await listening.until_has(OTHER, 2)
    assert listening.has(PROMPT) == 0
    assert listening.feed.wants_full_report
    assert "history incomplete" in str(listening.feed.paths()[0])
    # As vLLM tells again of what a request reuses, when it is asked to.
    publisher.publish(stored(PROMPT, salt()))
    await listening.until_has(PROMPT, 3)


@pytest.mark.parametrize("batches", [0, 1, 3])
async def test_a_restart_leaves_nothing_of_the_life_before(
    start: Start, listen: Listen, batches: int
) -> None:
    publisher = start()
    publisher.publish(stored(PROMPT, salt()))
    listening = await listen(publisher)
    await listening.until_has(PROMPT, 3)
    publisher.restart()
    for count in range(batches):
        publisher.publish(stored(OTHER[: 4 * min(2, count + 1)], salt()))
    await until(lambda: listening.count("restarts") == 1, "the restart")
    await listening.until_has(OTHER, min(2, batches))
    assert listening.has(PROMPT) == 0
    assert len(listening.feed.inventory()) == min(2, batches)


async def test_a_lost_connection_to_a_living_engine_costs_nothing(
    start: Start, listen: Listen
) -> None:
    publisher = start()
    publisher.publish(stored(PROMPT, salt()))
    listening = await listen(publisher)
    await listening.until_has(PROMPT, 3)
    listening.feed.engine_restarted()
    assert listening.has(PROMPT) == 0 and not listening.feed.inventory()
    await listening.until_has(PROMPT, 3)
    assert not listening.count("restarts") and not listening.count("losses")


async def test_an_engine_that_comes_late_is_heard(tmp_path: Path, engine: str) -> None:
    directory = Claimed()
    endpoint = EventEndpoint(0, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    feed = EngineEvents([endpoint], model=MODEL, reporter=directory)
    await feed.start()
    assert "--kv-events-config" in feed.notes()[0] and not feed.paths()[0].usable
    publisher = Publisher(engine, tmp_path)
    publisher.publish(stored(PROMPT, salt()))
    await until(lambda: len(directory.keys) == 3, "blocks")
    assert not feed.notes() and feed.paths()[0].usable
    publisher.publisher.shutdown()
    await until(lambda: not directory.keys, "nobody there")
    await feed.stop()


def test_events_are_read_as_the_engine_packs_them(engine: str, tmp_path: Path) -> None:
    import msgspec

    publisher = Publisher(engine, tmp_path)
    publisher.publisher.shutdown()
    events = [stored(PROMPT, salt()), removed(*engine_names(PROMPT, salt())), CLEARED]
    made = [publisher.made(event) for event in events]
    batch = load(f"{MODULES[engine]}:KVEventBatch")(5.0, made)
    got = decode_batch(3, msgspec.msgpack.encode(batch))
    assert got.readable and got.time_s == 5.0
    first, second, _ = got.events
    assert isinstance(first, EngineStored) and isinstance(second, EngineRemoved)
    assert token_numbers(first) == PROMPT
    assert first.block_hashes == second.block_hashes == made[0].block_hashes
    assert first.medium in ("GPU", None)


def test_ranks_have_the_ports_the_engine_gives_them(engine: str) -> None:
    offset = load(f"{MODULES[engine]}:ZmqEventPublisher").offset_endpoint_port
    ours = event_endpoints("http://somewhere:8000", ranks=3)
    assert [each.events for each in ours] == [offset(ours[0].events, n) for n in range(3)]
    assert [each.replay for each in ours] == [offset(ours[0].replay, n) for n in range(3)]


def test_the_default_port_is_the_engines(engine: str) -> None:
    import inspect

    make = inspect.signature(load(f"{MODULES[engine]}:ZmqEventPublisher").__init__)
    (ours,) = event_endpoints("http://somewhere:8000")
    assert make.parameters["endpoint"].default == ours.events.replace("somewhere", "*")

"""Listening to whoever speaks at an engine's address: strangers, the silent, the broken.

The engines' own publishers are heard in tests/engines/conformance/test_events.py. Here stand plain
sockets that say what no engine would.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tests.fix_engine_events import (
    MODEL,
    WIDTH,
    Claimed,
    namespace,
    payload,
    salt,
    stored,
    until,
)
from tierkv.integrations.events.feed import EngineEvents
from tierkv.integrations.events.following import Take
from tierkv.integrations.events.listener import EventEndpoint
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.node import PathReport
from tierkv.kvwire.convert import PATH_REPORT

pytestmark = pytest.mark.integration

PROMPT = list(range(100, 112))


class Speaker:
    """Two sockets where an engine would have them; the second may be deaf."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.events, self.replay = (self.context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER))
        for name, socket in (("events", self.events), ("replay", self.replay)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"ipc://{folder}/{name}")

    async def subscribed(self) -> None:
        """Wait for a subscription."""
        await self.events.recv()

    async def say(self, *frames: bytes) -> None:
        """Publish a message of any form."""
        await self.events.send_multipart(frames)

    async def publish(self, seq: int, data: bytes) -> None:
        """Publish as an engine would."""
        await self.say(b"", seq.to_bytes(8, "big"), data)

    async def asked(self) -> tuple[bytes, int]:
        """Return who asks for a replay, and from which batch on."""
        client, _, start = await self.replay.recv_multipart()
        return client, int.from_bytes(start, "big")

    async def answer(self, client: bytes, *frames: bytes) -> None:
        """Send one message of a replay."""
        await self.replay.send_multipart([client, b"", *frames])

    async def end(self, client: bytes) -> None:
        """Say that this was all."""
        await self.answer(client, b"", (-1).to_bytes(8, "big", signed=True), b"")


@pytest.fixture
async def speaker(tmp_path: Path) -> AsyncIterator[Speaker]:
    """Somebody at the engine's addresses."""
    made = Speaker(tmp_path)
    yield made
    made.context.destroy(linger=0)


class Listening:
    """A feed and the directory it feeds."""

    def __init__(self, folder: Path, *, replay: str = "replay") -> None:
        self.directory = Claimed()
        endpoint = EventEndpoint(0, f"ipc://{folder}/events", f"ipc://{folder}/{replay}")
        self.feed = EngineEvents([endpoint], model=MODEL, reporter=self.directory, check_s=600.0)

    async def until_blocks(self, count: int) -> None:
        """Wait until so many blocks are claimed."""
        await until(lambda: len(self.directory.keys) == count, f"{self.feed.counters()}")


@pytest.fixture
async def listening(tmp_path: Path) -> AsyncIterator[Listening]:
    """A feed that listens to it."""
    made = Listening(tmp_path)
    await made.feed.start()
    yield made
    await made.feed.stop()


async def test_frames_of_another_form_are_passed_over(
    speaker: Speaker, listening: Listening
) -> None:
    await speaker.subscribed()
    client, start = await speaker.asked()
    assert start == 0
    await speaker.answer(client, b"?")
    await speaker.answer(client, b"", b"short", b"")
    await speaker.end(client)
    for frames in ((b"x",), (b"", b"1", b""), (b"", bytes(8), b"", b"")):
        await speaker.say(*frames)
    await speaker.publish(0, payload(stored(PROMPT, salt())))
    await listening.until_blocks(3)


async def test_a_batch_nobody_can_read_voids_what_was_known(
    speaker: Speaker, listening: Listening
) -> None:
    await speaker.subscribed()
    client, _ = await speaker.asked()
    await speaker.answer(client, b"", bytes(8), payload(stored(PROMPT, salt()), time_s=1.0))
    await speaker.end(client)
    await listening.until_blocks(3)
    await speaker.publish(1, payload({"type": "BlockMoved"}, time_s=2.0))
    await listening.until_blocks(0)
    assert listening.feed.counters()["unreadable"] == 1
    await speaker.publish(2, payload(stored(PROMPT[:4], salt()), time_s=3.0))
    await listening.until_blocks(1)
    assert listening.feed.wants_full_report


async def test_a_bug_of_ours_ends_a_connection_and_not_the_listening(
    speaker: Speaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, failed = EngineEvents._act, list[int]()

    def fail_once(feed: EngineEvents, rank: int, instruction: object) -> None:
        if isinstance(instruction, Take) and not failed:
            failed.append(rank)
            raise LookupError("a bug")
        act(feed, rank, instruction)  # type: ignore[arg-type]  # it is an Instruction

    monkeypatch.setattr(EngineEvents, "_act", fail_once)
    listening = Listening(tmp_path, replay="nobody")
    await listening.feed.start()
    await speaker.subscribed()
    await speaker.publish(0, payload(stored(PROMPT, salt()), time_s=1.0))
    await until(lambda: bool(failed), "the bug")
    await speaker.subscribed()  # It left.
    await speaker.subscribed()  # It came back.
    await speaker.publish(0, payload(stored(PROMPT, salt()), time_s=1.0))
    await listening.until_blocks(3)
    await listening.feed.stop()


async def test_a_replay_that_never_comes_is_given_up(speaker: Speaker, tmp_path: Path) -> None:
    listening = Listening(tmp_path, replay="nobody")
    await listening.feed.start()
    await speaker.subscribed()
    await speaker.publish(4, payload(stored(PROMPT, salt()), time_s=1.0))
    await listening.until_blocks(3)
    await speaker.publish(9, payload(stored(PROMPT[:4], salt()), time_s=2.0))
    await listening.until_blocks(1)
    assert listening.feed.counters()["losses"] == 1
    assert listening.feed.errors() == {"events_lost": 1, "events_full": 0, "events_wrong": 0}
    await listening.feed.stop()


async def test_predictions_are_compared_with_what_the_engine_found(
    speaker: Speaker, listening: Listening
) -> None:
    await speaker.subscribed()
    client, _ = await speaker.asked()
    await speaker.end(client)
    await speaker.publish(0, payload(stored(PROMPT, salt())))
    await listening.until_blocks(3)
    feed = listening.feed
    # The last token is always computed: of a prompt that ends with a block, that block is.
    assert feed.claimed_tokens(namespace(), PROMPT) == 2 * WIDTH
    assert feed.claimed_tokens(namespace(), [*PROMPT, 1]) == 3 * WIDTH
    assert feed.claimed_tokens(namespace(1), PROMPT) == 0
    feed.note_usage(claimed_tokens=8, cached_tokens=12)
    assert not feed.notes()
    feed.note_usage(claimed_tokens=12, cached_tokens=0)
    feed.note_usage(claimed_tokens=12, cached_tokens=0)
    counters = feed.counters()
    assert (counters["claimed_tokens"], counters["claimed_tokens_missing"]) == (32, 24)
    assert feed.errors()["events_wrong"] == 24 // WIDTH
    assert "another engine's" in feed.notes()[0]


async def test_the_inventory_is_what_the_directory_was_told(
    speaker: Speaker, listening: Listening
) -> None:
    await speaker.subscribed()
    client, _ = await speaker.asked()
    await speaker.end(client)
    listening.feed.learn_tenant(namespace(), "acme")
    await speaker.publish(0, payload(stored(PROMPT, salt())))
    await listening.until_blocks(3)
    inventory = listening.feed.inventory()
    assert [stored.key for stored in inventory] == block_keys(
        namespace(), PROMPT, block_tokens=WIDTH
    )
    assert {stored.block.owner.tenant for stored in inventory} == {"acme"}
    (path,) = listening.feed.paths()
    assert isinstance(path, PathReport) and path.usable and "batch 0" in path.reason
    assert "s behind" in path.reason
    assert PATH_REPORT.from_proto(PATH_REPORT.to_proto(path)) == path

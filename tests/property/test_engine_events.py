"""Whatever is lost, late, replayed or restarted: the directory learns what an engine holds.

A model of vLLM's cache and publisher, a wire that loses and delays, and the two pure cores as
integrations/events/feed.py joins them. While messages are under way the directory may be behind;
once all have arrived and the engine was asked, it claims nothing that is not there, and all that is
when the history is whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fix_engine_events import (
    CLEARED,
    MODEL,
    WIDTH,
    Claimed,
    engine_names,
    namespace,
    payload,
    removed,
    salt,
    stored,
)
from tierkv.integrations.events.following import (
    AskReplay,
    Following,
    Forget,
    Hide,
    Instruction,
    Show,
    Take,
)
from tierkv.integrations.events.messages import EngineBatch, decode_batch
from tierkv.integrations.events.own_blocks import OwnBlocks
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.ids import BlockKey

PROMPTS = [
    tuple(range(12)),
    (*range(8), 50, 51, 52, 53, 54, 55, 56, 57),
    tuple(range(100, 108)),
]
KEPT = 4
"""Batches an engine keeps for replay; few, so that losses happen."""


class Engine:
    """One life of an engine: its cache, and what it published."""

    def __init__(self, clock_s: float) -> None:
        self.clock_s = clock_s
        self.cache: dict[bytes, BlockKey] = {}
        self.sent = 0
        self.kept: deque[EngineBatch] = deque(maxlen=KEPT)

    def publish(self, *events: dict[str, Any]) -> EngineBatch:
        """Number and keep a batch."""
        self.clock_s += 1.0
        batch = decode_batch(self.sent, payload(*events, time_s=self.clock_s))
        self.sent += 1
        self.kept.append(batch)
        return batch

    def run(self, tokens: tuple[int, ...], tenant: int) -> EngineBatch | None:
        """Compute a prompt; what is new of it is stored and told of."""
        names = engine_names(tokens, salt(tenant))
        keys = block_keys(namespace(tenant), tokens, block_tokens=WIDTH)
        first = next((i for i, name in enumerate(names) if name not in self.cache), None)
        if first is None:
            return None
        self.cache.update(zip(names[first:], keys[first:], strict=True))
        return self.publish(stored(tokens, salt(tenant), first=first))

    def evict(self, count: int) -> EngineBatch:
        """Drop blocks, the newest first, as vLLM drops the end of a prompt first."""
        gone = list(self.cache)[-count:]
        for name in gone:
            del self.cache[name]
        return self.publish(*[removed(name) for name in gone])

    def reset(self) -> EngineBatch:
        """Drop everything."""
        self.cache.clear()
        return self.publish(CLEARED)


class Wire(RuleBasedStateMachine):
    """An engine that lives again and again, and one that listens."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(0.0)
        self.following = Following(replays=True)
        self.blocks = OwnBlocks(MODEL)
        self.claimed = Claimed()
        self.connected = False
        self.old_connection = False
        self.arriving: deque[EngineBatch] = deque()
        self.ask: int | None = None

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for step in instructions:
            match step:
                case AskReplay(start):
                    self.ask = start
                case Take(batch):
                    self.claimed.report(self.blocks.apply(0, batch.events))
                case Forget():
                    self.claimed.report(self.blocks.clear(0))
                case Hide():
                    self.claimed.report(self.blocks.hide(0))
                case Show():
                    self.claimed.report(self.blocks.show(0))

    def _send(self, batch: EngineBatch | None, lost: bool) -> None:
        # A new life may reach an old connection: something may stand in between.
        if batch is not None and self.connected and not lost:
            self.arriving.append(batch)

    @rule(prompt=st.sampled_from(PROMPTS), tenant=st.sampled_from([0, 1]), lost=st.booleans())
    def run(self, prompt: tuple[int, ...], tenant: int, lost: bool) -> None:
        """The engine computes a prompt."""
        self._send(self.engine.run(prompt, tenant), lost)

    @precondition(lambda self: self.engine.cache)
    @rule(count=st.integers(1, 3), lost=st.booleans())
    def evict(self, count: int, lost: bool) -> None:
        """The engine needs room."""
        self._send(self.engine.evict(count), lost)

    @rule(prompt=st.sampled_from(PROMPTS), reset=st.booleans())
    def fail_to_pack(self, prompt: tuple[int, ...], reset: bool) -> None:
        """The engine uses up a number for a batch that it can neither send nor keep."""
        if reset:
            self.engine.reset()
            self.engine.kept.pop()
        elif self.engine.run(prompt, 0) is not None:
            self.engine.kept.pop()

    @rule(lost=st.booleans())
    def reset(self, lost: bool) -> None:
        """Somebody resets the engine's cache."""
        self._send(self.engine.reset(), lost)

    @rule()
    def restart(self) -> None:
        """The engine dies and lives again; its old messages and connection may be noticed later."""
        self.engine = Engine(self.engine.clock_s)
        self.old_connection = True

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        """A connection comes about, with new sockets."""
        self.connected, self.old_connection = True, False
        self.arriving.clear()
        self._do(self.following.connected())

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        """The connection is lost, or is noticed to be."""
        self.connected = False
        self.arriving.clear()
        self.ask = None
        self._do(self.following.disconnected())

    @precondition(lambda self: self.arriving)
    @rule()
    def hear(self) -> None:
        """The next live batch is read."""
        self._do(self.following.live(self.arriving.popleft()))

    @precondition(lambda self: self.ask is not None)
    @rule(cut=st.integers(0, KEPT + 1), hole=st.integers(0, KEPT))
    def answer(self, cut: int, hole: int) -> None:
        """The engine that lives now replays: all, or with a hole, or until it is cut off."""
        start, self.ask = self.ask, None
        assert start is not None
        kept = [batch for batch in self.engine.kept if batch.seq >= start]
        for index, batch in enumerate(kept[:cut]):
            if index != hole:
                self._do(self.following.replayed(batch))
            if self.ask is not None:
                return
        if cut > len(kept):
            self._do(self.following.replay_ended())
        else:
            self._do(self.following.replay_failed())

    @precondition(lambda self: self.connected)
    @rule()
    def check(self) -> None:
        """It is time to ask whether there is more."""
        self._do(self.following.check())

    @rule()
    def settle(self) -> None:
        """Everything arrives, a lost connection is noticed, and the engine is asked."""
        if self.old_connection and self.connected:
            self.disconnect()
        if not self.connected:
            self.connect()
        # Whether the last number before was used up for nothing shows with the next.
        self._send(self.engine.publish(), lost=True)
        while self.arriving:
            self.hear()
        for _ in range(2):
            self._answer_all()
            self._do(self.following.check())
            self._answer_all()
        there = set(self.engine.cache.values())
        assert self.claimed.keys <= there
        if self.following.complete:
            assert self.claimed.keys == there
        assert self.following.last == self.engine.kept[-1]

    def _answer_all(self) -> None:
        asks = 0
        while self.ask is not None:
            self.answer(cut=KEPT + 1, hole=KEPT)
            asks += 1
            assert asks < 10 * KEPT

    @invariant()
    def fits(self) -> None:
        """What the directory was told is what the core would tell in an inventory."""
        self.blocks.check_invariants()
        assert self.claimed.keys == {block.key for block in self.blocks.inventory()}

    @invariant()
    def hides(self) -> None:
        """An engine that can't be heard holds nothing."""
        assert self.connected or not self.claimed.keys

    def teardown(self) -> None:
        """End with everything arrived."""
        self.settle()


TestWire = Wire.TestCase

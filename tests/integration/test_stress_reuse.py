"""Everything at once against one small node: page pressure, cancels, lost pools, flipped bits.

Whatever happens to the cache, every answer that ends by itself equals the answer computed without
one. The seeds are fixed and printed; thread timing is not, so a failure may need several runs.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from tests.fix_dmp import Rig, make_rig  # noqa: F401 - a fixture
from tests.fix_model import answer, make_request, running_node
from tierkv.compute.node import ComputeNode
from tierkv.dmp.pool_node import PoolNode, RangeRead
from tierkv.dmp.segment.slots import SlotState
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import ContextTooLongError
from tierkv.kvcore.ids import HostId, NamespaceKey
from tierkv.kvcore.request import Blend, BlendSelector, FinishReason, GenerateRequest, ReuseHint
from tierkv.policies.select import PRODUCTION_POLICIES

pytestmark = pytest.mark.integration
MakeRig = Callable[..., Rig]
REQUESTS = 300
DEADLINE_S = 60.0
LOAD_TIMEOUT_S = 0.02
PAGES = 33
"""One request needs up to 13 pages: three of them fill L1, sixteen run."""

PREFIXES = [[(i * step + 5) % 128 for i in range(48)] for step in (3, 7, 11, 13)]


HINTS = [
    None,
    ReuseHint(next_turn=True, next_turn_s=0.5),
    ReuseHint(next_turn=False),
    ReuseHint(pending_calls=3, pending_tokens=24),
]
"""What their callers say of the future: it moves blocks up and down, and changes no answer."""


HEAD = [9, 8, 7]
"""Before the documents of prompts that may be blended."""


def make_prompts(rng: random.Random) -> list[list[int]]:
    """48 prompts; some equal up to any token, some inside a block, some repeated.

    Every second one has two documents behind a head, which others have at another place.
    """
    prompts = []
    for number in range(48):
        tail = [rng.randrange(128) for _ in range(rng.randrange(1, 30))]
        if number % 2:
            prompts.append(rng.choice(PREFIXES)[: rng.randrange(9, 49)] + tail)
        else:
            one, two = rng.sample(PREFIXES, 2)
            prompts.append(HEAD + one[:DOC_TOKENS] + two[:DOC_TOKENS] + tail)
    return prompts


DOC_TOKENS = 21


def blend_of(prompt: list[int], rng: random.Random) -> Blend | None:
    """Leave to blend a prompt's documents; all is computed again, so the answer stays exact."""
    if prompt[: len(HEAD)] != HEAD or rng.random() < 0.2:
        return None
    start, middle = len(HEAD), len(HEAD) + DOC_TOKENS
    chunks = ((start, middle), (middle, middle + DOC_TOKENS))
    return Blend(chunks, 1.0, rng.choice(list(BlendSelector)), gradual=rng.random() < 0.3)


async def wanted_answers(prompts: list[list[int]]) -> list[list[int]]:
    """Compute each answer alone, on a node that never sees a cache."""
    async with running_node(max_running=1) as node:
        return [
            (await answer(node, make_request(p, use_cache=False, sampling={"max_tokens": 24})))[0]
            for p in prompts
        ]


class TardyPoolNode(InprocPoolNode):
    """Answers some reads only when the loader's patience has ended, and writes all the same."""

    def __init__(self, rig: Rig, seed: int) -> None:
        super().__init__(rig.node, clock=rig.clock)
        self._rng = random.Random(seed)
        self._never = threading.Event()

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        if self._rng.random() < 0.3:
            self._never.wait(2 * LOAD_TIMEOUT_S)
        super().read_ranges(reads)


class Storm:
    """Random requests and random damage, and what came of them."""

    def __init__(self, node: ComputeNode, rig: Rig, pools: list[PoolNode], seed: int) -> None:
        self.node = node
        self.rng = random.Random(seed)
        self.outcomes: dict[str, int] = {"whole": 0, "closed": 0, "cancelled": 0}
        self.blends = 0
        self._rig = rig
        self._pools = pools

    async def ask(self, prompt: list[int], want: list[int]) -> None:
        """Send one request, new or resumed, and leave it, cancel it, or hear it out."""
        rng = self.rng
        max_tokens = rng.randrange(1, 25)
        blend = blend_of(prompt, rng)
        resumed = 0 if blend else rng.choice([0, 0, 0, rng.randrange(max_tokens)])
        request = make_request(
            prompt + want[:resumed],
            sampling={"max_tokens": max_tokens},
            resumed_tokens=resumed,
            use_cache=rng.random() < 0.9,
            priority=rng.choice([0, 1]),
            handoff=rng.random() < 0.15 and not blend,
            namespace_key=NamespaceKey((b"n" if blend else rng.choice([b"n", b"m"])) * 32),
            blend=blend,
            hint=rng.choice(HINTS),
            session_id=rng.choice([None, "s1", "not a name"]),
        )
        end = rng.choice(["whole", "whole", "whole", "closed", "cancelled"])
        leave_after = rng.randrange(3)
        tokens, reason = await self._listen(request, end, leave_after)
        got = want[:resumed] + tokens
        assert got == want[: len(got)], f"wrong tokens for {request}"
        if reason is FinishReason.LENGTH:
            assert len(got) == max_tokens
        elif reason is FinishReason.HANDOFF:
            assert len(tokens) == 1
        else:
            assert end != "whole", reason
        self.outcomes[
            "whole" if reason in (FinishReason.LENGTH, FinishReason.HANDOFF) else end
        ] += 1

    async def _listen(
        self, request: GenerateRequest, end: str, leave_after: int
    ) -> tuple[list[int], FinishReason | None]:
        tokens: list[int] = []
        cancelling = None
        if end == "cancelled" and leave_after == 0:
            cancelling = asyncio.create_task(self.node.cancel(request.request_id))
        events = self.node.generate(request)
        reason = None
        async for event in events:
            assert reason is None, "an event after the last one"
            tokens.extend(event.token_ids)
            reason = event.finish_reason
            self.blends += event.usage is not None and event.usage.selector is not None
            if reason is None and len(tokens) > leave_after:
                if end == "closed":
                    break
                if end == "cancelled":
                    await self.node.cancel(request.request_id)
        await events.aclose()
        if cancelling is not None:
            await cancelling
        return tokens, reason

    async def damage(self, stop: asyncio.Event) -> None:
        """Hurt the cache in some way after every few steps, until told to stop."""
        done_steps = -1
        while not stop.is_set():
            if self.node._engine.steps < done_steps + 5:
                await asyncio.sleep(0.001)
                continue
            done_steps = self.node._engine.steps
            hurt = self.rng.choice([self._drop, self._give_up, self._flip, self._pools_change])
            await hurt()

    async def _drop(self) -> None:
        await self.node.drop_cache()

    async def _give_up(self) -> None:
        dropping = asyncio.create_task(self.node.drop_cache())
        await asyncio.sleep(0)
        dropping.cancel()
        with suppress(asyncio.CancelledError):
            await dropping

    async def _flip(self) -> None:
        """Flip a bit of some sealed slot, as a bad memory would."""
        stored = self._rig.node.reports.inventory()
        if stored:
            slot = self.rng.choice(stored).location.slot
            size = self._rig.node._state.table.extents.of(slot).slot_bytes
            layout = self.node.model.layout
            at = self.rng.randrange(layout.payload_bytes)
            self._rig.node.segment.payload(slot, size, at, at + 1)[0] ^= 0x40

    async def _pools_change(self) -> None:
        """Take the pool away, or give it (back) by one transport or the other."""
        self.node.set_pool_nodes(self.rng.choice([[], *([pool] for pool in self._pools)]))


async def every_claim_is_settled(node: ComputeNode, rig: Rig) -> None:
    """Check that nothing of 300 requests is left behind, on either side."""
    assert await node.flush(DEADLINE_S)
    await node.check_invariants()
    engine = node._engine
    assert not node._streams and not node._by_request
    assert not (engine._requests.unfinished or engine._loads.behind or engine._loads._locating)
    assert not (engine._blends._runs or engine._blends._lookups or engine.isolation.current)
    assert engine.batcher.active == engine.batcher.waiting == 0
    assert not engine.batcher._claims and not engine.batcher._loads
    async with asyncio.timeout(DEADLINE_S):
        while engine.pool.used:  # A load given up keeps its pages until its reader is done.
            await asyncio.sleep(0.01)
        while any(slot.holders or slot.pins for slot in rig.node._state.table.store.all()):
            await asyncio.sleep(0.01)
    assert isinstance(rig.clock, ManualClock)
    rig.clock.advance(60.0)  # What a pool that was taken away still owed has expired.
    rig.node.tick()
    assert rig.node._state.table.store.counts[SlotState.WRITING] == 0
    rig.node.check_invariants()


POLICIES = sorted(PRODUCTION_POLICIES)


@pytest.mark.parametrize(("seed", "policy"), [(1, POLICIES[0]), (2, POLICIES[-1])])
async def test_no_storm_makes_a_wrong_answer(
    make_rig: MakeRig,  # noqa: F811
    seed: int,
    policy: str,
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = make_prompts(rng)
    want = await wanted_answers(prompts)
    # 64 slots, fewer than the blocks of all prompts, so that the pool evicts as well.
    rig = make_rig(
        clock=ManualClock(),
        capacity_bytes=8 << 18,
        extent_bytes=1 << 18,
        eviction_policy=policy,
    )
    shm = connect_pool_node(
        rig.node.reports.info(data_address=rig.server.address), host=HostId("here")
    )
    tcp = connect_pool_node(
        rig.node.reports.info(data_address=rig.server.address), host=HostId("there")
    )
    pools: list[PoolNode] = [
        InprocPoolNode(rig.node, clock=rig.clock),
        shm,
        tcp,
        TardyPoolNode(rig, seed),
    ]
    try:
        settings = {"l1_pages": PAGES, "max_waiting": REQUESTS, "load_timeout_s": LOAD_TIMEOUT_S}
        async with running_node(pools[-1], eviction_policy=policy, **settings) as node:
            storm = Storm(node, rig, pools, seed)
            stop = asyncio.Event()
            damage = asyncio.create_task(storm.damage(stop))
            room = asyncio.Semaphore(100)

            async def one(number: int) -> None:
                async with room:
                    await storm.ask(prompts[number], want[number])

            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                for _ in range(REQUESTS):
                    tasks.create_task(one(rng.randrange(len(prompts))))
            stop.set()
            await damage
            node.set_pool_nodes(pools[1:2])
            await every_claim_is_settled(node, rig)
            print(
                storm.outcomes, storm.blends, node.report().cache_errors, rig.node.reports.stats()
            )
            assert sum(storm.outcomes.values()) == REQUESTS
            assert storm.outcomes["whole"] > REQUESTS // 2 and storm.blends > 0
            assert node._engine.pool.evicted_blocks > 0 and node._engine.batcher.preemptions > 0
            assert sum(meter.read_bytes for meter in node._engine.tiers.meters.values()) > 0
    finally:
        for pool in pools:
            pool.close()


async def test_a_batch_of_500_prompts_with_one_prefix_fits_through_three_requests_of_l1() -> None:
    prefix = PREFIXES[0]
    async with running_node(l1_pages=20, max_running=64, max_waiting=500) as node:
        requests = [
            make_request([*prefix, n % 128, n // 128, 9], sampling={"max_tokens": 4})
            for n in range(500)
        ]
        async with asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(*(answer(node, request) for request in requests))
        assert all(len(tokens) == 4 for tokens, _ in answers)
        hits = sum(last.usage.hit_tokens.total for _, last in answers)
        assert hits == 499 * len(prefix), "the prefix was computed more than once"
        for n in (0, 250, 499):
            alone = make_request(requests[n].token_ids, use_cache=False, sampling={"max_tokens": 4})
            assert (await answer(node, alone))[0] == answers[n][0]


async def test_a_request_that_can_never_fit_is_refused_with_the_limit() -> None:
    async with running_node(l1_pages=5) as node:
        with pytest.raises(ContextTooLongError, match="context of 32 tokens"):
            await answer(node, make_request(PREFIXES[0]))

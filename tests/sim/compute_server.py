"""A compute node of the simulation: the real page pool, a small engine, loads, puts and answers.

Whatever goes wrong while loading means that the block is computed. What is computed comes out of
the pages, so a wrong page becomes a wrong answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.sim.meta_server import ReportingNode
from tests.sim.network import Ask, Network, Sleep, Steps, Stream, Task
from tests.sim.pool_server import put_of
from tests.sim.promises import Promises
from tests.sim.prompts import BLOCK_TOKENS, Prompt, answer_from, expected_kv, next_kv
from tierkv.compute.l1.page_pool import PagePool
from tierkv.dmp.client.ring import rank_nodes
from tierkv.kvcore.block import BlockSpec, Location, Outlook, Owner
from tierkv.kvcore.block_event import BlockRemoved, BlockStored, HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.kvcore.node import NodeInfo, NodeLoad, NodeReport
from tierkv.metaserver.client import LocateReply
from tierkv.policies.eviction import BlockFacts
from tierkv.policies.select import make_policy
from tierkv.scheduler.events import Stage

QUEUE_LIMIT = 6
TOKEN_S = 0.001


@dataclass(frozen=True, slots=True)
class News:
    """What the front wants to hear of an answer."""

    refused: Callable[[], None]
    progress: Callable[[int], None]
    first_token: Callable[[], None]
    handed_over: Callable[[], None]
    finished: Callable[[bytes], None]


@dataclass(eq=False)
class Work:
    """One request at a node; it owns one reference of each of its pages."""

    prompt: Prompt
    stage: Stage
    stream: Stream
    news: News
    pages: list[int] = field(default_factory=list)
    waiting: bool = True


class ComputeServer(ReportingNode):
    """One life of a compute node.

    Attributes:
        pool: the real core.
        kv: what is in the pages.
        promises: the model of its leases.
        loaded: blocks taken from the pool; ``reused``: found in its own pages.
        prefetched: prompts loaded ahead.
    """

    def __init__(
        self,
        info: NodeInfo,
        net: Network,
        metas: Sequence[str],
        *,
        pages: int,
        policy: str,
        dmp: Sequence[NodeId],
    ) -> None:
        self.pool = PagePool(pages + 1, make_policy(policy, pages), now=lambda: self.now)
        self.kv: dict[int, bytes] = {}
        self.promises = Promises()
        self.loaded = self.prefetched = self.reused = self.computed = self.gave_way = (
            self._allocations
        ) = 0
        self._dmp = [(node_id, 1.0) for node_id in dmp]
        self._stored: dict[BlockKey, BlockStored] = {}
        self._work: dict[Work, None] = {}
        self._streams: dict[Stream, None] = {}
        super().__init__(info, net, metas)

    # -- what fronts ask

    def accept(self, stream: Stream, prompt: Prompt, stage: Stage, news: News) -> None:
        """Take a request in, or refuse it because too many wait."""
        if sum(work.waiting for work in self._work) >= QUEUE_LIMIT:
            stream.tell(news.refused)
            return
        work = Work(prompt, stage, stream, news)
        self._work[work] = None
        self._streams[stream] = None
        task = Task(self, self._serve(work), lambda result: None)
        stream.on_close = task.cancel
        task.step(None)

    def prefetch(self, prompt: Prompt, blocks: int) -> Steps:
        """Load ahead what the pool has; answers how many blocks are here then."""
        keys = prompt.keys[:blocks]
        pages = self.pool.lookup(keys)
        self.pool.acquire(pages)
        try:
            fresh = self._allocate(len(keys) - len(pages), over_leases=False) or []
            located = yield from self._locate(prompt)
            while fresh:
                kv = yield from self._load(prompt, len(pages), located)
                if kv is None:
                    break
                pages.append(self._commit(fresh.pop(), kv, prompt, len(pages)))
            self.pool.release(fresh)
            self.prefetched += 1
            return len(pages)
        finally:
            self.pool.release(pages)
            self._report()

    def on_hold(self, order: HoldOrder) -> None:
        self.pool.hold(order)
        self.promises.take_in(order, self._is_held, self.now)

    # -- one request

    def _serve(self, work: Work) -> Steps:
        try:
            hits = yield from self._wait_for_pages(work)
            self.reused += hits
            yield from self._fill(work, hits)
            kv = [self.kv[page] for page in work.pages]
            self._tell(work, work.news.first_token)
            if work.stage is Stage.PREFILL:
                yield from self._publish(work.prompt, work.pages, work)
                self._tell(work, work.news.handed_over)
                return
            self.spawn(self._publish_later(work))
            yield Sleep(self.net.rng.random() * 0.2)
            answer = answer_from([self.kv[page] for page in work.pages], work.prompt.tail)
            assert kv == [self.kv[page] for page in work.pages], "a page in use was overwritten"
            self._tell(work, lambda: work.news.finished(answer))
        finally:
            self._work.pop(work, None)
            self._streams.pop(work.stream, None)
            self.pool.release(work.pages)
            self._report()

    def _wait_for_pages(self, work: Work) -> Steps:
        """Take what is known and room for the rest, all or nothing."""
        keys = work.prompt.keys
        while True:
            hits = self.pool.lookup(keys)
            self.pool.acquire(hits)
            fresh = self._allocate(len(keys) - len(hits))
            if fresh is not None:
                work.pages, work.waiting = hits + fresh, False
                facts = [BlockFacts.of(_block(work.prompt, block)) for block in range(len(hits))]
                self.pool.use(hits, facts)
                return len(hits)
            self.pool.release(hits)
            assert self.pool.used, f"{self.name} has no pages for a request that is alone"
            yield Sleep(0.02)

    def _fill(self, work: Work, hits: int) -> Steps:
        """Load while the pool has the next block, then compute the rest."""
        prompt, loading = work.prompt, True
        located = yield from self._locate(prompt)
        for block in range(hits, len(prompt.blocks)):
            kv = (yield from self._load(prompt, block, located)) if loading else None
            if kv is None:
                loading = False
                yield Sleep(BLOCK_TOKENS * TOKEN_S)
                before = self.kv[work.pages[block - 1]] if block else b""
                kv = next_kv(before, prompt.blocks[block])
                self.computed += 1
            else:
                self.loaded += 1
            work.pages[block] = self._commit(work.pages[block], kv, prompt, block)
            self._report()
        yield Sleep(len(prompt.tail) * TOKEN_S)

    def _locate(self, prompt: Prompt) -> Steps:
        """Ask once for the whole chain; what is said of its end is old when it is needed."""
        located = yield from self.directory.locate(prompt.keys, reader=self.info.host)
        return None if located is None else located.reply

    def _load(self, prompt: Prompt, block: int, located: LocateReply | None) -> Steps:
        """Fetch a block's KV from wherever the directory says; None means: compute it."""
        places: list[Location] = []
        if located is None:  # No directory: whoever wrote it put it where anyone would.
            place = yield self._ask_home(prompt.keys[block])
            places = [place] if place is not None else []
        elif len(located.replicas) > block:
            places = [r.location for r in located.replicas[block] if r.location is not None]
        for place in places[:2]:
            kv = yield Ask(place.node, lambda node, place=place: node.read(place), 0.3)
            if kv is not None:
                return kv
        return None

    def _ask_home(self, key: BlockKey) -> Ask:
        return Ask(rank_nodes(key, self._dmp)[0], lambda node: node.lookup(key))

    def _publish_later(self, work: Work) -> Steps:
        """Publish with references of its own: the request may end meanwhile."""
        pages = list(work.pages)
        self.pool.acquire(pages)
        try:
            yield from self._publish(work.prompt, pages, None)
        finally:
            self.pool.release(pages)
            self._report()

    def _publish(self, prompt: Prompt, pages: Sequence[int], work: Work | None) -> Steps:
        """Put every block where rendezvous hashing says; failures mean it is not there."""
        last = len(pages) - 1
        for block, page in enumerate(pages):
            key = prompt.keys[block]
            put = put_of(key, prompt.parent(block), depth=block, tail=block == last)
            home = rank_nodes(key, self._dmp)[0]
            place = yield Ask(home, lambda node, put=put: node.reserve(put, self.name))
            if place is not None:
                kv = self.kv[page]
                written = yield Ask(home, lambda node, at=place, kv=kv: node.write(at, kv))
                if written is not None:
                    yield Ask(home, lambda node, at=place: node.seal(at))
            if work is not None:
                done = (block + 1) * BLOCK_TOKENS
                self._tell(work, lambda done=done: work.news.progress(done))

    # -- pages

    def _allocate(self, count: int, *, over_leases: bool = True) -> list[int] | None:
        before = self.promises.kept(self.now)
        self._allocations += bool(before)
        twin = copy.deepcopy(self.pool) if before and self._allocations % 8 == 0 else None
        pages = self.pool.allocate(count, over_leases=over_leases)
        gone = before.intersection(self._report())
        if gone:
            assert over_leases, f"{self.name}: loading ahead took blocks under lease"
            assert twin is None or twin.allocate(count, over_leases=False) is None, (
                f"{self.name} evicted blocks under lease without need"
            )
        if over_leases:
            self.promises.forget_expired(self.now)
            self.promises.give_way(self._is_held)
            self.gave_way += len(gone)
        return pages

    def _commit(self, page: int, kv: bytes, prompt: Prompt, block: int) -> int:
        """Make a block findable; whoever had it already has the same KV, or the cache is wrong."""
        self.kv[page] = kv
        kept = self.pool.commit(page, _block(prompt, block))
        assert self.kv[kept] == kv == expected_kv(prompt)[block], (
            f"{self.name}: wrong KV of block {block}: {self.kv[kept].hex()} {kv.hex()}, not "
            f"{expected_kv(prompt)[block].hex()}"
        )
        return kept

    def _report(self) -> list[BlockKey]:
        """Tell the directory what changed; answers what is gone."""
        events = self.pool.drain_events()
        gone = [event.key for event in events if isinstance(event, BlockRemoved)]
        for event in events:
            if isinstance(event, BlockStored):
                self._stored[event.key] = event
                continue
            for child in self._stored.values():
                assert child.block.parent != event.key, f"{self.name}: {child} lost its parent"
            del self._stored[event.key]
        self.reporter.report(events)
        return gone

    def _tell(self, work: Work, news: Callable[[], None]) -> None:
        work.stream.tell(news)

    def _is_held(self, key: BlockKey) -> bool:
        pages = self.pool.lookup([key])
        return bool(pages) and pages[0] in self.pool.holds

    # -- life

    def crash(self) -> None:
        super().crash()
        for stream in self._streams:
            stream.break_off()

    def inventory(self) -> Sequence[BlockStored]:
        self._report()
        return list(self._stored.values())

    def load(self) -> NodeReport:
        waiting = [work for work in self._work if work.waiting]
        return NodeReport(
            NodeLoad(
                requests_running=len(self._work) - len(waiting),
                requests_waiting=len(waiting),
                waiting_prefill_tokens=sum(work.prompt.tokens for work in waiting),
                prefill_tokens_per_s=1 / TOKEN_S,
            )
        )

    def check(self) -> None:
        """Free + used = all, and what is promised is here."""
        self.pool.check_invariants()
        kept = self.promises.kept(self.now)
        assert all(map(self._is_held, kept)), f"{self.name} lost a block under lease"

    def check_expired(self) -> None:
        """No lease outlives its deadline; the pool looks at the time when it is asked something."""
        self.on_hold(HoldOrder(LeaseId(0), (), 0.0))
        kept = self.promises.kept(self.now)
        held = {key for key in self._stored if self._is_held(key)}
        assert held <= kept, f"{self.name} keeps blocks under leases that are over"

    def check_at_rest(self) -> None:
        """Nothing is used or kept when nobody does anything any more."""
        self.check_expired()
        assert self.pool.used == 0, f"{self.name} lost references to {self.pool.used} pages"
        assert not self._work and not self.pool.holds, self.name


def _block(prompt: Prompt, block: int) -> BlockSpec:
    key, parent, last = prompt.keys[block], prompt.parent(block), len(prompt.blocks) - 1
    outlook = Outlook(depth=block, tail=block == last)
    return BlockSpec(key, parent, BLOCK_TOKENS, owner=Owner("tiny"), outlook=outlook)

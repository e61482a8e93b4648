"""A compute node: third hop of the main job (executor -> dispatcher -> node).

Owns the model, its pages, the engine thread and the tiers below. Requests come in as values and go
out as async streams of events; the composition root wires the meta server and the pool nodes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import AsyncGenerator, Sequence

import torch

from tierkv.compute.batching.answers import Delivery
from tierkv.compute.batching.sequence import new_tokens_of
from tierkv.compute.config import ComputeConfig
from tierkv.compute.engine.block_eraser import BlockEraser
from tierkv.compute.engine.drafts import GuessStats
from tierkv.compute.engine.engine import Engine
from tierkv.compute.engine.guides import Guides
from tierkv.compute.engine.wiring import wire
from tierkv.compute.loading import load_model
from tierkv.compute.tiers.finder import Directory
from tierkv.compute.tiers.host_memory import host_memory
from tierkv.compute.tiers.load_log import LoadRecord
from tierkv.compute.tiers.store_reader import StoreReader
from tierkv.compute.tiers.tiers import Tiers
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.zone_traffic import ZoneTraffic
from tierkv.kvcore import limits
from tierkv.kvcore.block import Erased, Tier
from tierkv.kvcore.block_event import (
    BlockEvent,
    BlockReporter,
    BlockStored,
    HoldOrder,
    NullReporter,
)
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import (
    ContextTooLongError,
    DirectoryUnavailableError,
    OverloadedError,
    TierKVError,
    TransportError,
    UnknownModelError,
    UserError,
)
from tierkv.kvcore.ids import BlockKey, Incarnation, NodeId, RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport, PathReport, TierStats
from tierkv.kvcore.request import GenerateEvent, GenerateRequest, PromptBlocks
from tierkv.metaserver.client import LocateReply, MetaClient
from tierkv.storage.block_store import BlockStore

Answer = GenerateEvent | TierKVError


class ComputeNode:
    """One prefill/decode node in this process.

    ``generate``, ``cancel``, ``drop_cache`` and ``flush`` belong to the event loop in which
    ``start`` ran; the other methods may be called from any thread.

    Attributes:
        config: settings of the node.
        model: the served model as the cluster sees it.
        traffic: bytes exchanged with pool nodes of other zones, told in the reports.
    """

    def __init__(
        self,
        config: ComputeConfig,
        *,
        incarnation: Incarnation,
        meta: MetaClient | None = None,
        reporter: BlockReporter | None = None,
        clock: Clock | None = None,
        archive: BlockStore | None = None,
        control_address: str = "",
    ) -> None:
        self.config = config
        self.traffic: ZoneTraffic | None = None
        if config.threads:
            torch.set_num_threads(config.threads)
        loaded = load_model(config)
        self.model = loaded.info
        self._pages = loaded.decoder.pages
        self._vocab_tokens = loaded.decoder.arch.vocab_tokens
        self._guides = Guides(self.model, vocab_tokens=self._vocab_tokens)
        self._incarnation = incarnation
        self._meta = meta
        self._reporter = reporter or NullReporter()
        self._clock = clock or SystemClock()
        self._control_address = control_address
        self._archive = archive
        self._host_memory = host_memory()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = False
        self._streams: dict[int, asyncio.Queue[Answer]] = {}
        self._by_request: dict[RequestId, set[int]] = {}
        self._numbers = itertools.count(1)
        self._stored: dict[BlockKey, BlockStored] = {}
        self._stored_tokens = 0
        parts = wire(
            config,
            loaded.decoder,
            self._make_tiers(),
            self._clock,
            blend_refusal=self.model.blend_refusal,
        )
        self._engine = Engine(
            parts,
            eos_token_ids=self.model.eos_token_ids,
            deliver=self._deliver,
            on_pages=self._on_pages,
        )
        self._eraser = BlockEraser(
            self._engine,
            block_tokens=self._pages.layout.block_tokens,
            page_bytes=self._pages.layout.payload_bytes,
        )

    def _make_tiers(self) -> Tiers:
        directory: Directory | None = self._locate if self._meta is not None else None
        archive = None
        if self._archive is not None:
            archive = StoreReader(
                self._archive, node_id=NodeId(f"{self.config.node_id}.l4"), host=self.config.host
            )
        return Tiers(
            self.config,
            self._pages,
            clock=self._clock,
            directory=directory,
            archive=archive,
            host_memory=self._host_memory,
        )

    async def start(self) -> None:
        """Start the engine; the running event loop becomes the node's event loop."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._engine.start)
        self._running = True

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted: started, not stopped, and no bug ended the engine."""
        return self._running and not self._engine.broken

    async def stop(self) -> None:
        """End all requests as cancelled, publish queued blocks, stop all threads."""
        if self._running:
            self._running = False
            await self._guides.close()
            # In a thread: the loop must stay free to answer the last directory calls.
            await asyncio.to_thread(self._engine.stop)

    def set_control_address(self, address: str) -> None:
        """Set the address of the node's gRPC service, once the address is known."""
        self._control_address = address

    def set_pool_nodes(self, nodes: Sequence[PoolNode]) -> None:
        """Replace the connected DMP nodes; the caller closes the removed nodes.

        On a GPU the call blocks while memory of removed nodes is unpinned, 16 ms per GiB.
        """
        if self._host_memory is not None:
            self._host_memory.keep(nodes)
        self._engine.set_pool_nodes(nodes)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Answer a request; closing the iterator early cancels the request within a step.

        Raises:
            UserError: the request can't work (unknown model, too long, bad token ids, a schema that
                can't be followed).
            OverloadedError: the queue is full, or too many schemas wait to be compiled.
            TransportError: the node is not running.
        """
        self._check(request)
        form = await self._guides.guide(request)
        seq_id = next(self._numbers)
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._streams[seq_id] = answers
        self._by_request.setdefault(request.request_id, set()).add(seq_id)
        finished = False
        try:
            self._engine.submit(seq_id, request, form)
            while not finished:
                answer = await answers.get()
                finished = isinstance(answer, TierKVError) or answer.finish_reason is not None
                if isinstance(answer, TierKVError):
                    raise answer
                yield answer
        finally:
            self._forget(request.request_id, seq_id)
            if not finished:
                self._engine.cancel(seq_id)

    def _forget(self, request_id: RequestId, seq_id: int) -> None:
        self._streams.pop(seq_id, None)
        numbers = self._by_request[request_id]
        numbers.discard(seq_id)
        if not numbers:
            del self._by_request[request_id]

    def _check(self, request: GenerateRequest) -> None:
        """Refuse a request that can't work, before it costs anything."""
        if not self._running or self._engine.broken:
            raise TransportError(f"compute node {self.config.node_id} is not running")
        if request.model != self.model.name:
            raise UnknownModelError(
                f"node {self.config.node_id} serves {self.model.name!r}, not {request.model!r}"
            )
        if request.prepared_for not in ("", self.model.identity):
            # The front knows an earlier start of this node; the block size is the same for bfloat16
            # and float16.
            raise TransportError(
                f"node {self.config.node_id} serves other weights or another KV layout of "
                f"{request.model!r} than the request was prepared for"
            )
        if not request.token_ids:
            raise UserError("the prompt has no tokens")
        if not 0 <= request.resumed_tokens < len(request.token_ids):
            raise UserError("resumed_tokens must leave at least one prompt token")
        if request.blend is not None and request.blend.chunks:
            stop = request.blend.chunks[-1][1]
            if stop > len(request.token_ids):
                raise UserError(f"a chunk ends at {stop}, behind the prompt's last token")
        biased = [token for token, _ in request.sampling.logit_bias]
        if not all(
            0 <= token < self._vocab_tokens
            for ids in (request.token_ids, request.score_token_ids, biased)
            for token in (min(ids, default=0), max(ids, default=0))
        ):
            raise UserError(f"token ids must be in [0, {self._vocab_tokens})")
        if bool(request.guide) + bool(request.score_token_ids) + request.embed > 1:
            raise UserError("ask for one of JSON, token probabilities and an embedding")
        new_tokens = new_tokens_of(request)
        wanted = len(request.token_ids) + new_tokens
        if wanted > self.model.context_tokens:
            raise ContextTooLongError(
                f"{len(request.token_ids)} prompt tokens and {new_tokens} new ones exceed the "
                f"context of {self.model.context_tokens} tokens",
                hint="Shorten the prompt or lower max_tokens.",
            )
        if len(self._streams) >= self.config.max_waiting + self.config.max_running:
            raise OverloadedError(f"node {self.config.node_id} has {len(self._streams)} requests")

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request as CANCELLED; return False when the request is unknown."""
        numbers = self._by_request.get(request_id, set())
        for seq_id in numbers:
            self._engine.cancel(seq_id)
        return bool(numbers)

    async def prefetch(self, request: GenerateRequest) -> int:
        """Bring blocks of a prompt into L1 ahead of its request, as far as there is room to spare.

        Returns:
            number of leading prompt tokens in L1 now.
        """
        self._check(request)
        loop, loaded = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def tell(tokens: int) -> None:
            if not loaded.done():
                loaded.set_result(tokens)

        def answer(tokens: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, tokens)

        self._engine.prefetch(request, answer)
        return int(await loaded)

    def hold(self, order: HoldOrder) -> None:
        """Apply an order to protect or release blocks in L1; the engine does so between steps."""
        self._engine.hold(order)

    async def drop_cache(self) -> int:
        """Forget unused L1 pages; pool copies stay. Return the number of dropped blocks."""
        return await asyncio.wrap_future(self._engine.inbox.call(self._engine.drop_unused))

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks:
        """Name the known blocks of a prompt, after all its saves have ended.

        Raises:
            UserError: the request can't work.
            TransportError: the node is not running, or saves did not end in time.
        """
        self._check(request)
        if not await self.flush():
            raise TransportError(f"node {self.config.node_id} is still saving blocks")
        return await self._eraser.find(request)

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]:
        """Remove blocks from L1, or from the pool; see ComputeClient."""
        if not self.is_running:
            raise TransportError(f"compute node {self.config.node_id} is not running")
        if pool:
            return await self._eraser.erase_pool(keys)
        return await self._eraser.erase_pages(keys), ()

    async def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until every block computed so far is published or given up; return False on timeout.

        The wait includes the chunks of blended prompts that are still to be computed in isolation.
        """
        deadline_s = self._clock.now() + timeout_s
        await asyncio.wrap_future(self._engine.inbox.call(self._engine.hand_out))
        if not await asyncio.to_thread(self._engine.isolation.idle.wait, timeout_s):
            return False
        left_s = deadline_s - self._clock.now()
        return await asyncio.to_thread(self._engine.tiers.publisher.flush, max(0.0, left_s))

    async def check_invariants(self) -> None:
        """Assert that every page, claim and phase is consistent."""
        await asyncio.wrap_future(self._engine.inbox.call(self._engine.batcher.check_invariants))

    def _locate(self, keys: Sequence[BlockKey]) -> LocateReply:
        """Ask the meta server from a worker thread."""
        assert self._meta is not None and self._loop is not None
        if self._loop.is_closed():
            raise DirectoryUnavailableError("the node's event loop is closed")
        future = asyncio.run_coroutine_threadsafe(self._meta.locate(keys), self._loop)
        try:
            return future.result(self.config.locate_timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DirectoryUnavailableError("the meta server did not answer in time") from None
        except concurrent.futures.CancelledError:
            raise DirectoryUnavailableError("the node is stopping") from None

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """Pass all events of a step to the event loop at once."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, deliveries)

    def _dispatch(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            answers = self._streams.get(delivery.seq_id)
            if answers is not None:
                answers.put_nowait(delivery.event)

    def _on_pages(self, events: list[BlockEvent]) -> None:
        """Report blocks that L1 gained and lost; runs in the engine thread."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored[event.key] = event
                self._stored_tokens += event.block.tokens
            else:
                self._stored.pop(event.key, None)
        self._reporter.report(events)

    def inventory(self) -> tuple[BlockStored, ...]:
        """Return all blocks in L1 now, for a directory that lost track."""
        return tuple(self._stored.values())  # One C call: atomic under the interpreter lock.

    def info(self) -> NodeInfo:
        """Describe the node for its registration."""
        return NodeInfo(
            node_id=self.config.node_id,
            incarnation=self._incarnation,
            role=self.config.role,
            host=self.config.host,
            zone=self.config.zone,
            control_address=self._control_address,
            capacity_bytes=self._pages.capacity_bytes,
            models=(self.model,),
        )

    def report(self) -> NodeReport:
        """Report the node's load and the statistics of its tiers."""
        meters = self._engine.tiers.meters
        report = NodeReport(
            load=self._engine.load,
            tiers=(self._l1_stats(), *(self._read_stats(t) for t in (Tier.L2, Tier.L3, Tier.L4))),
            cache_errors=tuple(sorted(self._engine.tiers.cache_errors.copy().items())),
            transfer_bytes_in=sum(meter.read_bytes for meter in meters.values()),
            transfer_bytes_out=self._engine.tiers.publisher.written_bytes,
            paths=tuple(_path_to(node) for node in self._engine.tiers.finder.nodes),
            load_choices=self._engine.tiers.log.stats(),
        )
        return report if self.traffic is None else self.traffic.told_in(report)

    def load_decisions(self) -> tuple[LoadRecord, ...]:
        """Return the last decisions of the loading controller, oldest first."""
        return tuple(self._engine.tiers.log.recent)

    @property
    def speculation(self) -> GuessStats:
        """Counts of tokens guessed ahead and of correct guesses."""
        return self._engine.drafts.stats

    def _l1_stats(self) -> TierStats:
        pool, meter = self._engine.pool, self._engine.tiers.meters[Tier.L1]
        page_bytes = self._pages.layout.payload_bytes
        return TierStats(
            tier=Tier.L1,
            medium="gpu memory" if self._pages.kv.is_cuda else "cpu memory",
            model=self.model.name,
            capacity_bytes=(pool.num_pages - 1) * page_bytes,
            used_bytes=max(pool.used, pool.keyed) * page_bytes,
            blocks_total=pool.num_pages - 1,
            blocks_used=max(pool.used, pool.keyed),
            query_tokens=meter.query_tokens,
            hit_tokens=meter.hit_tokens,
            stored_tokens=self._stored_tokens,
            evicted_blocks=pool.evicted_blocks,
            alloc_failures=self._engine.tiers.publisher.dropped_blocks,
        )

    def _read_stats(self, tier: Tier) -> TierStats:
        meter = self._engine.tiers.meters[tier]
        publisher = self._engine.tiers.publisher
        writes = tier is Tier.L2
        return TierStats(
            tier=tier,
            model=self.model.name,
            query_tokens=meter.query_tokens,
            hit_tokens=meter.hit_tokens,
            read_bytes=meter.read_bytes,
            read_time_s=meter.read_time_s,
            write_time_s=publisher.write_time_s if writes else 0.0,
        )


def _path_to(node: PoolNode) -> PathReport:
    path = node.path
    return PathReport(node.node_id, path.transport, path.reason[: limits.MAX_REASON_CHARS])

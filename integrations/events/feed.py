"""The KV events of a foreign engine, reported to the directory as L1 of the engine's node.

``tierkv serve compute --engine`` creates an EngineEvents next to the node
(tierkv/parts/engine_part.py), passes the node's reporter and answers inventories from
``inventory``. The feed never blocks and never fails. An unreachable engine holds nothing as far as
the scheduler knows, and still receives requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from tierkv.integrations.events.following import Forget, Hide, Instruction, Show, Take
from tierkv.integrations.events.listener import EventEndpoint, RankListener
from tierkv.integrations.events.own_blocks import OwnBlocks
from tierkv.kvcore import limits
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.block_event import BlockEvent, BlockReporter, BlockStored
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.ids import NamespaceKey
from tierkv.kvcore.node import ModelInfo, PathReport

_TRANSPORT: Final = "zmq"
_COUNTED: Final = ("gaps", "replays", "restarts", "losses", "late", "unreadable")


class EngineEvents:
    """Listens to all ranks of an engine. Start and stop the feed in one event loop.

    Attributes:
        _lock: protects ``_blocks``, because other threads ask for inventories.
        _predicted: claimed tokens of all prompts that were computed.
        _missed: claimed tokens that the engine did not have.
    """

    def __init__(
        self,
        endpoints: Sequence[EventEndpoint],
        *,
        model: ModelInfo,
        reporter: BlockReporter,
        check_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Create a feed; nothing is connected before ``start``.

        Args:
            endpoints: addresses of each rank (integrations/events/listener.py); empty: no events.
            model: the node's model, with the layout of the engine's blocks.
            reporter: the node's outbox; the outbox must take ``inventory`` as its inventory.
            check_s: time between checks for batches that were published but not received.
            clock: wall time for comparison with the engine's time.
        """
        self._model = model
        self._reporter = reporter
        self._lock = threading.Lock()
        self._blocks = OwnBlocks(model)
        self._predicted = self._missed = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners = [
            RankListener(
                endpoint,
                partial(self._act, endpoint.rank),
                clock=clock or SystemClock(),
                check_s=check_s,
            )
            for endpoint in endpoints
        ]

    async def start(self) -> None:
        """Begin to listen in the background, even if the engine is not running."""
        self._tasks = [asyncio.create_task(listener.run()) for listener in self._listeners]

    async def stop(self) -> None:
        """Stop listening, which withdraws all claims."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def inventory(self) -> tuple[BlockStored, ...]:
        """Return every block the engine is known to hold. Thread-safe; O(blocks)."""
        with self._lock:
            return self._blocks.inventory()

    def engine_restarted(self) -> None:
        """Withdraw all claims until a replay proves the engine's life; call in the event loop.

        For callers that detect a restart by other means. A lost connection is detected here.
        """
        for listener in self._listeners:
            self._act(listener.endpoint.rank, Hide())
            listener.doubted.set()

    def learn_tenant(self, namespace: NamespaceKey, tenant: str) -> None:
        """Record the tenant of a namespace key, for ``tierkv.blocks``."""
        with self._lock:
            self._blocks.learn_tenant(namespace, tenant)

    @property
    def wants_full_report(self) -> bool:
        """True if requests should make vLLM report reused blocks like new ones.

        The option is ``vllm_xargs: {"kv_cache_report_mode": "full"}``. Reports are needed after
        history was lost: vLLM would never mention the blocks from the lost history again.
        """
        return any(
            listener.connected and not listener.following.complete for listener in self._listeners
        )

    def claimed_tokens(self, namespace: NamespaceKey, token_ids: Sequence[int]) -> int:
        """Return the number of prompt tokens known to be in the engine, in the engine's count.

        An engine always computes the last token.
        """
        width = self._model.layout.block_tokens
        keys = block_keys(namespace, token_ids[:-1], block_tokens=width)
        with self._lock:
            return width * self._blocks.leading(keys)

    def note_usage(self, *, claimed_tokens: int, cached_tokens: int) -> None:
        """Compare the tokens claimed when a prompt was sent with the tokens found by the engine."""
        self._predicted += claimed_tokens
        self._missed += max(0, claimed_tokens - cached_tokens)

    def counters(self) -> dict[str, int]:
        """Return counters for views: results of batches, blocks, predictions."""
        counts: Counter[str] = Counter()
        for listener in self._listeners:
            counts.update(listener.following.counts)
        with self._lock:
            counts.update({f"skipped_{why}": n for why, n in self._blocks.skipped.items()})
            counts["blocks"] = len(self._blocks)
        counts["claimed_tokens"] = self._predicted
        counts["claimed_tokens_missing"] = self._missed
        return dict(counts)

    def errors(self) -> dict[str, int]:
        """Return the number of errors with a cost for the routing of requests, by kind.

        ``events_lost``: history of the engine no longer available, or unreadable. ``events_full``:
        blocks beyond the limit per engine. ``events_wrong``: claimed blocks that the engine did not
        have.
        """
        lost = sum(
            listener.following.counts[kind]
            for listener in self._listeners
            for kind in ("losses", "unreadable")
        )
        with self._lock:
            full = self._blocks.skipped["full"]
        wrong = self._missed // self._model.layout.block_tokens
        return {"events_lost": lost, "events_full": full, "events_wrong": wrong}

    def paths(self) -> tuple[PathReport, ...]:
        """Return the connection state of each rank, for ``tierkv.nodes``."""
        return tuple(self._path(listener) for listener in self._listeners)

    def notes(self) -> tuple[str, ...]:
        """Return problems as text for people; empty if all is well."""
        notes = [
            f"no KV events from {listener.endpoint.events}: start the engine with "
            "--kv-events-config, or set engine.events_url to off"
            for listener in self._listeners
            if not listener.connected
        ]
        if 2 * self._missed > self._predicted > 0:
            notes.append(
                f"of {self._predicted} tokens that its KV events claim, the engine did not have "
                f"{self._missed}: is engine.events_url another engine's?"
            )
        return tuple(note[: limits.MAX_REASON_CHARS] for note in notes)

    def _path(self, listener: RankListener) -> PathReport:
        following, endpoint = listener.following, listener.endpoint
        name = f"events:rank{endpoint.rank}"
        if not listener.connected:
            return PathReport(name, _TRANSPORT, f"nobody at {endpoint.events}", usable=False)
        last = "none" if following.last is None else str(following.last.seq)
        counts = [f"{n} {kind}" for kind in _COUNTED if (n := following.counts[kind])]
        whole = [] if following.complete or following.last is None else ["history incomplete"]
        lag = [] if listener.lag_s is None else [f"{listener.lag_s:.3f} s behind"]
        facts = [f"{endpoint.events} batch {last}", *lag, *whole, *counts]
        return PathReport(name, _TRANSPORT, ", ".join(facts)[: limits.MAX_REASON_CHARS])

    def _act(self, rank: int, instruction: Instruction) -> None:
        """Change the state, then report: an inventory in between already contains the change."""
        with self._lock:
            news = self._carry_out(rank, instruction)
        self._reporter.report(news)

    def _carry_out(self, rank: int, instruction: Instruction) -> list[BlockEvent]:
        match instruction:
            case Take(batch):
                return self._blocks.apply(rank, batch.events)
            case Forget():
                return self._blocks.clear(rank)
            case Hide():
                return self._blocks.hide(rank)
            case Show():
                return self._blocks.show(rank)
            case _:
                raise AssertionError(instruction)

"""The KV events of one foreign engine, fed to the directory as its compute node's L1.

``tierkv serve compute --engine`` makes one beside its node (tierkv/parts/engine_part.py), gives it
the node's reporter and answers inventories with it. It never blocks and never fails: an engine that
can't be heard holds nothing as far as the scheduler knows, and is asked all the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from tierkv.integrations.events.endpoints import EventEndpoint
from tierkv.integrations.events.following import Forget, Hide, Instruction, Show, Take
from tierkv.integrations.events.listener import RankListener
from tierkv.integrations.events.own_blocks import OwnBlocks
from tierkv.kvcore import limits
from tierkv.kvcore.block_event import BlockEvent, BlockReporter, BlockStored
from tierkv.kvcore.block_key import block_keys
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.ids import NamespaceKey
from tierkv.kvcore.node import ModelInfo, PathReport

_TRANSPORT: Final = "zmq"
_COUNTED: Final = ("gaps", "replays", "restarts", "losses", "late", "unreadable")


class EngineEvents:
    """Listens to all ranks of an engine. Start and stop it in one event loop.

    Attributes:
        _lock: around ``_blocks``: inventories are asked for by other threads.
        _predicted: tokens that were claimed for prompts which then ran.
        _missed: how many of them the engine did not have.
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
        """Make a feed; nothing is connected before ``start``.

        Args:
            endpoints: of each rank (integrations/events/endpoints.py); none: nothing is ever heard.
            model: what the node serves, with the layout the engine keeps blocks in.
            reporter: the node's outbox; its inventory is to be ``inventory``.
            check_s: how often the engine is asked whether more was published.
            clock: its wall time is compared with the engine's.
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
        """Begin to listen in the background, whether or not the engine is there."""
        self._tasks = [asyncio.create_task(listener.run()) for listener in self._listeners]

    async def stop(self) -> None:
        """Hear nothing more, and claim nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def inventory(self) -> tuple[BlockStored, ...]:
        """Return every block the engine is known to hold. Thread-safe; O(blocks)."""
        with self._lock:
            return self._blocks.inventory()

    def engine_restarted(self) -> None:
        """Believe nothing until the engine proved what life it is in; in the event loop.

        For who notices a restart by other means. A lost connection is noticed here.
        """
        for listener in self._listeners:
            self._act(listener.endpoint.rank, Hide())
            listener.doubted.set()

    def learn_tenant(self, namespace: NamespaceKey, tenant: str) -> None:
        """Note whose blocks a key names, for ``tierkv.blocks``."""
        with self._lock:
            self._blocks.learn_tenant(namespace, tenant)

    @property
    def wants_full_report(self) -> bool:
        """Whether requests should ask vLLM to tell of the blocks they reuse as of new ones.

        ``vllm_xargs: {"kv_cache_report_mode": "full"}`` does that. It is so after history was lost:
        what the engine stored before, it would never mention again.
        """
        return any(
            listener.connected and not listener.following.complete for listener in self._listeners
        )

    def claimed_tokens(self, namespace: NamespaceKey, token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's tokens the engine is known to have, as it will count them.

        An engine always computes the last token.
        """
        width = self._model.layout.block_tokens
        keys = block_keys(namespace, token_ids[:-1], block_tokens=width)
        with self._lock:
            return width * self._blocks.leading(keys)

    def note_usage(self, *, claimed_tokens: int, cached_tokens: int) -> None:
        """Compare what was claimed of a prompt when it was sent with what the engine found."""
        self._predicted += claimed_tokens
        self._missed += max(0, claimed_tokens - cached_tokens)

    def counters(self) -> dict[str, int]:
        """Return what happened so far, for views: batches' fates, blocks, predictions."""
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
        """Return how often something went wrong that costs prompts their place, by kind.

        ``events_lost``: history of the engine that can't be had any more, or read. ``events_full``:
        blocks beyond what is kept of one engine. ``events_wrong``: blocks that were claimed of a
        prompt and that the engine did not have.
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
        """Return how each rank is heard, for ``tierkv.nodes``."""
        return tuple(self._path(listener) for listener in self._listeners)

    def notes(self) -> tuple[str, ...]:
        """Say what is not as it should be, for people; empty when all is well."""
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
        """Change what is known, then tell of it: an inventory in between has it already."""
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

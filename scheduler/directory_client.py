"""The scheduler's client of the directory: locations of a prompt's blocks, and keys of tenants.

Used by scheduler/dispatcher.py. Every failure of the directory means "no hits" and is counted.
After a failure the client pauses, then asks a single question as a probe, so a hanging server
delays few requests. New questions during a call are batched into the next call: the busier the
directory, the larger each call.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tierkv.kvcore import limits
from tierkv.kvcore.block import block_keys, namespace_key
from tierkv.kvcore.block_event import NO_LEASE, LeaseId
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import GenerateRequest
from tierkv.metaserver.client import LocateReply, MetaClient, NamespaceGrant
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.routing_stats import RoutingStats

Ask = Callable[[list[Sequence[BlockKey]], float], Awaitable[list[LocateReply]]]
"""Locates several chains and reserves them for the given seconds; returns one reply per chain."""


@dataclass(frozen=True, slots=True)
class _Question:
    chain: Sequence[BlockKey]
    reserve_s: float
    answer: asyncio.Future[LocateReply]


class LocateWave:
    """Batches locate questions; used from one event loop."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._waiting: deque[_Question] = deque()
        self._asking: asyncio.Task[None] | None = None

    async def find(self, chain: Sequence[BlockKey], *, reserve_s: float) -> LocateReply:
        """Locate a chain, batched with concurrent questions.

        Args:
            chain: at most MAX_CHAIN_BLOCKS keys.
            reserve_s: length of the lease on the blocks found.
        """
        loop = asyncio.get_running_loop()
        question = _Question(chain, reserve_s, loop.create_future())
        self._waiting.append(question)
        if self._asking is None:
            # The task starts after all callers that are ready now have queued their questions.
            self._asking = loop.create_task(self._work(), name="scheduler-locate")
        return await question.answer

    async def _work(self) -> None:
        wave: list[_Question] = []
        try:
            while self._waiting:
                wave = self._next()
                replies = await self._ask([q.chain for q in wave], wave[0].reserve_s)
                for question, reply in zip(wave, replies, strict=True):
                    if not question.answer.done():
                        question.answer.set_result(reply)
        except BaseException as error:
            failed, self._waiting = [*wave, *self._waiting], deque()
            for question in failed:
                if not question.answer.done():
                    question.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._asking = None

    def _next(self) -> list[_Question]:
        """Take the questions of the next call from the queue; cancelled questions are left out."""
        wave: list[_Question] = []
        blocks = 0
        while self._waiting and len(wave) < limits.MAX_CHAINS_PER_QUESTION:
            question = self._waiting[0]
            blocks += len(question.chain)
            if wave and (
                blocks > limits.MAX_CHAIN_BLOCKS or question.reserve_s != wave[0].reserve_s
            ):
                break
            self._waiting.popleft()
            if not question.answer.done():
                wave.append(question)
        return wave


FIRST_BACKOFF_SHARE = 0.125


class Patience:
    """Back-off after failures of the directory.

    Attributes:
        failures: questions that failed in a row.
    """

    def __init__(self, *, backoff_s: float) -> None:
        """Start without failures; ``backoff_s`` is the longest pause between questions."""
        self.failures = 0
        self._backoff_s = backoff_s
        self._off_until_s = 0.0
        self._probing = False

    def may_ask(self, now: float) -> bool:
        """Return whether a question may be sent now."""
        return not self.failures or (now >= self._off_until_s and not self._probing)

    def ask(self) -> None:
        """Record that a question is sent."""
        self._probing = self.failures > 0

    def answered(self) -> None:
        """Record an answer."""
        self.failures, self._probing = 0, False

    def failed(self, now: float) -> None:
        """Record a missing answer; questions that fail together count once."""
        self._probing = False
        if now < self._off_until_s:
            return
        self.failures += 1
        share = min(1.0, FIRST_BACKOFF_SHARE * 2.0 ** min(self.failures - 1, 16))
        self._off_until_s = now + share * self._backoff_s

    def gave_up(self) -> None:
        """Record that the caller was cancelled before an answer or a failure."""
        self._probing = False


_Answer = TypeVar("_Answer")

RESOLVE_TIMEOUT_S = 5.0
"""For a tenant never seen before: without an answer the tenant would share nothing."""

NOTHING_FOUND = LocateReply()
"""Stands for every missing answer; compared by identity with empty replies of the directory."""


class DirectoryClient:
    """Asks the meta server, and works without one."""

    def __init__(
        self,
        meta: MetaClient | None,
        *,
        config: SchedulerConfig,
        stats: RoutingStats,
        clock: Clock,
    ) -> None:
        """Make a client; does no I/O.

        Args:
            meta: the directory; None means no hits and tenant keys known to this process alone.
            config: waits and bounds.
            stats: counts failures and questions.
            clock: source of ``now``.
        """
        self._meta = meta
        self._config = config
        self._stats = stats
        self._clock = clock
        self._patience = Patience(backoff_s=config.directory_backoff_s)
        self._wave = LocateWave(self._ask_all)
        self._grants: dict[tuple[str, str, str, bytes], tuple[float, NamespaceGrant]] = {}
        self._own_secret = secrets.token_bytes(32)

    async def locate(
        self, request: GenerateRequest, layout: BlockLayout | None, *, reserve_s: float = 0.0
    ) -> LocateReply:
        """Locate the prompt's blocks; any failure means no hits."""
        if layout is None or not self._may_ask():
            return NOTHING_FOUND
        keys = block_keys(
            request.namespace_key, request.token_ids, block_tokens=layout.block_tokens
        )
        return await self.find(keys, reserve_s=reserve_s)

    async def find(self, keys: Sequence[BlockKey], *, reserve_s: float = 0.0) -> LocateReply:
        """Locate and reserve a chain for ``reserve_s``; any failure means no hits."""
        if self._meta is None or not self._may_ask():
            return NOTHING_FOUND
        self._stats.located += 1
        return await self._wave.find(keys[: limits.MAX_CHAIN_BLOCKS], reserve_s=reserve_s)

    async def _ask_all(
        self, chains: list[Sequence[BlockKey]], reserve_s: float
    ) -> list[LocateReply]:
        """Locate several chains in one question."""
        nothing = [NOTHING_FOUND] * len(chains)
        if self._meta is None or not chains or not self._may_ask():
            return nothing
        question = self._meta.locate_many(chains, reserve_s=reserve_s)
        replies = await self._ask(question, timeout_s=self._config.locate_timeout_s)
        return nothing if replies is None else replies

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool:
        """Extend a lease; return False for an ended lease or without an answer."""
        if self._meta is None or lease == NO_LEASE or not self._may_ask():
            return False
        question = self._meta.extend_lease(lease, ttl_s=ttl_s)
        return await self._tell(question)

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        """End a lease; return False for an ended lease or without an answer: it then expires."""
        if self._meta is None or lease == NO_LEASE or not self._may_ask():
            return False
        question = self._meta.end_lease(lease, used=used)
        return await self._tell(question)

    async def _tell(self, question: Awaitable[bool]) -> bool:
        """Send a question that delays no request; a late answer does not change the back-off."""
        try:
            async with asyncio.timeout(self._config.locate_timeout_s):
                return await question
        except TimeoutError:
            self._stats.cache_errors["directory_unavailable"] += 1
        except CacheError as error:
            self._stats.cache_errors[error.code] += 1
        return False

    def _may_ask(self) -> bool:
        return self._meta is not None and self._patience.may_ask(self._clock.now())

    async def _ask(self, question: Awaitable[_Answer], *, timeout_s: float) -> _Answer | None:
        """Wait for an answer; a failure or a timeout is counted and returns None."""
        self._patience.ask()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await question
        except TimeoutError:
            self._failed("directory_unavailable")
        except CacheError as error:
            self._failed(error.code)
        except BaseException:
            self._patience.gave_up()
            raise
        else:
            self._patience.answered()
            return answer
        return None

    async def namespace(self, tenant: str, model: ModelInfo) -> NamespaceGrant:
        """Return the hash key of a tenant's blocks of a model (cached).

        While the directory is away an expired grant stays valid. A tenant never seen before then
        gets a key known only to this process, so the tenant shares KV with no other tenant by
        mistake.
        """
        fingerprint = model.layout.fingerprint()
        key = (tenant, model.name, model.revision, fingerprint)
        cached = self._grants.get(key)
        now = self._clock.now()
        if cached is not None and now < cached[0]:
            return cached[1]
        if self._meta is not None and self._may_ask():
            question = self._meta.resolve_namespace(
                tenant,
                model_revision=model.revision,
                layout_fingerprint=fingerprint,
                model=model.name,
            )
            # With a cached grant the wait for a new grant is short.
            wait_s = RESOLVE_TIMEOUT_S if cached is None else self._config.locate_timeout_s
            grant = await self._ask(question, timeout_s=wait_s)
            if grant is not None:
                if len(self._grants) >= limits.MAX_NODES:
                    self._grants.clear()
                self._grants[key] = (now + self._config.namespace_ttl_s, grant)
                return grant
        return cached[1] if cached is not None else self._own_grant(tenant, model)

    def namespaces_changed(self) -> None:
        """Ask for every grant again before its next use; without an answer the old one stays."""
        self._grants = {key: (0.0, grant) for key, (_, grant) in self._grants.items()}

    def _own_grant(self, tenant: str, model: ModelInfo) -> NamespaceGrant:
        key = namespace_key(
            self._own_secret,
            tenant=tenant,
            model_revision=model.revision,
            layout_fingerprint=model.layout.fingerprint(),
        )
        return NamespaceGrant(key, domain=tenant, cache_enabled=True)

    def _failed(self, kind: str) -> None:
        self._stats.cache_errors[kind] += 1
        self._patience.failed(self._clock.now())

"""A compute node that delegates to a foreign engine: gRPC in (compute/service.py), HTTP out.

The node is in the cluster during each life of the engine. The keeper
(integrations/remote/keeper.py) begins and ends lives. The node computes nothing, keeps no KV and
never imports torch. Belongs to one event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from tierkv.costing.fit import EnginePace
from tierkv.costing.service_time import tell_cost
from tierkv.integrations.keys import TenantSalt, identity_digest, uncached_salt
from tierkv.integrations.remote.answering import Answering, hands_over, may_continue
from tierkv.integrations.remote.door import EngineDoor, EngineLook, EngineRequest, RemoteConfig
from tierkv.kvcore import limits
from tierkv.kvcore.block import Erased, Tier
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import (
    ContextTooLongError,
    FeatureNotSupportedError,
    NodeLostError,
    OverloadedError,
    TransportError,
    UnknownModelError,
    UserError,
)
from tierkv.kvcore.ids import BlockKey, Incarnation, NamespaceKey, RequestId
from tierkv.kvcore.node import (
    ModelInfo,
    NodeInfo,
    NodeLoad,
    NodeReport,
    NodeRole,
    PathReport,
    TierStats,
)
from tierkv.kvcore.request import GenerateEvent, GenerateRequest, PromptBlocks


class L1Book(Protocol):
    """The known content of the engine's own cache (integrations/events/feed.py)."""

    @property
    def wants_full_report(self) -> bool: ...

    def learn_tenant(self, namespace: NamespaceKey, tenant: str) -> None: ...

    def claimed_tokens(self, namespace: NamespaceKey, token_ids: Sequence[int]) -> int: ...

    def note_usage(self, *, claimed_tokens: int, cached_tokens: int) -> None: ...

    def errors(self) -> dict[str, int]: ...

    def paths(self) -> tuple[PathReport, ...]: ...

    def notes(self) -> tuple[str, ...]: ...


@dataclass(slots=True, eq=False)
class Life:
    """The time from one start of the engine to the end of the engine.

    Attributes:
        incarnation: the node's incarnation during the life.
        model: the engine's model.
        look: the engine's last description of itself.
        book: the known content of the engine's cache; None: never known.
        pace: the engine's speed.
        running: running requests, by number.
    """

    incarnation: Incarnation
    model: ModelInfo
    look: EngineLook
    book: L1Book | None = None
    pace: EnginePace = field(default_factory=EnginePace)
    running: dict[int, Answering] = field(default_factory=dict)


class RemoteNode:
    """Implements tierkv.compute.service.ServedNode over an engine.

    Attributes:
        config: the node's settings.
        life: the engine's current life; None while the engine is down.
    """

    def __init__(
        self, config: RemoteConfig, door: EngineDoor, *, clock: Clock | None = None
    ) -> None:
        """Create a node that refuses everything until ``begin_life``."""
        self.config = config
        self.life: Life | None = None
        self._door = door
        self._clock = clock or SystemClock()
        self._control_address = ""
        self._numbers = 0
        self._lost_requests = 0

    # -- lives

    def begin_life(self, life: Life) -> None:
        """Accept requests from now on."""
        assert self.life is None, "the life before has not ended"
        self.life = life

    def end_life(self, why: str) -> None:
        """Fail the running requests and refuse new ones."""
        life, self.life = self.life, None
        for answering in life.running.values() if life is not None else ():
            self._lost_requests += 1
            answering.lose(why)

    def set_control_address(self, address: str) -> None:
        """Set the address of the node's gRPC service, once known."""
        self._control_address = address

    # -- requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Answer a request; closing the iterator early also aborts the request in the engine.

        Raises:
            UserError: the request can't work; refused by the node or the engine.
            OverloadedError: the node or the engine has too many requests.
            TransportError: the engine is unreachable or was lost.
        """
        life = self._living()
        self._check(request, life)
        self._numbers += 1
        number = self._numbers
        answering = Answering(
            self._ask(request, life),
            self._door,
            node_id=self.config.node_id,
            ends=life.model.eos_token_ids,
            clock=self._clock,
            alone=not life.running and not life.look.figures.running,
        )
        answering.claimed_tokens = self._claimed(request, life)
        life.running[number] = answering
        try:
            async with aclosing(answering.events()) as events:
                async for event in events:
                    if event.finish_reason is not None:
                        self._learn(answering, life)
                    yield event
        finally:
            life.running.pop(number, None)

    async def cancel(self, request_id: RequestId) -> bool:
        """End a request as CANCELLED; False if the request is unknown."""
        running = self.life.running.values() if self.life is not None else ()
        found = [a for a in running if a.ask.request.request_id == request_id]
        for answering in found:
            answering.cancel()
        return bool(found)

    async def prefetch(self, request: GenerateRequest) -> int:
        """Load nothing ahead: no engine accepts a prefetch over HTTP."""
        self._check(request, self._living())
        return 0

    async def drop_cache(self) -> int:
        """Drop nothing: the cache belongs to the engine."""
        return 0

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks:
        """Name no blocks: their keys are the engine's."""
        return PromptBlocks()

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]:
        """Refuse: the cache belongs to the engine."""
        raise FeatureNotSupportedError(
            f"the engine behind {self.config.node_id} has a cache of its own, which TierKV can't "
            "erase",
            hint="Use the engine's own call, such as POST /reset_prefix_cache of vLLM.",
        )

    def _living(self) -> Life:
        if self.life is None:
            raise TransportError(
                f"{self.config.node_id}: the engine at {self.config.url} does not answer"
            )
        return self.life

    def _check(self, request: GenerateRequest, life: Life) -> None:
        """Refuse an impossible request before any cost; the engine checks the rest."""
        model = life.model
        if request.model != model.name:
            raise UnknownModelError(
                f"node {self.config.node_id} serves {model.name!r}, not {request.model!r}"
            )
        if request.prepared_for not in ("", model.identity):
            raise TransportError(
                f"node {self.config.node_id} serves other weights or another KV layout of "
                f"{request.model!r} than the request was prepared for"
            )
        if not request.token_ids:
            raise UserError("the prompt has no tokens")
        if not 0 <= request.resumed_tokens < len(request.token_ids):
            raise UserError("resumed_tokens must leave at least one prompt token")
        if request.resumed_tokens and not may_continue(request):
            # For the engine these tokens belong to the prompt: JSON would begin again.
            raise NodeLostError(
                f"{self.config.node_id} can't continue JSON, or an answer with penalties, that "
                "another node began",
                hint="Send the request again.",
            )
        refused = request.sampling.refused_by(model.sampling_fields)
        if refused:
            raise FeatureNotSupportedError(
                f"model {model.name} does not take {refused}", hint=f"Leave {refused} out."
            )
        for asked, refusal in (
            (request.embed, model.embed_refusal),
            (bool(request.score_token_ids), model.score_refusal),
            (request.guide.startswith("%"), model.grammar_refusal),
        ):
            if asked and refusal:
                raise FeatureNotSupportedError(
                    f"model {model.name} can't do this: {refusal}", hint="Name another model."
                )
        wanted = len(request.token_ids) + self._new_tokens(request)
        if wanted > model.context_tokens:
            raise ContextTooLongError(
                f"{len(request.token_ids)} prompt tokens and {self._new_tokens(request)} new ones "
                f"exceed the context of {model.context_tokens} tokens",
                hint="Shorten the prompt or lower max_tokens.",
            )
        if len(life.running) >= self.config.max_requests:
            raise OverloadedError(
                f"node {self.config.node_id} already has {len(life.running)} requests"
            )

    def _new_tokens(self, request: GenerateRequest) -> int:
        if request.reads_out:
            return 0
        left = max(1, request.sampling.max_tokens - request.resumed_tokens)
        return 1 if hands_over(request) else left

    def _ask(self, request: GenerateRequest, life: Life) -> EngineRequest:
        model = life.model
        new_tokens = self._new_tokens(request)
        # A request that fills the context had no limit: the front then asks for all the room left.
        unbounded = len(request.token_ids) + new_tokens >= model.context_tokens
        goes_on = request.resumed_tokens and self.config.role is NodeRole.DECODE
        block_tokens = model.layout.block_tokens
        before = len(request.token_ids) - request.resumed_tokens
        return EngineRequest(
            request=request,
            served=life.look.served,
            salt=_salt(request, model),
            max_tokens=0 if self._door.speaks_text and unbounded else new_tokens,
            promised_blocks=before // block_tokens if goes_on else 0,
            block_tokens=block_tokens,
            full_report=life.book is not None and life.book.wants_full_report,
        )

    def _claimed(self, request: GenerateRequest, life: Life) -> int:
        if life.book is None or not request.use_cache:
            return 0
        life.book.learn_tenant(request.namespace_key, request.tenant)
        return life.book.claimed_tokens(request.namespace_key, request.token_ids)

    def _learn(self, answering: Answering, life: Life) -> None:
        """Learn the engine's speed and cache hits from a finished answer."""
        counts = answering.counts
        if counts is None:
            return
        if life.book is not None and answering.ask.request.use_cache:
            life.book.note_usage(
                claimed_tokens=answering.claimed_tokens, cached_tokens=counts.hits.total
            )
        if answering.alone and answering.first_s >= 0.0:
            seconds = answering.first_s - answering.arrival_s
            tokens = len(answering.ask.request.token_ids)
            cached = 0 if self._door.speaks_text else counts.hits.total
            life.pace.first_token(tokens, cached, seconds)
        if answering.tokens > 1:
            life.pace.decode_rate.add(answering.tokens - 1, answering.ended_s - answering.first_s)

    # -- reports

    def info(self) -> NodeInfo:
        """Describe the node for its registration."""
        life = self.life
        capacity = 0 if life is None else life.look.blocks * life.model.layout.payload_bytes
        return NodeInfo(
            node_id=self.config.node_id,
            incarnation=Incarnation(0) if life is None else life.incarnation,
            role=self.config.role,
            host=self.config.host,
            zone=self.config.zone,
            control_address=self._control_address,
            capacity_bytes=capacity,
            models=() if life is None else (life.model,),
        )

    def report(self) -> NodeReport:
        """Report the engine's load and the counters of the engine's cache."""
        life = self.life
        if life is None:
            return NodeReport(notes=(f"the engine at {self.config.url} does not answer",))
        version = f" {life.look.version}" if life.look.version else ""
        reason = f"{self.config.kind}{version} at {self.config.url}"[: limits.MAX_REASON_CHARS]
        book = life.book
        errors = {} if book is None else book.errors()
        return NodeReport(
            load=self._load(life),
            tiers=(_cache_stats(life),),
            cache_errors=tuple(sorted((kind, n) for kind, n in errors.items() if n)),
            transfer_errors=self._lost_requests,
            paths=(PathReport("", "http", reason), *(() if book is None else book.paths())),
            notes=() if book is None else book.notes(),
        )

    def _load(self, life: Life) -> NodeLoad:
        running, figures, pace = life.running.values(), life.look.figures, life.pace
        rate = pace.decode_rate.value
        return replace(
            tell_cost(pace.prefill.cost),
            requests_running=max(figures.running, len(running) - figures.waiting, 0),
            requests_waiting=figures.waiting,
            waiting_prefill_tokens=sum(a.uncomputed_tokens for a in running),
            kv_usage=figures.kv_usage,
            prefill_tokens_per_s=pace.prefill_rate.value,
            decode_tokens_per_s=rate,
            decode_step_s=1 / rate if rate else 0.0,
            decodes_running=sum(a.first_s >= 0.0 for a in running),
        )


def _salt(request: GenerateRequest, model: ModelInfo) -> str:
    """Return the salt of a tenant; a request without cache use gets a unique salt."""
    if not request.use_cache:
        return uncached_salt(secrets.token_hex(16))
    return str(TenantSalt(request.namespace_key, identity_digest(model.identity)))


def _cache_stats(life: Life) -> TierStats:
    figures, layout = life.look.figures, life.model.layout
    capacity = life.look.blocks * layout.payload_bytes
    return TierStats(
        tier=Tier.L1,
        medium="engine cache",
        model=life.model.name,
        capacity_bytes=capacity,
        used_bytes=int(figures.kv_usage * capacity),
        blocks_total=life.look.blocks,
        blocks_used=int(figures.kv_usage * life.look.blocks),
        query_tokens=figures.query_tokens,
        hit_tokens=figures.hit_tokens,
    )

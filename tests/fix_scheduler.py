"""A deterministic compute node for tests of the scheduler and the front.

FakeCompute passes tests/contract/test_compute_client.py, the suite that real nodes pass too. Its
next token depends on all tokens before it, so a lost or doubled token changes all that follow.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from hashlib import blake2b

from tierkv.kvcore.block import Erased
from tierkv.kvcore.errors import (
    FeatureNotSupportedError,
    OverloadedError,
    TransportError,
    UnknownModelError,
)
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NamespaceKey, NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole
from tierkv.kvcore.request import (
    OPTIONAL_FIELDS,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    HitTokens,
    PromptBlocks,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from tierkv.scheduler.plans.plan_tree import PrefixTree, build_tree

LAYOUT = BlockLayout(layers=2, kv_heads=1, head_dim=8, dtype=KvDtype.FLOAT32, block_tokens=16)
EOS = 1
NAMESPACE = NamespaceKey(bytes(32))


def make_model(name: str = "tiny", **changes: object) -> ModelInfo:
    model = ModelInfo(
        name=name,
        folder="",
        revision="r1",
        layout=LAYOUT,
        context_tokens=4_096,
        eos_token_ids=(EOS,),
        architecture="LlamaForCausalLM",
        parameters=1_000,
        sampling_fields=OPTIONAL_FIELDS,
    )
    return replace(model, **changes)  # type: ignore[arg-type]


def make_info(node_id: str = "c1", **changes: object) -> NodeInfo:
    info = NodeInfo(
        node_id=NodeId(node_id),
        incarnation=Incarnation(1),
        role=NodeRole.COMPUTE,
        host=HostId("h1"),
        models=(make_model(),),
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def make_request(request_id: str = "q1", **changes: object) -> GenerateRequest:
    request = GenerateRequest(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=tuple(range(40, 80)),
        namespace_key=NAMESPACE,
        sampling=SamplingParams(max_tokens=12),
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def tree_of(
    texts: Sequence[Sequence[int]],
    block_tokens: int = 2,
    *,
    tenants: Sequence[bytes] = (),
    shares: Sequence[bool] = (),
) -> PrefixTree:
    """Build the tree of prompts, by default of one tenant and with the cache on."""
    prompts = [make_request(token_ids=tuple(text)) for text in texts]
    for at, tenant in enumerate(tenants):
        prompts[at] = replace(prompts[at], namespace_key=NamespaceKey(tenant))
    for at, uses in enumerate(shares):
        prompts[at] = replace(prompts[at], use_cache=uses)
    return build_tree(prompts, [block_tokens] * len(prompts))


def next_token(tokens: Sequence[int], sampling: SamplingParams, vocabulary: Sequence[int]) -> int:
    """Any function of everything before it, and of the seed when sampling."""
    salt = f"{sampling.seed}" if sampling.temperature else ""
    text = ",".join(map(str, tokens)) + salt
    value = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    if value % 29 == 0 and not sampling.ignore_eos:
        return EOS
    return vocabulary[(value // 29) % len(vocabulary)]


def chances(tokens: Sequence[int]) -> list[float]:
    """A distribution over 300 tokens, some function of everything before them."""
    text = ",".join(map(str, tokens))
    draw = random.Random(text)
    weights = [draw.random() ** 8 for _ in range(300)]
    total = sum(weights)
    return [weight / total for weight in weights]


def fake_logprobs(token: int, top: int | None) -> tuple[TokenLogprobs, ...]:
    """What a FakeCompute says of a token: a number that only this token has."""
    if top is None:
        return ()
    return (TokenLogprobs(-token / 64, tuple((token + i, -(token + i) / 64) for i in range(top))),)


class FakeCompute:
    """One node, in this process, that answers at once.

    Attributes:
        die_after: the stream of the next requests breaks after so many tokens; None is healthy.
        stays_dead: once it broke, it is dead for good (``dead``), as a killed process.
        gate: answering waits for it before each token; set by default.
        queue_limit: more requests than that are refused.
        seen: every request that came in.
        prefetched: every prompt that was to be loaded ahead.
        progress: ``published_tokens`` a handoff tells before its token.
        running: ids being answered now.
        cancelled: ids whose stream was closed or cancelled early.
    """

    def __init__(self, info: NodeInfo | None = None, *, vocabulary: Sequence[int] = ()) -> None:
        self.info = info or make_info()
        self.vocabulary = tuple(vocabulary) or tuple(range(2, 200))
        self.die_after: int | None = None
        self.dead = False
        self.stays_dead = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.queue_limit = 1_000_000
        self.load = NodeLoad()
        self.hits = HitTokens()
        self.seen: list[GenerateRequest] = []
        self.running: set[RequestId] = set()
        self.cancelled: list[RequestId] = []
        self.prefetched: list[GenerateRequest] = []
        self.progress: list[int] = []
        self.closed = False
        self._asked_to_stop: set[RequestId] = set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        if self.dead or self.closed:
            raise TransportError(f"{self.info.node_id} is dead")
        if request.model not in {model.name for model in self.info.models}:
            raise UnknownModelError(request.model)
        if len(self.running) >= self.queue_limit:
            raise OverloadedError("queue full")
        self.seen.append(request)
        self.running.add(request.request_id)
        ended = False
        try:
            tokens = list(request.token_ids)
            done = request.resumed_tokens
            sent = 0
            if request.reads_out:
                await self.gate.wait()
                ended = True
                yield self._read_out(request)
                return
            for tokens_so_far in self.progress if request.handoff else ():
                yield GenerateEvent(node_id=self.info.node_id, published_tokens=tokens_so_far)
                await asyncio.sleep(0)
            while True:
                await self.gate.wait()
                if self.dead or (self.die_after is not None and sent >= self.die_after):
                    ended = True
                    self.dead = self.dead or self.stays_dead
                    raise TransportError(f"{self.info.node_id} died")
                reason = None
                if request.request_id in self._asked_to_stop:
                    reason = FinishReason.CANCELLED
                elif done >= request.sampling.max_tokens:
                    reason = FinishReason.LENGTH
                else:
                    token = next_token(tokens, request.sampling, self.vocabulary)
                    if token == EOS or token in request.sampling.stop_token_ids:
                        reason = FinishReason.STOP
                if reason is None:
                    tokens.append(token)
                    done, sent = done + 1, sent + 1
                    if request.handoff and done < request.sampling.max_tokens:
                        reason = FinishReason.HANDOFF
                    told = fake_logprobs(token, request.sampling.logprobs)
                    yield GenerateEvent((token,), node_id=self.info.node_id, logprobs=told)
                    await asyncio.sleep(0)
                if reason is not None:
                    ended = True
                    yield self._last(request, reason, done)
                    return
        finally:
            self.running.discard(request.request_id)
            self._asked_to_stop.discard(request.request_id)
            if not ended:
                self.cancelled.append(request.request_id)

    def _read_out(self, request: GenerateRequest) -> GenerateEvent:
        last = self._last(request, FinishReason.STOP, 0)
        if request.embed:
            return replace(last, embedding=(0.6, 0.8))
        table = chances(request.token_ids)
        return replace(last, scores=tuple(math.log(table[i]) for i in request.score_token_ids))

    def _last(self, request: GenerateRequest, reason: FinishReason, done: int) -> GenerateEvent:
        prompt = len(request.token_ids) - request.resumed_tokens
        hits = self.hits if request.use_cache else HitTokens()
        return GenerateEvent(
            finish_reason=reason,
            usage=Usage(prompt, done, hits, written_tokens=prompt - prompt % 16),
            node_id=self.info.node_id,
            queue_s=0.001,
            ttft_s=0.002,
        )

    async def cancel(self, request_id: RequestId) -> bool:
        if request_id not in self.running:
            return False
        self._asked_to_stop.add(request_id)
        return True

    async def describe(self) -> tuple[NodeInfo, NodeReport]:
        if self.dead or self.closed:
            raise TransportError("dead")
        return self.info, NodeReport(load=self.load)

    async def drop_cache(self) -> int:
        return 0

    async def prefetch(self, request: GenerateRequest) -> int:
        if self.dead or self.closed:
            raise TransportError("dead")
        self.prefetched.append(request)
        return len(request.token_ids) - 1

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks:
        return PromptBlocks()

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]:
        raise FeatureNotSupportedError("it has a cache of its own")

    async def close(self) -> None:
        self.closed = True

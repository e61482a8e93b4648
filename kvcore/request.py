"""A generation request and its events, for every room; and the permissions of a namespace.

The front makes requests out of SQL calls and HTTP bodies, the scheduler routes requests, and a
compute node answers with a stream of events. Only the front knows text; requests carry token ids. A
namespace permits exact reuse always; lossy KV codecs and blending are off by default. The meta
server stores this policy durably and grants the policy with the namespace key; the front applies
the policy to each request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.ids import BlockKey, NamespaceKey, RequestId
from tierkv.kvcore.layout import KvCodec


class FinishReason(StrEnum):
    """Why a request ended; values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    HANDOFF = "handoff"


OPTIONAL_FIELDS: Final = (
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "logprobs",
)
"""Fields of SamplingParams that not every engine takes; see ``ModelInfo.sampling_fields``."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    The logits of a token are changed in this order: ``logit_bias``, ``repetition_penalty``,
    ``frequency_penalty``, ``presence_penalty``. The temperature divides the result; ``min_p``,
    ``top_k`` and ``top_p`` then limit the draw, each within what the one before has left. Greedy
    answers take the most likely token after the changes.

    Attributes:
        temperature: 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        max_tokens: maximum number of completion tokens.
        stop_token_ids: additional ids that end the answer, besides the model's eos ids.
        seed: makes sampling repeatable; None draws a random seed.
        ignore_eos: continue after an eos token (benchmarks).
        top_k: draw among this many most likely tokens; 0: among all.
        min_p: least probability of a token, as a share of the most likely token's, in [0, 1].
        presence_penalty: subtracted from the logit of each generated token, in [-2, 2].
        frequency_penalty: subtracted for each time that a token was generated, in [-2, 2].
        repetition_penalty: divides positive logits of tokens in prompt and answer, and multiplies
            negative ones; in (0, 2].
        logit_bias: token ids, ascending, with the number added to their logit.
        min_tokens: no eos or stop token comes before this many completion tokens.
        logprobs: number of alternatives to report with each token's log-probability; None: no
            report.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 1 <= self.max_tokens <= limits.MAX_COMPLETION_TOKENS:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.shapes or self.logprobs is not None:  # Most requests skip the rest.
            self._check_shape()

    def _check_shape(self) -> None:
        if not 0 <= self.top_k <= limits.MAX_TOP_K:
            raise ValueError(f"top_k must be -1, 0 or a number of tokens, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        most = limits.MAX_PENALTY
        for name in ("presence_penalty", "frequency_penalty"):
            if not -most <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if not 0.0 < self.repetition_penalty <= most:
            raise ValueError(f"repetition_penalty must be in (0, 2], got {self.repetition_penalty}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}"
            )
        if len(self.logit_bias) > limits.MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias has more than {limits.MAX_BIASED_TOKENS} tokens")
        ids = [token for token, _ in self.logit_bias]
        if any(one >= after for one, after in pairwise(ids)):
            raise ValueError("logit_bias must name each token once, in ascending order")
        if not all(abs(bias) <= limits.MAX_LOGIT_BIAS for _, bias in self.logit_bias):
            raise ValueError(f"logit_bias must be in [-100, 100], got {dict(self.logit_bias)}")
        if self.logprobs is not None and not 0 <= self.logprobs <= limits.MAX_TOP_LOGPROBS:
            raise ValueError(
                f"top_logprobs must be in [0, {limits.MAX_TOP_LOGPROBS}], got {self.logprobs}"
            )

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before a token is chosen, also for greedy answers."""
        return bool(self.logit_bias or self.min_tokens) or self.penalizes

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        repeats = self.repetition_penalty != 1.0
        return repeats or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def shapes(self) -> bool:
        """Whether anything but temperature and ``top_p`` shapes the distribution."""
        return self.edits_logits or self.top_k != 0 or self.min_p != 0.0

    def refused_by(self, sampling_fields: tuple[str, ...]) -> str:
        """Return the first field in use that is not among those; empty if there is none."""
        if not self.shapes and self.logprobs is None:
            return ""
        used = (name for name in OPTIONAL_FIELDS if getattr(self, name) != getattr(_PLAIN, name))
        return next((name for name in used if name not in sampling_fields), "")

    @property
    def counts_answer(self) -> bool:
        """Whether a logit depends on which of the tokens before it were generated.

        An engine that takes a resumed answer for a prompt can't continue such an answer.
        """
        return bool(self.presence_penalty or self.frequency_penalty)


_PLAIN: Final = SamplingParams()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one chosen token, and of the most likely tokens in its place.

    Natural logs of the model's own distribution: logits are not changed, the temperature is 1.

    Attributes:
        logprob: of the chosen token.
        top: the most likely token ids and their log-probabilities, best first; as many as asked.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class BlendSelector(StrEnum):
    """Selection of the reused chunk tokens to recompute (compute/blend/plan.py).

    ``hkvd``: tokens whose keys and values deviate most from fresh ones at the check layer
    (CacheBlend, arXiv 2405.16444). ``query``: tokens that the question attends to most (InfoFlow
    KV, arXiv 2603.05353). ``boundary``: the first tokens of each chunk (EPIC, arXiv 2410.15332).
    """

    HKVD = "hkvd"
    QUERY = "query"
    BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True)
class Blend:
    """Permits reuse of a prompt's chunks at any position; the answer is then approximate.

    Attributes:
        chunks: half-open token ranges ``(start, stop)``, ordered and disjoint. The tokens before
            the first chunk are the isolation prefix: the context that every chunk is computed
            after.
        recompute_ratio: minimum share of reused tokens to compute again; 1.0 is exact.
        selector: selects the tokens to compute again.
        gradual: with ``hkvd``, choose more at the check layer and fewer on later layers, as in the
            paper; gives more right answers for the same work (docs/quality.md).
    """

    chunks: tuple[tuple[int, int], ...]
    recompute_ratio: float = 0.15
    selector: BlendSelector = BlendSelector.HKVD
    gradual: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.recompute_ratio <= 1.0:
            raise ValueError(f"recompute_ratio must be in (0, 1], got {self.recompute_ratio}")
        if len(self.chunks) > limits.MAX_CHUNKS:
            raise ValueError(f"{len(self.chunks)} chunks exceed the limit of {limits.MAX_CHUNKS}")
        at = 0
        for start, stop in self.chunks:
            if not at <= start < stop:
                raise ValueError(f"chunk [{start}, {stop}) is empty or overlaps the one before")
            at = stop


@dataclass(frozen=True, slots=True)
class ReuseHint:
    """The known future of one prompt and its answer.

    Made by the front (from a session's client or a statement's plan), carried with the request,
    used by eviction (policies/). A hint changes the order of eviction, never an answer.

    Attributes:
        next_turn: True if the session continues after this answer (an agent's step, a tool call),
            False if this was the last turn, None if unknown.
        next_turn_s: expected seconds until the next turn; None if unknown.
        pending_calls: pending calls of the same statement that share a prefix.
        pending_tokens: leading tokens of the prompt that those calls share. The remaining tokens
            belong to this call alone.
    """

    next_turn: bool | None = None
    next_turn_s: float | None = None
    pending_calls: int = 0
    pending_tokens: int = 0

    def __post_init__(self) -> None:
        if self.next_turn_s is not None and not 0.0 <= self.next_turn_s < float("inf"):
            raise ValueError(f"next_turn_s must be finite and not negative, got {self.next_turn_s}")
        if self.pending_calls < 0 or self.pending_tokens < 0:
            raise ValueError("pending calls and tokens can't be negative")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt as token ids, with all parameters that a node needs to answer.

    Attributes:
        request_id: unique id, also used to cancel.
        model: the served model's name.
        token_ids: the whole prompt, never empty.
        namespace_key: key of the block hashes; tenants never share.
        tenant: account that pays for the request.
        sampling: see SamplingParams.
        session_id: conversation, for affinity; None without one.
        priority: lower runs earlier.
        use_cache: False neither reads nor publishes KV (the oracle in tests and benchmarks).
        handoff: prefill only: publish every full block, emit the first token, finish with HANDOFF.
        resumed_tokens: trailing ``token_ids`` that were generated before this request was sent
            (again); they count as completion, not prompt, and against ``max_tokens``.
        blend: permits approximate reuse of chunks; None keeps the answer exact.
        kv_codec: the namespace's encoding of KV below L1; None means the node's own codec. If set,
            it is part of ``namespace_key``.
        prepared_for: ``ModelInfo.identity`` of the weights and KV layout behind ``namespace_key``.
            A node with another identity refuses the request. Empty: not checked.
        hint: expected reuse of the request's KV; None if unknown.
        guide: JSON Schema that constrains the answer token by token; empty for free text.
        score_token_ids: tokens whose log-probability as the next token is the answer; the request
            then generates no token.
        embed: the answer is the normalised hidden state of the last token.
    """

    request_id: RequestId
    model: str
    token_ids: tuple[int, ...]
    namespace_key: NamespaceKey
    tenant: str = "default"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    session_id: str | None = None
    priority: int = 0
    use_cache: bool = True
    handoff: bool = False
    resumed_tokens: int = 0
    blend: Blend | None = None
    kv_codec: KvCodec | None = None
    prepared_for: str = ""
    hint: ReuseHint | None = None
    guide: str = ""
    score_token_ids: tuple[int, ...] = ()
    embed: bool = False

    def with_hint(self, hint: ReuseHint) -> GenerateRequest:
        """Return the same request with another hint.

        Written out: ``dataclasses.replace`` takes three times as long, for every call of a plan.
        """
        return GenerateRequest(
            self.request_id,
            self.model,
            self.token_ids,
            self.namespace_key,
            self.tenant,
            self.sampling,
            self.session_id,
            self.priority,
            self.use_cache,
            self.handoff,
            self.resumed_tokens,
            self.blend,
            self.kv_codec,
            self.prepared_for,
            hint,
            self.guide,
            self.score_token_ids,
            self.embed,
        )

    @property
    def reads_out(self) -> bool:
        """Whether the request asks about its prompt instead of generating tokens."""
        return self.embed or bool(self.score_token_ids)


_KEPT_PART = 16
_LEAST_PLACES = 8


def places_for(places: int, *, urgent: bool) -> int:
    """Return how many of a batch's places may be taken when a request enters.

    Bulk leaves a sixteenth of the places free. An urgent request then enters a full batch at once,
    not after the next answer. Bulk may take all places of a batch with fewer than 8.

    Args:
        places: requests in a full batch.
        urgent: a user waits for the request; False for bulk, whose priority is above 0.
    """
    if urgent or places < _LEAST_PLACES:
        return places
    return places - max(1, places // _KEPT_PART)


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Prompt tokens whose KV was not recomputed, by source tier."""

    l1: int = 0
    l2: int = 0
    l3: int = 0
    l4: int = 0

    @property
    def total(self) -> int:
        """All hit tokens."""
        return self.l1 + self.l2 + self.l3 + self.l4

    def __add__(self, other: HitTokens) -> HitTokens:
        if not other.total:  # Most answers of a cold statement.
            return self
        return HitTokens(
            self.l1 + other.l1, self.l2 + other.l2, self.l3 + other.l3, self.l4 + other.l4
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated.
        hit_tokens: prompt tokens loaded instead of computed.
        written_tokens: tokens whose KV was new to the pool.
        kv_codec: codec of reused KV; a lossy codec may change an answer.
        blended_tokens: hit tokens that came from chunks computed at other positions; any such token
            makes the answer approximate. Tokens computed again are not hit tokens.
        recomputed_tokens: reused tokens of chunks that were computed again.
        selector: the selector of the recomputed tokens; None without blending.
        counted_there: True if another engine received text and counted prompt and completion in its
            own tokens; the request's own tokens are then bytes of the text.
    """

    prompt_tokens: int
    completion_tokens: int
    hit_tokens: HitTokens = HitTokens()
    written_tokens: int = 0
    kv_codec: KvCodec = KvCodec.NONE
    blended_tokens: int = 0
    recomputed_tokens: int = 0
    selector: BlendSelector | None = None
    counted_there: bool = False


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """One step of an answer.

    Attributes:
        token_ids: new tokens since the last event (may be empty on the last one). The eos or stop
            token that ended the answer is left out.
        finish_reason: set on the last event only.
        usage: set on the last event only.
        node_id: the computing node.
        queue_s: seconds from arrival at the node to its first prefill step; last event only.
        ttft_s: seconds from arrival at the node to the first token; last event only.
        published_tokens: during a handoff, leading tokens whose KV is in the pool, so the decode
            node may load them early. An event with this field has no tokens and does not end the
            answer.
        scores: natural log of the probability (softmax over the whole vocabulary, temperature 1) of
            each of ``score_token_ids``, in their order; last event only.
        embedding: [hidden] of unit length if ``embed`` was set; last event only.
        logprobs: one for each of ``token_ids`` if the sampling asks for them, else empty.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    node_id: str = ""
    queue_s: float = 0.0
    ttft_s: float = 0.0
    published_tokens: int = 0
    scores: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """How far answers of a namespace may depart from full recomputation.

    Attributes:
        kv_codec: encoding of KV below L1; None means each node's own codec. A change renames the
            namespace's blocks, so blocks stored under the old codec are not found again.
        blend: whether callers may reuse chunks at any position.
        recompute_ratio: default share of a chunk's tokens that are computed again, in (0, 1]; a
            call may ask for a larger share only.
        selector: default selector of the tokens to compute again.
        gradual: see tierkv.kvcore.request.Blend.
    """

    kv_codec: KvCodec | None = None
    blend: bool = False
    recompute_ratio: float = 0.15
    selector: BlendSelector = BlendSelector.HKVD
    gradual: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.recompute_ratio <= 1.0:
            raise ValueError(f"recompute_ratio must be in (0, 1], got {self.recompute_ratio}")


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The blocks of a prompt that a node can name, for erasing them.

    Attributes:
        chain: the full blocks of the prompt, in order.
        ends: known blocks after the chain that begin with the rest of the prompt.
        others: known blocks after the chain that begin otherwise: blocks of other prompts.
        chunks: blocks of the prompt's chunks.
    """

    chain: tuple[BlockKey, ...] = ()
    ends: tuple[BlockKey, ...] = ()
    others: tuple[BlockKey, ...] = ()
    chunks: tuple[BlockKey, ...] = ()

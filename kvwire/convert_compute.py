"""Converts messages of kvwire/v1/compute.proto to tierkv.kvcore.request values and back.

Called by the service and the client of compute nodes. A fault of the user (sampling, an over-long
prompt) raises UserError; a fault of the peer raises RemoteProtocolError.
"""

from __future__ import annotations

import math

from tierkv.kvcore import limits
from tierkv.kvcore.block import Erased
from tierkv.kvcore.errors import ContextTooLongError, RemoteProtocolError, UserError
from tierkv.kvcore.ids import NAMESPACE_KEY_BYTES, NamespaceKey, RequestId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import (
    Blend,
    BlendSelector,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    HitTokens,
    PromptBlocks,
    ReuseHint,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from tierkv.kvwire.codec import (
    AMOUNT,
    MessageCodec,
    check_count,
    checked_amount,
    checked_choice,
    checked_name,
    checked_numbers,
    split_keys,
)
from tierkv.kvwire.convert import (
    NODE_INFO,
    NODE_REPORT,
    codec_from_proto,
    codec_to_proto,
)
from tierkv.kvwire.v1 import compute_pb2 as pb

_MAX_STOP_TOKEN_IDS = 1_024
_SEEDS = 1 << 64


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    """Convert a SamplingParams; UserError for a seed of more than 64 bits."""
    if sampling.seed is not None and not 0 <= sampling.seed < _SEEDS:
        raise UserError(f"seed must be in [0, 2^64), got {sampling.seed}")
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Convert a SamplingParams; UserError for a parameter out of range."""
    check_count(message.stop_token_ids, _MAX_STOP_TOKEN_IDS, "sampling.stop_token_ids")
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p,
            max_tokens=message.max_tokens,
            stop_token_ids=tuple(message.stop_token_ids),
            seed=message.seed if message.HasField("seed") else None,
            ignore_eos=message.ignore_eos,
            top_k=message.top_k,
            min_p=message.min_p,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty
            if message.HasField("repetition_penalty")
            else 1.0,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            min_tokens=message.min_tokens,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def blend_to_proto(blend: Blend) -> pb.Blend:
    """Convert a Blend."""
    return pb.Blend(
        chunk_bounds=[bound for chunk in blend.chunks for bound in chunk],
        recompute_ratio=blend.recompute_ratio,
        selector=blend.selector.value,
        gradual=blend.gradual,
    )


def blend_from_proto(message: pb.Blend) -> Blend:
    """Convert a Blend; UserError for a ratio out of range, or overlapping chunks."""
    bounds = message.chunk_bounds
    if len(bounds) % 2:
        raise RemoteProtocolError(f"blend.chunk_bounds has an odd number of bounds: {len(bounds)}")
    check_count(bounds, 2 * limits.MAX_CHUNKS, "blend.chunk_bounds")
    selector = checked_choice(BlendSelector, message.selector, "blend.selector")
    chunks = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    try:
        return Blend(chunks, message.recompute_ratio, selector, message.gradual)
    except ValueError as error:
        raise UserError(str(error)) from error


def hint_to_proto(hint: ReuseHint) -> pb.ReuseHint:
    """Convert a ReuseHint."""
    return pb.ReuseHint(
        next_turn=hint.next_turn,
        next_turn_s=hint.next_turn_s,
        pending_calls=hint.pending_calls,
        pending_tokens=hint.pending_tokens,
    )


def hint_from_proto(message: pb.ReuseHint) -> ReuseHint:
    """Convert a ReuseHint; UserError for a negative or infinite time."""
    try:
        return ReuseHint(
            next_turn=message.next_turn if message.HasField("next_turn") else None,
            next_turn_s=message.next_turn_s if message.HasField("next_turn_s") else None,
            pending_calls=message.pending_calls,
            pending_tokens=message.pending_tokens,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def _blend(message: pb.GenerateRequest) -> Blend | None:
    if not message.HasField("blend"):
        return None
    blend = blend_from_proto(message.blend)
    if blend.chunks and blend.chunks[-1][1] > len(message.token_ids):
        raise UserError(
            f"chunk {blend.chunks[-1]} ends behind the prompt of {len(message.token_ids)} tokens"
        )
    return blend


def generate_request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Convert a GenerateRequest; session_id None is sent as the empty string."""
    return pb.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        token_ids=request.token_ids,
        namespace_key=request.namespace_key,
        tenant=request.tenant,
        sampling=sampling_to_proto(request.sampling),
        session_id=request.session_id or "",
        priority=request.priority,
        use_cache=request.use_cache,
        handoff=request.handoff,
        resumed_tokens=request.resumed_tokens,
        blend=None if request.blend is None else blend_to_proto(request.blend),
        kv_codec="" if request.kv_codec is None else request.kv_codec.value,
        prepared_for=request.prepared_for,
        hint=None if request.hint is None else hint_to_proto(request.hint),
        guide=request.guide,
        score_token_ids=request.score_token_ids,
        embed=request.embed,
    )


def generate_request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Convert a GenerateRequest.

    Raises:
        UserError: an empty or over-long prompt, sampling parameters out of range, an over-long
            schema, or several kinds of answer at once.
        RemoteProtocolError: ids or keys never sent by a correct peer.
    """
    _check_prompt(message)
    _check_form(message)
    if len(message.namespace_key) != NAMESPACE_KEY_BYTES:
        raise RemoteProtocolError(
            f"namespace_key must have {NAMESPACE_KEY_BYTES} bytes, got {len(message.namespace_key)}"
        )
    return GenerateRequest(
        request_id=RequestId(checked_name(message.request_id, "request_id")),
        model=message.model,
        token_ids=tuple(message.token_ids),
        namespace_key=NamespaceKey(message.namespace_key),
        tenant=checked_name(message.tenant, "tenant"),
        sampling=sampling_from_proto(message.sampling),
        session_id=message.session_id or None,
        priority=message.priority,
        use_cache=message.use_cache,
        handoff=message.handoff,
        resumed_tokens=message.resumed_tokens,
        blend=_blend(message),
        kv_codec=checked_choice(KvCodec, message.kv_codec, "kv_codec")
        if message.kv_codec
        else None,
        prepared_for=checked_name(message.prepared_for, "prepared_for")
        if message.prepared_for
        else "",
        hint=hint_from_proto(message.hint) if message.HasField("hint") else None,
        guide=message.guide,
        score_token_ids=tuple(message.score_token_ids),
        embed=message.embed,
    )


def _check_form(message: pb.GenerateRequest) -> None:
    """Refuse a schema too long to compile, and a request for several kinds of answer."""
    if len(message.guide) > limits.MAX_SCHEMA_CHARS:
        raise UserError(
            f"the schema has {len(message.guide)} characters, the limit is "
            f"{limits.MAX_SCHEMA_CHARS}"
        )
    check_count(message.score_token_ids, limits.MAX_SCORED_TOKENS, "score_token_ids")
    if bool(message.guide) + bool(message.score_token_ids) + message.embed > 1:
        raise UserError("ask for one of JSON, token probabilities and an embedding")


def _check_prompt(message: pb.GenerateRequest) -> None:
    """Refuse empty and over-long prompts, and more resumed tokens than tokens."""
    count = len(message.token_ids)
    if count == 0:
        raise UserError("the prompt has no tokens; send at least one")
    if count > limits.MAX_CONTEXT_TOKENS:
        raise ContextTooLongError(
            f"the prompt has {count} tokens, more than any model's {limits.MAX_CONTEXT_TOKENS}"
        )
    if message.resumed_tokens > count:
        raise RemoteProtocolError(
            f"resumed_tokens {message.resumed_tokens} exceed the {count} tokens sent"
        )


def usage_to_proto(usage: Usage) -> pb.Usage:
    """Convert a Usage."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        l1_hit_tokens=usage.hit_tokens.l1,
        l2_hit_tokens=usage.hit_tokens.l2,
        l3_hit_tokens=usage.hit_tokens.l3,
        l4_hit_tokens=usage.hit_tokens.l4,
        written_tokens=usage.written_tokens,
        kv_codec=codec_to_proto(usage.kv_codec),
        blended_tokens=usage.blended_tokens,
        recomputed_tokens=usage.recomputed_tokens,
        selector="" if usage.selector is None else usage.selector.value,
        counted_there=usage.counted_there,
    )


def usage_from_proto(message: pb.Usage) -> Usage:
    """Convert a Usage; RemoteProtocolError for an unknown codec or selector."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        hit_tokens=HitTokens(
            l1=message.l1_hit_tokens,
            l2=message.l2_hit_tokens,
            l3=message.l3_hit_tokens,
            l4=message.l4_hit_tokens,
        ),
        written_tokens=message.written_tokens,
        kv_codec=codec_from_proto(message.kv_codec, "usage.kv_codec"),
        blended_tokens=message.blended_tokens,
        recomputed_tokens=message.recomputed_tokens,
        selector=checked_choice(BlendSelector, message.selector, "usage.selector")
        if message.selector
        else None,
        counted_there=message.counted_there,
    )


def generate_event_to_proto(event: GenerateEvent) -> pb.GenerateEvent:
    """Convert a GenerateEvent."""
    return pb.GenerateEvent(
        token_ids=event.token_ids,
        finish_reason="" if event.finish_reason is None else event.finish_reason.value,
        usage=None if event.usage is None else usage_to_proto(event.usage),
        node_id=event.node_id,
        queue_s=event.queue_s,
        ttft_s=event.ttft_s,
        published_tokens=event.published_tokens,
        scores=event.scores,
        embedding=event.embedding,
        logprobs=[
            pb.TokenLogprobs(
                logprob=one.logprob,
                top_token_ids=[token for token, _ in one.top],
                top_logprobs=[logprob for _, logprob in one.top],
            )
            for one in event.logprobs
        ],
    )


def generate_event_from_proto(message: pb.GenerateEvent) -> GenerateEvent:
    """Convert a GenerateEvent; RemoteProtocolError for an unknown reason or an invalid number."""
    reason = message.finish_reason
    return GenerateEvent(
        token_ids=tuple(message.token_ids),
        finish_reason=checked_choice(FinishReason, reason, "finish_reason") if reason else None,
        usage=usage_from_proto(message.usage) if message.HasField("usage") else None,
        node_id=message.node_id,
        queue_s=checked_amount(message.queue_s, "queue_s"),
        ttft_s=checked_amount(message.ttft_s, "ttft_s"),
        published_tokens=message.published_tokens,
        scores=checked_numbers(message.scores, limits.MAX_SCORED_TOKENS, "scores")
        if message.scores
        else (),
        embedding=checked_numbers(message.embedding, limits.MAX_HIDDEN, "embedding")
        if message.embedding
        else (),
        logprobs=_logprobs_from_proto(message) if message.logprobs else (),
    )


def _logprobs_from_proto(message: pb.GenerateEvent) -> tuple[TokenLogprobs, ...]:
    """Convert the log-probabilities of an event's tokens; RemoteProtocolError if they don't fit."""
    if len(message.logprobs) != len(message.token_ids):
        raise RemoteProtocolError("logprobs does not have an entry for each token")
    entries = []
    for one in message.logprobs:
        tops = checked_numbers(one.top_logprobs, limits.MAX_TOP_LOGPROBS, "logprobs.top")
        if len(tops) != len(one.top_token_ids) or not math.isfinite(one.logprob):
            raise RemoteProtocolError("logprobs has a token without a finite log-probability")
        entries.append(TokenLogprobs(one.logprob, tuple(zip(one.top_token_ids, tops, strict=True))))
    return tuple(entries)


def prompt_blocks_to_proto(blocks: PromptBlocks) -> pb.PromptBlocks:
    """Convert the named blocks of a prompt."""
    return pb.PromptBlocks(
        chain=b"".join(blocks.chain),
        ends=b"".join(blocks.ends),
        others=b"".join(blocks.others),
        chunks=b"".join(blocks.chunks),
    )


def prompt_blocks_from_proto(message: pb.PromptBlocks) -> PromptBlocks:
    """Convert the named blocks of a prompt; RemoteProtocolError for cut keys."""
    return PromptBlocks(
        split_keys(message.chain, "prompt_blocks.chain"),
        split_keys(message.ends, "prompt_blocks.ends"),
        split_keys(message.others, "prompt_blocks.others"),
        split_keys(message.chunks, "prompt_blocks.chunks"),
    )


ERASED = MessageCodec(
    Erased, pb.Erased, "erased", **dict.fromkeys(Erased.__dataclass_fields__, AMOUNT)
)


def describe_reply_to_proto(info: NodeInfo, report: NodeReport) -> pb.DescribeReply:
    """Convert a node's description of itself."""
    return pb.DescribeReply(info=NODE_INFO.to_proto(info), report=NODE_REPORT.to_proto(report))


def describe_reply_from_proto(message: pb.DescribeReply) -> tuple[NodeInfo, NodeReport]:
    """Convert a node's description of itself; RemoteProtocolError for a value out of bounds."""
    return NODE_INFO.from_proto(message.info), NODE_REPORT.from_proto(message.report)

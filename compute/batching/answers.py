"""Answers to the caller of a request: events, read-outs of the prompt, usage, or an error.

Called by the engine; pure functions over a Sequence. The last token of a prompt is always computed,
never loaded. A cached prefix therefore serves requests for a read-out (probabilities of tokens, an
embedding) exactly as it serves answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tierkv.compute.batching.sampler import Draw, request_seed
from tierkv.compute.batching.sequence import Readout, Sequence
from tierkv.kvcore.errors import RowLevelError, TierKVError
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest, Usage


def read_out(request: GenerateRequest, *, hidden: Tensor, logits: Tensor) -> Readout | None:
    """Answer a request with ``reads_out``.

    Args:
        request: the request.
        hidden: ``[hidden]`` after the last norm.
        logits: ``[vocab]`` float32.

    Returns:
        readout: None if any number of the read-out is not finite.
    """
    if request.embed:
        return _finite(Readout(embedding=_numbers(_unit(hidden.float()))))
    scores = torch.log_softmax(logits.float(), dim=-1)
    asked = torch.tensor(request.score_token_ids, device=scores.device)
    return _finite(Readout(scores=_numbers(scores[asked])))


def _unit(vector: Tensor) -> Tensor:
    return vector.div(vector.norm())


def _numbers(vector: Tensor) -> tuple[float, ...]:
    return tuple(vector.tolist())


def _finite(readout: Readout) -> Readout | None:
    numbers = torch.tensor(readout.embedding or readout.scores)
    return readout if bool(torch.isfinite(numbers).all()) else None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message for the caller of one request: an event, or the error that ended the request."""

    seq_id: int
    event: GenerateEvent | TierKVError


def last_event(
    seq: Sequence,
    new_tokens: tuple[int, ...],
    reason: FinishReason,
    *,
    node_id: NodeId,
    now: float,
    codec: KvCodec = KvCodec.NONE,
) -> GenerateEvent:
    """Sum up a request; a first step or first token that never happened counts until now."""
    resumed = seq.request.resumed_tokens
    started = seq.started_s if seq.started_s >= 0 else now
    first = seq.first_token_s if seq.first_token_s >= 0 else now
    blended, blend = seq.blended, seq.request.blend
    return GenerateEvent(
        token_ids=new_tokens,
        logprobs=seq.logprobs if new_tokens else (),
        finish_reason=reason,
        usage=Usage(
            prompt_tokens=seq.prompt_length - resumed,
            completion_tokens=seq.generated + resumed,
            hit_tokens=seq.hit_tokens(),
            written_tokens=seq.published_tokens,
            blended_tokens=0 if blended is None else blended.hits.total,
            recomputed_tokens=0 if blended is None else blended.recomputed,
            selector=None if blended is None or blend is None else blend.selector,
            kv_codec=codec if seq.request.use_cache else KvCodec.NONE,
        ),
        node_id=node_id,
        queue_s=started - seq.arrival_s,
        ttft_s=first - seq.arrival_s,
        scores=seq.readout.scores if seq.readout is not None else (),
        embedding=seq.readout.embedding if seq.readout is not None else (),
    )


def draw_for(seq: Sequence) -> Draw:
    """Return how the sequence's next token is chosen.

    If the sequence's form allows no token, any token may be drawn: ``refusal`` then rejects the
    token.
    """
    sampling = seq.request.sampling
    return Draw(
        sampling.temperature,
        sampling.top_p,
        request_seed(seq.request),
        seq.request.resumed_tokens + seq.generated,
        allowed=None if seq.form is None else seq.form.allowed(),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        edits=None if seq.edits is None else seq.edits.at(seq.tokens, seq.length),
    )


def refusal(seq: Sequence, *, finite: bool) -> RowLevelError | None:
    """Return the error for a result that can't be a sequence's answer; None for a valid result.

    Args:
        seq: sequence of the computed step.
        finite: the logits of the step are finite.
    """
    if not finite or (seq.request.reads_out and seq.readout is None):
        return RowLevelError(
            "the model produced logits that are not finite",
            hint="Check the model's weights and dtype.",
        )
    if seq.form is not None and seq.form.error:
        return RowLevelError(seq.form.error, hint="Simplify the schema.")
    return None

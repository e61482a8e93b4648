"""Which calls have an answer that may be kept, and the key of their answers.

Pure. Model and revision, namespace and version, prompt, options and the group of callers all change
the key. Keys are made with the secret of the namespace, so a key says nothing about the prompt.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from tierkv.dbfront.contracts import PreparedCall, TextAnswer
from tierkv.kvcore.call_options import AnswerScope
from tierkv.kvcore.errors import UserError
from tierkv.kvcore.request import SamplingParams

_KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Key of a call's answer.

    Attributes:
        digest: 16 bytes; equal only for equal calls of those who share answers.
        lasts: whether the answer may outlive the process; answers of a session do not.
        most_age_s: age up to which an answer serves this call; 0.0: any age.
    """

    digest: bytes
    lasts: bool
    most_age_s: float


def answer_key(prepared: PreparedCall) -> AnswerKey | None:
    """Return the key of a call's answer; None if the call asks for a new answer.

    Only repeatable answers have a key: greedy or with a seed, and not blended. A call with
    ``cache => false`` wants a computed answer. Kept answers have no log-probabilities, so a call
    for them is always computed.
    """
    call, request = prepared.call, prepared.request
    scope = call.options.answer_cache or AnswerScope.OFF
    if scope is AnswerScope.OFF or not request.use_cache or request.blend is not None:
        return None
    if call.tools is not None:
        return None  # Answers are kept as text, and their calls have identifiers of their own.
    sampling = request.sampling
    if sampling.logprobs is not None:
        return None
    asks = bool(call.labels) or call.embed
    if sampling.temperature > 0.0 and sampling.seed is None and not asks:
        return None
    owner = ""
    if scope is not AnswerScope.NAMESPACE:
        owner = call.tenant
    if scope is AnswerScope.SESSION:
        owner = f"{call.tenant} {call.session}"
    digest = blake2b(digest_size=_KEY_BYTES, key=request.namespace_key)
    asked = (
        scope.value,
        owner,
        prepared.model.identity,
        sampling.temperature,
        sampling.top_p,
        sampling.max_tokens,
        sampling.stop_token_ids,
        sampling.seed if sampling.temperature > 0.0 else None,
        sampling.ignore_eos,
        _shape(sampling),
        () if call.labels else call.options.stop or (),
        request.guide,
        call.labels,
        call.embed,
    )
    digest.update(repr(asked).encode("utf-8", "surrogatepass"))
    digest.update(array("q", request.token_ids))
    return AnswerKey(
        digest.digest(), scope is not AnswerScope.SESSION, call.options.answer_ttl_s or 0.0
    )


def _shape(sampling: SamplingParams) -> tuple[object, ...]:
    """Return the fields that change the distribution of the tokens."""
    if not sampling.shapes:
        return ()
    drawn = sampling.temperature > 0.0
    return (
        sampling.top_k if drawn else 0,
        sampling.min_p if drawn else 0.0,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        sampling.logit_bias,
        sampling.min_tokens,
    )


def may_keep(answer: TextAnswer) -> bool:
    """Return whether an answer equals the answer without any cache: no lossy KV, no blending."""
    usage = answer.usage
    return not usage.blended_tokens and not (usage.hit_tokens.total and usage.kv_codec.is_lossy)


def check_scope(scope: AnswerScope | None, session: str) -> None:
    """Refuse answers for a session to a call without one.

    Raises:
        UserError: says what to send.
    """
    if scope is AnswerScope.SESSION and not session:
        raise UserError(
            "answer_cache = session needs a session",
            hint="Send session_id with the request, or use answer_cache = tenant.",
        )

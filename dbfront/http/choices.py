"""Several answers to one prompt (``n``): as many requests, whose answers are choices of one reply.

Choices of prompt p have the indexes [p * n, (p + 1) * n). A seed becomes n seeds, so the choices
differ and can be repeated alone. KV of a prompt is computed once and serves all choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierkv.dbfront.contracts import PreparedCall, TextAnswer, TextEvent
from tierkv.dbfront.http.services import FieldError
from tierkv.kvcore import limits
from tierkv.kvcore.errors import UserError
from tierkv.kvcore.ids import new_request_id
from tierkv.kvcore.request import HitTokens

_SEEDS = 1 << 63


def check_choices(prompts: int, n: int) -> None:
    """Refuse more answers than one request may ask for.

    Raises:
        FieldError: names ``prompt`` or ``n``, whichever has to be smaller.
    """
    if prompts > limits.MAX_HTTP_PROMPTS:
        message = f"{prompts} prompts, at most {limits.MAX_HTTP_PROMPTS} are allowed"
        raise FieldError("prompt", UserError(message))
    if prompts * n > limits.MAX_HTTP_PROMPTS:
        message = f"{prompts} prompts with n = {n} ask for {prompts * n} answers"
        hint = f"At most {limits.MAX_HTTP_PROMPTS} are allowed: lower n, or send fewer prompts."
        raise FieldError("n", UserError(message, hint=hint))


def choices_of(prepared: Sequence[PreparedCall], n: int) -> list[PreparedCall]:
    """Return ``n`` calls for each call; the first of each is the call itself."""
    return [call if not i else _choice(call, i) for call in prepared for i in range(n)]


def _choice(call: PreparedCall, number: int) -> PreparedCall:
    sampling = call.request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + number) % _SEEDS)
    request = replace(call.request, request_id=new_request_id(), sampling=sampling)
    return replace(call, request=request)


def of_one_prompt(
    answers: Sequence[TextAnswer | TextEvent], n: int
) -> list[TextAnswer | TextEvent]:
    """Return the answers with the usage of a prompt counted once, at its first choice.

    Later choices reuse that prompt, so their hits say nothing about the cache.
    """
    return [answer if at % n == 0 else _without_prompt(answer) for at, answer in enumerate(answers)]


def _without_prompt(answer: TextAnswer | TextEvent) -> TextAnswer | TextEvent:
    if answer.usage is None:
        return answer
    usage = replace(
        answer.usage,
        prompt_tokens=0,
        hit_tokens=HitTokens(),
        blended_tokens=0,
        recomputed_tokens=0,
    )
    return replace(answer, usage=usage)

"""Recipes: how an AI call becomes questions to a model.

A recipe is a generator: it yields questions, receives the answers and returns the function's value.
dbfront/calls/evaluation.py runs all recipes of a batch concurrently, so questions asked at the same
time share one plan. A recipe never awaits and never sees a node. A prompt begins with the context
shared by rows and ends with the question, so several questions about one document share the
document's KV.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tierkv.dbfront.contracts import (
    CallDefaults,
    Message,
    SessionCall,
    TextAnswer,
    TextCall,
    TokenCounts,
)
from tierkv.kvcore.call_options import CallOptions
from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.functions import CONTEXT


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Request for the token counts of texts; the recipe receives TokenCounts."""

    texts: tuple[str, ...]
    model: str | None


Step = tuple[TextCall, ...] | CountTokens | SessionCall
"""Questions to the models, a request for token counts, or a turn of a conversation."""
Reply = Sequence[TextAnswer] | TokenCounts
"""Answers in the order of the questions, the counts, or the answer of the turn alone."""
Recipe = Generator[Step, Any, Any]
"""Yields steps, receives a Reply for each step, returns the function's value; None is NULL."""


def ask_model(
    call: AiCall,
    defaults: CallDefaults,
    prompt: str,
    *,
    question: str = "",
    json_schema: str = "",
    labels: tuple[str, ...] = (),
) -> TextCall:
    """Make the model call for a prompt, with the call's options and the session's settings.

    Args:
        call: the call; its context is text.
        defaults: settings of the session.
        prompt: without a question, the beginning of the user message, followed by the call's
            context fields. With a question, the row's own text, which follows the context.
        question: end of the user message, if not empty.
        json_schema: JSON schema of the answer.
        labels: the possible answers.
    """
    system = defaults.system_prompt if call.system_prompt is None else call.system_prompt
    messages: tuple[Message, ...] = (
        Message("user", _user_text(call.text(CONTEXT), prompt, question)),
    )
    if system:
        messages = (Message("system", system), *messages)
    return TextCall(
        messages=messages,
        model=call.model or defaults.model,
        options=_question_options(call.options.over(defaults.options), bool(labels)),
        tenant=defaults.tenant,
        key=defaults.key,
        session=defaults.session,
        documents=call.texts("documents"),
        json_schema=json_schema,
        labels=labels,
    )


@lru_cache(maxsize=256)
def _question_options(options: CallOptions, labelled: bool) -> CallOptions:
    """Return a call's options as its question has them; the calls of a form share one value.

    Equal questions of several calls are asked once, even if their timeouts differ.
    """
    most = 1 if labelled else options.max_tokens
    return replace(
        options, max_tokens=most, timeout_s=None, retries=None, cascade=None, cascade_model=None
    )


def embed_text(call: AiCall, defaults: CallDefaults, text: str) -> TextCall:
    """Make the model call for a text's embedding; no chat template is applied to the text."""
    session = defaults.options
    return TextCall(
        prompt=text,
        model=call.model or defaults.model,
        options=CallOptions(
            max_tokens=1,
            priority=session.priority,
            cache=session.cache,
            answer_cache=session.answer_cache,
            answer_ttl_s=session.answer_ttl_s,
        ),
        tenant=defaults.tenant,
        key=defaults.key,
        session=defaults.session,
        embed=True,
    )


def _user_text(context: str, prompt: str, question: str) -> str:
    if not question:
        return f"{prompt}\n{context}" if context else prompt
    before = f"{context}\n\n" if context else ""
    return f"{before}{prompt}\nQuestion: {question}"

"""What a recipe is, and how an AI call becomes the text that a model is asked with.

A recipe is a generator: it yields questions, is sent the answers and returns the function's value.
dbfront/calls/evaluation.py runs all recipes of a batch side by side, so questions that are asked at
the same time share one plan. A recipe never awaits and never sees a node. A prompt begins with the
context that rows share and ends with the question, so several questions about one document share
the document's KV.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierkv.dbfront.call_defaults import CallDefaults
from tierkv.dbfront.contracts import Message, TextAnswer, TextCall, TokenCounts
from tierkv.kvcore.call_options import CallOptions
from tierkv.sql.calls.ai_call import AiCall


@dataclass(frozen=True, slots=True)
class ModelQuestions:
    """Asks the models; the recipe goes on with the answers, in the same order."""

    calls: tuple[TextCall, ...]


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Asks how long texts are for a model; the recipe goes on with TokenCounts."""

    texts: tuple[str, ...]
    model: str | None


Step = ModelQuestions | CountTokens
Reply = Sequence[TextAnswer] | TokenCounts
Recipe = Generator[Step, Any, Any]
"""Yields steps, is sent a Reply for each, returns the function's value; None is NULL."""


@dataclass(frozen=True, slots=True)
class CallOrder:
    """One call to answer.

    Attributes:
        call: the call.
        defaults: what the session adds.
        context: its order-free fields as text, in the order chosen for the batch.
    """

    call: AiCall
    defaults: CallDefaults
    context: str = ""

    @property
    def options(self) -> CallOptions:
        """The call's options, with what they leave open taken from the session."""
        return self.call.options.over(self.defaults.options)


def ask_model(
    order: CallOrder,
    prompt: str,
    *,
    question: str = "",
    json_schema: str = "",
    labels: tuple[str, ...] = (),
) -> TextCall:
    """Make the model call for a prompt, with the call's options and the session's settings.

    Args:
        order: whose settings it takes.
        prompt: without a question, what the user message begins with; the order's context fields
            follow it. With one, the row's own text, which follows the context.
        question: what it ends with, if anything.
        json_schema: what the answer is held to.
        labels: what the answer is one of.
    """
    call, defaults = order.call, order.defaults
    system = defaults.system_prompt if call.system_prompt is None else call.system_prompt
    messages: tuple[Message, ...] = (Message("user", _user_text(order, prompt, question)),)
    if system:
        messages = (Message("system", system), *messages)
    asked = order.options
    # Equal questions of several calls are asked once, whatever time each call gives its answer.
    options = replace(
        asked, max_tokens=1 if labels else asked.max_tokens, timeout_s=None, retries=None
    )
    return TextCall(
        messages=messages,
        model=call.model or defaults.model,
        options=options,
        tenant=defaults.tenant,
        documents=call.texts("documents"),
        json_schema=json_schema,
        labels=labels,
    )


def embed_text(order: CallOrder, text: str) -> TextCall:
    """Make the model call for a text's embedding; no template stands around the text."""
    defaults = order.defaults
    session = defaults.options
    return TextCall(
        prompt=text,
        model=order.call.model or defaults.model,
        options=CallOptions(max_tokens=1, priority=session.priority, cache=session.cache),
        tenant=defaults.tenant,
        embed=True,
    )


def _user_text(order: CallOrder, prompt: str, question: str) -> str:
    if not question:
        return f"{prompt}\n{order.context}" if order.context else prompt
    before = f"{order.context}\n\n" if order.context else ""
    return f"{before}{prompt}\nQuestion: {question}"

"""What a recipe is, and how an AI call becomes the text that a model is asked with.

A recipe is a generator: it yields questions, is sent the answers and returns the function's value.
dbfront/calls/evaluation.py runs all recipes of a batch side by side, so questions that are asked at
the same time share one plan. A recipe never awaits and never sees a node. A prompt begins with the
context that rows share and ends with the question, so several questions about one document share
the document's KV.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tierkv.dbfront.call_defaults import CallDefaults
from tierkv.dbfront.contracts import Message, TextAnswer, TextCall, TokenCounts
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


T = TypeVar("T")


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
    options = call.options
    system = _given(call.system_prompt, defaults.system_prompt)
    messages: tuple[Message, ...] = (Message("user", _user_text(order, prompt, question)),)
    if system:
        messages = (Message("system", system), *messages)
    return TextCall(
        messages=messages,
        model=call.model or defaults.model,
        temperature=_given(options.temperature, defaults.temperature),
        top_p=_given(options.top_p, 1.0),
        max_tokens=1 if labels else _given(options.max_tokens, defaults.max_tokens),
        stop=_given(options.stop, ()),
        seed=_given(options.seed, defaults.seed),
        tenant=defaults.tenant,
        priority=_given(options.priority, defaults.priority),
        use_cache=_given(options.cache, defaults.cache),
        documents=call.texts("documents"),
        chunk_separator=defaults.chunk_separator,
        blend=options.blend if defaults.blend else bool(options.blend),
        recompute_ratio=_given(options.recompute_ratio, defaults.recompute_ratio),
        selector=_given(options.selector, defaults.selector),
        json_schema=json_schema,
        labels=labels,
    )


def embed_text(order: CallOrder, text: str) -> TextCall:
    """Make the model call for a text's embedding; no template stands around the text."""
    defaults = order.defaults
    return TextCall(
        prompt=text,
        model=order.call.model or defaults.model,
        max_tokens=1,
        tenant=defaults.tenant,
        priority=defaults.priority,
        use_cache=defaults.cache,
        embed=True,
    )


def _user_text(order: CallOrder, prompt: str, question: str) -> str:
    if not question:
        return f"{prompt}\n{order.context}" if order.context else prompt
    before = f"{order.context}\n\n" if order.context else ""
    return f"{before}{prompt}\nQuestion: {question}"


def _given(value: T | None, default: T) -> T:
    return default if value is None else value

"""From an AI call to the text a model is asked with; shared by all recipes.

A prompt begins with what a row brings and ends with the question, so that several questions about
the same documents share the documents' KV. Its context stands before that, because rows share it.
"""

from __future__ import annotations

from typing import TypeVar

from tierkv.dbfront.calls.recipes.recipe import Order
from tierkv.dbfront.contracts import Message, TextCall

T = TypeVar("T")


def ask_model(
    order: Order,
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


def embed_text(order: Order, text: str) -> TextCall:
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


def _user_text(order: Order, prompt: str, question: str) -> str:
    if not question:
        return f"{prompt}\n{order.context}" if order.context else prompt
    before = f"{order.context}\n\n" if order.context else ""
    return f"{before}{prompt}\nQuestion: {question}"


def _given(value: T | None, default: T) -> T:
    return default if value is None else value

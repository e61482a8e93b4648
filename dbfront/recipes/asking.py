"""From an AI call to the text a model is asked with; shared by all recipes."""

from __future__ import annotations

from typing import TypeVar

from dbfront.contracts import Message, TextCall
from dbfront.recipes.recipe import Order

T = TypeVar("T")


def ask_model(
    order: Order,
    prompt: str,
    *,
    json_schema: str = "",
    labels: tuple[str, ...] = (),
    system_prompt: str | None = None,
) -> TextCall:
    """Make the model call for a prompt, with the call's options and the session's settings.

    Args:
        order: whose settings it takes.
        prompt: the user message; the order's context fields follow it.
        json_schema: what the answer is held to.
        labels: what the answer is one of.
        system_prompt: stands in where neither the call nor the session has one.
    """
    call, defaults = order.call, order.defaults
    options = call.options
    system = _given(call.system_prompt, defaults.system_prompt) or system_prompt or ""
    text = f"{prompt}\n{order.context}" if order.context else prompt
    messages: tuple[Message, ...] = (Message("user", text),)
    if system:
        messages = (Message("system", system), *messages)
    return TextCall(
        messages=messages,
        model=call.model or defaults.model,
        temperature=_given(options.temperature, defaults.temperature),
        top_p=_given(options.top_p, 1.0),
        max_tokens=_given(options.max_tokens, defaults.max_tokens),
        stop=_given(options.stop, ()),
        seed=_given(options.seed, defaults.seed),
        tenant=defaults.tenant,
        priority=_given(options.priority, 0),
        use_cache=_given(options.cache, defaults.cache),
        documents=call.texts("documents"),
        chunk_separator=defaults.chunk_separator,
        blend=options.blend if defaults.blend else bool(options.blend),
        recompute_ratio=_given(options.recompute_ratio, defaults.recompute_ratio),
        selector=_given(options.selector, defaults.selector),
        json_schema=json_schema,
        labels=labels,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value

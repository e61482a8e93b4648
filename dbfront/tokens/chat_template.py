"""Renders chat messages to prompt text with the model's own Jinja template.

Follows the conventions of Hugging Face folders, so the text equals the output of transformers'
``apply_chat_template``. Templates come from model folders and run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.template_form import Skeleton, TextCopies, copies_contents, skeleton
from tierkv.dbfront.tokens.tool_conversation import has_calls, plain_messages, template_messages
from tierkv.dbfront.tool_calls.call_format import CallFormat, learned_format
from tierkv.dbfront.tool_calls.tool import Tool
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import ModelFolderError, UdfArgumentError

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Template for models without a template: one line ``role: content`` per message, then
``assistant:``.
"""

_LONGEST_KEPT = 8
_MOST_KEPT = 64
"""Longest conversation, in messages, whose rendering is kept; and most renderings kept."""


class _GenerationTag(Extension):
    """Renders the content of ``{% generation %}``, a tag that marks answers for training code."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """One model's compiled template.

    Attributes:
        source: the Jinja text.
    """

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str],
        clock: Clock | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja text; None uses PLAIN_TEMPLATE.
            special_tokens: values for names such as ``bos_token``.
            clock: clock for ``strftime_now``.

        Raises:
            ModelFolderError: the template has a syntax error.
        """
        self.source = PLAIN_TEMPLATE if source is None else source
        self._special_tokens = dict(special_tokens)
        self._skeletons: dict[tuple[bool, tuple[str, ...]], Skeleton] = {}
        try:
            environment = _environment(clock or SystemClock())
            self._template = environment.from_string(self.source)
            self._copies = copies_contents(environment.parse(self.source))
        except jinja2.TemplateError as error:
            raise ModelFolderError(
                f"the model's chat template can't be compiled: {error}"
            ) from error

    @cached_property
    def call_format(self) -> CallFormat:
        """How the model writes calls of tools; learned from the template on first use."""

        def render(messages: Any, tools: Any) -> str:
            try:
                return self._rendered(messages, tools, prompts=False)
            except UdfArgumentError as error:
                raise ValueError(str(error)) from error

        return learned_format(render)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the conversation in the format used to train the model.

        A template that only copies the messages is rendered once per sequence of roles.

        Raises:
            UdfArgumentError: the template refuses these messages; the error has the reason.
        """
        if tools or has_calls(messages):
            return self._render_with_tools(messages, tools, add_generation_prompt)
        roles = tuple([m.role for m in messages])
        contents = [m.content for m in messages]
        copies = self._copies is TextCopies.ALWAYS or (
            self._copies is TextCopies.NOT_EMPTY and all(contents)
        )
        if not copies or len(messages) > _LONGEST_KEPT:
            return self._render(roles, contents, add_generation_prompt)
        key = (add_generation_prompt, roles)
        known = self._skeletons.get(key)
        if known is not None:
            return known.filled(contents)
        text = self._render(roles, contents, add_generation_prompt)
        made = skeleton(
            lambda others: self._render(roles, others, add_generation_prompt), len(messages)
        )
        if made is None or made.filled(contents) != text:
            self._copies = TextCopies.NEVER
        elif len(self._skeletons) < _MOST_KEPT:
            self._skeletons[key] = made
        return text

    def _render_with_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], prompts: bool
    ) -> str:
        form = self.call_format
        if not form.is_fallback:
            described = [tool.to_json() for tool in tools]
            return self._rendered(template_messages(messages, form), described, prompts=prompts)
        for in_system in (True, False):
            plain = plain_messages(messages, tools, in_system=in_system)
            try:
                return self._render([m.role for m in plain], [m.content for m in plain], prompts)
            except UdfArgumentError:  # Some templates know no system message.
                if not in_system:
                    raise
        raise AssertionError("unreachable")

    def _render(self, roles: Sequence[str], contents: Sequence[str], prompts: bool) -> str:
        values = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        return self._rendered(values, (), prompts=prompts)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompts: bool,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=prompts,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UdfArgumentError(
                f"the model's chat template refuses these messages: {error}",
                hint="Check the roles and their order: most templates want system, user, "
                "assistant, user ….",
            ) from error


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda style: datetime.fromtimestamp(
        clock.wall()
    ).strftime(style)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to JSON without HTML escapes; Jinja's own filter would change the prompt."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

"""Checks and policies of an AI call before any model runs.

dbfront/generation/generation.py applies the checks to SQL and REST alike, so both accept the same
calls. This module also decides two policies: the tenant name for a ``cache_salt``, and whether the
call's chunks may be blended. A refused blend is never an error; the answer is exact, and only a
call with a request for blending learns the reason.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

from tierkv.compute.client import check_guide
from tierkv.dbfront.contracts import TextCall
from tierkv.dbfront.tokens.chunked_prompt import (
    EncodedPrompt,
    chat_as_text,
    clean_documents,
    encode_chat,
    encode_text,
)
from tierkv.dbfront.tokens.tokenizer import TextTokenizer
from tierkv.dbfront.tool_calls.call_format import CallFormat, arguments_schema, call_grammar
from tierkv.dbfront.tool_calls.tool import Tool, ToolChoice, ToolUse
from tierkv.integrations.remote.text_tokens import folder_here, text_folder
from tierkv.kvcore import limits
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import (
    ContextTooLongError,
    FeatureNotSupportedError,
    UdfArgumentError,
    UserError,
)
from tierkv.kvcore.ids import SALT_MARK
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import Blend, SamplingParams
from tierkv.metaserver.client import NamespaceGrant


def blend_of(
    call: TextCall, chunks: Sequence[tuple[int, int]], grant: NamespaceGrant, model: ModelInfo
) -> Blend | None:
    """Return the blend permission for a request; None keeps its answer exact."""
    options = call.options
    off = options.blend is False or options.cache is False
    if not chunks or off or _refusal(grant, model):
        return None
    policy = grant.policy
    return Blend(
        chunks=tuple(chunks),
        recompute_ratio=max(policy.recompute_ratio, options.recompute_ratio or 0.0),
        selector=options.selector or policy.selector,
        gradual=policy.gradual,
    )


def blend_refusal(call: TextCall, grant: NamespaceGrant, model: ModelInfo) -> str:
    """Return why a call that requests blending is answered exactly; empty without a request."""
    options = call.options
    how = (options.recompute_ratio, options.selector)
    asked = options.blend or how != (None, None)
    if options.blend is False or options.cache is False or not asked:
        return ""
    return _refusal(grant, model)


def _refusal(grant: NamespaceGrant, model: ModelInfo) -> str:
    if not grant.cache_enabled:
        return f"namespace {grant.domain} has its cache off"
    if not grant.policy.blend:
        return f"namespace {grant.domain} does not allow blending"
    if model.blend_refusal:
        return f"model {model.name} is not blended: {model.blend_refusal}"
    return ""


def salted_tenant(tenant: str, salt: str | None) -> str:
    """Return a tenant name isolated by salt; the digest keeps clients from choosing the name."""
    if not salt:
        return tenant
    digest = blake2b(f"{tenant}\0{salt}".encode(), digest_size=16).hexdigest()
    return f"{tenant[:80]}{SALT_MARK}{digest}"


_NAME = re.compile(limits.NAME_PATTERN)
_RISKY = re.compile(r"multipleOf|\d{16}|\d[eE]\+?\d")
_SCHEMA_IN_THREAD_CHARS = 4_096
"""Compiling a schema of this size takes about a millisecond; longer schemas are compiled in a
thread.
"""


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Note on errors of the caller which field of the call is at fault."""
    try:
        yield
    except UserError as error:
        error.field = error.field or field
        raise


def chat_text(call: TextCall, tokenizer: TextTokenizer) -> str | None:
    """Return the text that ``encode`` would encode as a whole.

    None if the call has another form, or has a fault that ``encode`` reports.
    """
    if call.messages is None or call.documents or call.options.chunk_separator or call.tools:
        return None
    if call.prompt is not None or call.prompt_token_ids is not None:
        return None
    try:
        return chat_as_text(tokenizer, call.messages)
    except (UdfArgumentError, ContextTooLongError):
        return None


async def encode(call: TextCall, tokenizer: TextTokenizer) -> EncodedPrompt:
    """Convert a call's prompt, in any of its three forms, to token ids.

    Raises:
        UdfArgumentError: no prompt, several prompts, an empty prompt, ids outside the vocabulary,
            or documents together with token ids.
    """
    with naming("prompt" if call.messages is None else "messages"):
        return await _encoded(call, tokenizer)


async def _encoded(call: TextCall, tokenizer: TextTokenizer) -> EncodedPrompt:
    given = [v for v in (call.messages, call.prompt, call.prompt_token_ids) if v is not None]
    if len(given) != 1:
        raise UdfArgumentError("give exactly one of messages, prompt and prompt_token_ids")
    documents = clean_documents(call.documents)
    separator = call.options.chunk_separator or ""
    if call.prompt_token_ids is not None:
        if documents:
            raise UdfArgumentError(
                "documents can't be combined with token ids", hint="Send the prompt as text."
            )
        encoded = EncodedPrompt(checked_ids(call.prompt_token_ids, tokenizer))
    elif call.prompt is not None:
        encoded = await encode_text(tokenizer, call.prompt, documents, separator, plain=call.embed)
    else:
        tools = call.tools.tools if call.tools is not None else ()
        encoded = await encode_chat(tokenizer, call.messages or (), documents, separator, tools)
    if not encoded.token_ids:
        raise UdfArgumentError("the prompt is empty", hint="Send at least one character.")
    return encoded


def checked_ids(token_ids: Sequence[int], tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return token ids of the model's vocabulary.

    Raises:
        UdfArgumentError: an id is no token of the model.
    """
    size = tokenizer.tokenizer.get_vocab_size(with_added_tokens=True)
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= size):
        raise UdfArgumentError(f"token ids must be in [0, {size})")
    return tuple(token_ids)


def sampling_params(asked: CallOptions, model: ModelInfo, prompt_tokens: int) -> SamplingParams:
    """Return the sampling parameters and the token limit of a call.

    Raises:
        ContextTooLongError: prompt and completion do not fit the model's context.
        UdfArgumentError: a parameter out of range.
    """
    room = model.context_tokens - prompt_tokens
    max_tokens = max(room, 1) if asked.max_tokens is None else asked.max_tokens
    if max_tokens > room:
        completion = "at least 1" if asked.max_tokens is None else str(max_tokens)
        with naming("messages"):
            raise ContextTooLongError(
                f"the prompt has {prompt_tokens} tokens and {completion} may be generated, but the "
                f"context of model {model.name} is {model.context_tokens} tokens",
                hint=f"Shorten the prompt, or set max_tokens to at most {room}."
                if room > 0
                else "Shorten the prompt; TierKV never truncates it.",
            )
    seed = None if asked.seed is None else asked.seed % (1 << 63)
    try:
        return SamplingParams(
            temperature=asked.temperature or 0.0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            max_tokens=max_tokens,
            seed=seed,
            ignore_eos=bool(asked.ignore_eos),
            top_k=max(0, asked.top_k or 0),
            min_p=asked.min_p or 0.0,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            repetition_penalty=1.0
            if asked.repetition_penalty is None
            else asked.repetition_penalty,
            logit_bias=asked.logit_bias or (),
            min_tokens=asked.min_tokens or 0,
        )
    except ValueError as error:
        raise _of_sampling(error) from error


def _of_sampling(error: ValueError) -> UdfArgumentError:
    """Return an error of SamplingParams, whose text begins with the field's name."""
    told = UdfArgumentError(str(error))
    first = str(error).partition(" ")[0]
    told.field = first if first in SamplingParams.__dataclass_fields__ else ""
    return told


def with_logprobs(sampling: SamplingParams, logprobs: int | None) -> SamplingParams:
    """Return the parameters with a report of log-probabilities; None: without.

    Raises:
        UdfArgumentError: too many alternatives.
    """
    if logprobs is None:
        return sampling
    try:
        return replace(sampling, logprobs=logprobs)
    except ValueError as error:
        raise _of_sampling(error) from error


def check_sampling(
    sampling: SamplingParams, guide: str, model: ModelInfo, tokenizer: TextTokenizer
) -> None:
    """Refuse sampling that a call's model can't follow, or that contradicts the call's guide.

    Raises:
        FeatureNotSupportedError: the engine of the model does not take a field.
        UdfArgumentError: a biased token does not exist, or ``min_tokens`` would hold back the end
            of an answer that is complete.
    """
    refused = sampling.refused_by(model.sampling_fields)
    if refused:
        raise FeatureNotSupportedError(
            f"model {model.name} does not take {refused}: its engine has no such parameter",
            hint=f"Leave {refused} out, or name another model.",
        )
    if sampling.min_tokens and guide:
        with naming("min_tokens"):
            raise UdfArgumentError(
                "min_tokens can't be used with a JSON schema or tools",
                hint="Leave min_tokens out: the form of the answer says where it ends.",
            )
    if sampling.logit_bias and folder_here(model.folder) != text_folder():
        # An engine that takes text has a vocabulary of its own, which it checks itself.
        with naming("logit_bias"):
            _check_tokens(sampling, tokenizer)


def _check_tokens(sampling: SamplingParams, tokenizer: TextTokenizer) -> None:
    size = tokenizer.tokenizer.get_vocab_size(with_added_tokens=True)
    unknown = [token for token, _ in sampling.logit_bias if token >= size]
    if unknown:
        raise UdfArgumentError(
            f"logit_bias names token {unknown[0]}, but token ids must be in [0, {size})",
            hint="POST /tokenize returns the ids of a text.",
        )


def readout_params(model: ModelInfo, prompt_tokens: int, more_tokens: int = 0) -> SamplingParams:
    """Return the parameters of a readout; a readout needs room for the prompt, not for an answer.

    ``more_tokens`` are appended to the prompt for scoring: all tokens of a label except the last.

    Raises:
        ContextTooLongError: prompt and label tokens do not fit the model's context.
    """
    if prompt_tokens + more_tokens > model.context_tokens:
        raise ContextTooLongError(
            f"the prompt has {prompt_tokens} tokens and its labels up to {more_tokens + 1}, but "
            f"the context of model {model.name} is {model.context_tokens} tokens"
            if more_tokens
            else f"the prompt has {prompt_tokens} tokens, but the context of model {model.name} is "
            f"{model.context_tokens} tokens",
            hint="Shorten the prompt; TierKV never truncates it.",
        )
    return SamplingParams(max_tokens=1)


def check_form(call: TextCall) -> None:
    """Refuse several kinds of answer in one call, and stop strings that would cut JSON."""
    if bool(call.json_schema) + bool(call.labels) + call.embed > 1:
        raise UdfArgumentError(
            "a call can ask for only one of: JSON of a schema, a label, an embedding"
        )
    if call.tools is not None and call.messages is None:
        raise UdfArgumentError("tools need a conversation", hint="Send messages.")
    if call.json_schema and call.options.stop:
        with naming("stop"):
            raise UdfArgumentError(
                "stop strings can't be used with a JSON schema",
                hint="The answer ends when it completes the schema.",
            )


async def checked_schema(schema: str) -> str:
    """Return a JSON Schema in compact form; an empty schema stays empty.

    If the schema compiler is not installed in the front, the node checks the schema.

    Raises:
        UdfArgumentError: the schema is no JSON object, or uses an unsupported feature (named in the
            message).
    """
    if len(schema) > _SCHEMA_IN_THREAD_CHARS:
        return await asyncio.to_thread(_short_schema, schema)
    return _short_schema(schema) if schema else ""


@lru_cache(maxsize=64)
def _short_schema(schema: str) -> str:
    with suppress(FeatureNotSupportedError):
        check_guide(schema)
    return json.dumps(json.loads(schema), separators=(",", ":"), ensure_ascii=False)


async def tools_guide(use: ToolUse, schema: str, model: ModelInfo, tokenizer: TextTokenizer) -> str:
    """Return the grammar of an answer that may call tools; empty if the engine takes no grammar.

    Args:
        use: the tools and the caller's choice.
        schema: JSON Schema of an answer that calls nothing; empty: free text.
        model: the model that answers.
        tokenizer: the model's own.

    Raises:
        UdfArgumentError: the arguments of a tool can't be held to its schema; names the tool.
        FeatureNotSupportedError: the engine takes no grammar, and calls are required or answers
            have a schema.
    """
    if model.grammar_refusal:
        if use.choice is ToolChoice.REQUIRED or schema:
            raise FeatureNotSupportedError(
                f"model {model.name} can't be held to calls of tools: {model.grammar_refusal}",
                hint="Use tool_choice auto, without a response_format.",
            )
        return ""
    form, specials = tokenizer.template.call_format, tokenizer.plain_text.special_ids
    text = call_grammar(form, use, specials, answer_schema=schema)
    if len(text) > limits.MAX_TOOLS_CHARS:
        raise UdfArgumentError(
            f"the schemas of the tools have {len(text)} characters, the limit is "
            f"{limits.MAX_TOOLS_CHARS}",
            hint="Send fewer tools, or shorter schemas.",
        )
    await asyncio.to_thread(_check_grammar, text, use, form)
    return text


@lru_cache(maxsize=64)
def _check_grammar(text: str, use: ToolUse, form: CallFormat) -> None:
    """Check the tools together, and only after a failure singly, to name the faulty tool."""
    with suppress(FeatureNotSupportedError):
        # What the compiler could not survive is found in the schemas themselves.
        _check_tools([tool for tool in use.callable if _RISKY.search(tool.parameters)], form)
        try:
            check_guide(text)
        except UdfArgumentError:
            _check_tools(use.callable, form)
            raise


def _check_tools(tools: Sequence[Tool], form: CallFormat) -> None:
    for tool in tools:
        try:
            check_guide(json.dumps(arguments_schema(tool, form)))
        except UdfArgumentError as error:
            raise UdfArgumentError(f"tool {tool.name}: {error}", hint=error.hint) from error


def check_names(call: TextCall) -> None:
    """Refuse names outside ``limits.NAME_PATTERN``, and priorities outside 32 bits."""
    for what, name in (("tenant", call.tenant), ("session_id", call.options.session_id)):
        if name is not None and not _NAME.fullmatch(name):
            raise UdfArgumentError(
                f"{what} {name[:140]!r} is not a valid name",
                hint=f"Use 1 to {limits.MAX_NAME_CHARS} letters, digits and _ . : - /.",
            )
    priority = call.options.priority or 0
    if not -(1 << 31) <= priority < 1 << 31:
        with naming("priority"):
            raise UdfArgumentError(f"priority {priority} does not fit 32 bits")


def check_ratio(recompute_ratio: float | None) -> None:
    """Refuse a share of tokens outside (0, 1]."""
    if recompute_ratio is not None and not 0.0 < recompute_ratio <= 1.0:
        raise UdfArgumentError(f"recompute_ratio must be in (0, 1], got {recompute_ratio}")


def check_stops(stops: Sequence[str]) -> None:
    """Refuse too many, empty, and too long stop strings."""
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise UdfArgumentError(
            f"{len(stops)} stop strings were given, at most {limits.MAX_STOP_STRINGS} are allowed"
        )
    if any(not 1 <= len(stop) <= limits.MAX_STOP_STRING_CHARS for stop in stops):
        raise UdfArgumentError(
            f"a stop string must have 1 to {limits.MAX_STOP_STRING_CHARS} characters"
        )

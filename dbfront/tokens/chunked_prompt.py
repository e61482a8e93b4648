"""Prompts made of separately tokenized parts, so a chunk has the same ids at every position.

Called by dbfront/generation/call_checks.py for SQL and REST alike. The ids do not depend on
blending, which is decided later, so exact prefix reuse sees the same prompt either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.tokenizer import TextTokenizer, check_length
from tierkv.dbfront.tokens.tool_conversation import has_calls, masked, masked_tool
from tierkv.dbfront.tool_calls.tool import Tool
from tierkv.kvcore import limits
from tierkv.kvcore.errors import UdfArgumentError

DOCUMENT_END = "\n"
"""Text appended to each document, as part of the document."""

_MARK = "tierkv-documents-{}"
_USER = "user"


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a user message; a chunk may be reused at any position."""

    text: str
    is_chunk: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A complete prompt as token ids, and the half-open ranges of its chunks, in order."""

    token_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()


def clean_documents(documents: Iterable[str | None] | None) -> tuple[str, ...]:
    """Return documents without surrounding whitespace; NULLs and empty documents are dropped.

    Raises:
        UdfArgumentError: more than ``limits.MAX_CHUNKS``.
    """
    kept = tuple(stripped for text in documents or () if text and (stripped := text.strip()))
    _check_count(len(kept))
    return kept


def prompt_parts(
    documents: Sequence[str], text: str, separator: str = ""
) -> tuple[PromptPart, ...]:
    """Cut a user message into parts: the documents, then the text, cut at the separators.

    Text between two separators is a chunk; text before the first or after the last separator is
    not. Separators and empty parts are left out.

    Raises:
        UdfArgumentError: more than ``limits.MAX_CHUNKS`` chunks.
    """
    pieces = text.split(separator) if separator else [text]
    last = len(pieces) - 1
    parts = [PromptPart(document + DOCUMENT_END, is_chunk=True) for document in documents]
    parts += [PromptPart(piece, 0 < at < last) for at, piece in enumerate(pieces) if piece]
    _check_count(sum(part.is_chunk for part in parts))
    return tuple(parts)


async def encode_text(
    tokenizer: TextTokenizer,
    text: str,
    documents: Sequence[str] = (),
    separator: str = "",
    *,
    plain: bool = False,
) -> EncodedPrompt:
    """Encode a raw prompt after its documents.

    A raw prompt may contain special tokens, unless ``plain`` is True. Documents are data: special
    tokens in documents are encoded as plain text.
    """
    mask = tokenizer.plain_text.mask
    documents = [mask(document) for document in documents]
    parts = prompt_parts(documents, mask(text) if plain else text, separator)
    if not any(part.is_chunk for part in parts):
        return EncodedPrompt(await tokenizer.encode_prompt("".join(part.text for part in parts)))
    # The empty first part is the beginning of the text, so no chunk is encoded as a beginning.
    encoded = _joined((PromptPart(""), *parts), await tokenizer.encode_parts(["", *_texts(parts)]))
    before, after = tokenizer.specials_around(encoded.token_ids)
    return EncodedPrompt(
        (*before, *encoded.token_ids, *after),
        tuple((start + len(before), stop + len(before)) for start, stop in encoded.chunks),
    )


def chat_as_text(tokenizer: TextTokenizer, messages: Sequence[Message]) -> str | None:
    """Render a conversation without documents; None if ``encode_chat`` encodes it in parts.

    Raises:
        UdfArgumentError: the template refuses the conversation.
        ContextTooLongError: the messages are too long.
    """
    check_length(sum(len(m.content) for m in messages))
    mask = tokenizer.plain_text.mask
    if has_calls(messages) or any(mask(m.content) != m.content for m in messages):
        return None
    return tokenizer.template.render(messages)


async def encode_chat(
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    documents: Sequence[str] = (),
    separator: str = "",
    tools: Sequence[Tool] = (),
) -> EncodedPrompt:
    """Encode a conversation; the first user message has the documents before its own text.

    Only the template writes special tokens. Spellings of special tokens in messages and documents
    are encoded as plain text.

    If the template does more than copy the message, the prompt becomes one part without chunks,
    because a correct prompt is more important than reuse.

    Raises:
        UdfArgumentError: there is no user message, or the template refuses the conversation.
    """
    check_length(sum(len(m.content) for m in messages))
    mask = tokenizer.plain_text.mask
    messages = [masked(message, mask) for message in messages]
    tools = [masked_tool(tool, mask) for tool in tools]
    documents, separator = [*map(mask, documents)], mask(separator)
    at = next((i for i, message in enumerate(messages) if message.role == _USER), None)
    if at is None:
        if documents:
            raise UdfArgumentError(
                "documents need a user message",
                hint="Documents stand before the first user message.",
            )
        return EncodedPrompt(await tokenizer.encode_chat(messages, tools))
    if not documents and not (separator and separator in messages[at].content):
        # No chunks: one part.
        return EncodedPrompt(await tokenizer.encode_chat(messages, tools))
    parts = prompt_parts(documents, messages[at].content, separator)
    whole = _with_content(messages, at, "".join(_texts(parts)))
    check_length(sum(len(message.content) for message in whole))
    written = _written_parts(tokenizer, whole, at, parts, tools)
    if written is None:
        return EncodedPrompt(await tokenizer.encode_chat(whole, tools))
    return _joined(written, await tokenizer.encode_parts(_texts(written)))


def _written_parts(
    tokenizer: TextTokenizer,
    whole: Sequence[Message],
    at: int,
    parts: Sequence[PromptPart],
    tools: Sequence[Tool],
) -> tuple[PromptPart, ...] | None:
    """Return the template's text in parts; None if the chunks cannot be located."""
    chunks = [number for number, part in enumerate(parts) if part.is_chunk]
    if not chunks:
        return None
    first, last = chunks[0], chunks[-1] + 1
    mark = _unused_mark(whole)
    marked = "".join([*_texts(parts[:first]), mark, *_texts(parts[last:])])
    render = partial(tokenizer.template.render, tools=tools)
    around = render(_with_content(whole, at, marked)).split(mark)
    if len(around) != 2:
        return None
    written = (PromptPart(around[0]), *parts[first:last], PromptPart(around[1]))
    return written if "".join(_texts(written)) == render(whole) else None


def _unused_mark(messages: Sequence[Message]) -> str:
    number = 0
    while any(_MARK.format(number) in message.content for message in messages):
        number += 1
    return _MARK.format(number)


def _with_content(messages: Sequence[Message], at: int, content: str) -> list[Message]:
    changed = list(messages)
    changed[at] = replace(changed[at], content=content)
    return changed


def _texts(parts: Sequence[PromptPart]) -> list[str]:
    return [part.text for part in parts]


def _joined(parts: Sequence[PromptPart], encoded: Sequence[tuple[int, ...]]) -> EncodedPrompt:
    token_ids: list[int] = []
    chunks: list[tuple[int, int]] = []
    for part, ids in zip(parts, encoded, strict=True):
        if part.is_chunk and ids:
            chunks.append((len(token_ids), len(token_ids) + len(ids)))
        token_ids += ids
    return EncodedPrompt(tuple(token_ids), tuple(chunks))


def _check_count(chunks: int) -> None:
    if chunks > limits.MAX_CHUNKS:
        raise UdfArgumentError(
            f"{chunks} documents and chunks in a prompt, at most {limits.MAX_CHUNKS} are allowed",
            hint="Join short documents.",
        )

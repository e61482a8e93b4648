"""Converts text to token ids and back, with the files of the model's folder.

Reads tokenizer.json (the ``tokenizers`` library), tokenizer_config.json and the chat template.
Called by dbfront/generation/generation.py. Long texts are encoded in a thread, so the event loop
never stalls.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.plain_text import PlainText, is_masked
from tierkv.dbfront.tool_calls.tool import Tool
from tierkv.integrations.remote.text_tokens import folder_here
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import ContextTooLongError, ModelFolderError, UdfArgumentError
from tierkv.kvcore.node import ModelInfo

if TYPE_CHECKING:
    from tierkv.dbfront.tokens.chat_template import ChatTemplate

THREAD_FROM_CHARS = 20_000
"""Encoding about 20,000 characters takes some milliseconds; longer texts are encoded in a thread.
"""

TOKENIZERS_KEPT = 16

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """One model's tokenizer and chat template.

    Attributes:
        tokenizer: tokenizer of the ``tokenizers`` library; safe to share between threads.
        template: the chat template.
        bos_token_id: id to put before a raw prompt if the model's configuration requires it, else
            None.
        anchor: text to put before a continuation; the ids of the anchor are cut off again. Some
            tokenizers add a space at every presumed beginning. Empty if not needed.
        plain_text: masks user text, so special tokens spelled in the text are encoded as plain
            text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    bos_token_id: int | None = None
    anchor: str = ""
    plain_text: PlainText = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain_text", PlainText(self.tokenizer, self.anchor))

    async def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode raw completion text, with the special tokens that the model expects around it."""
        ids = await self._encode(text, add_special_tokens=True)
        if self.bos_token_id is not None and ids[:1] != (self.bos_token_id,):
            return (self.bos_token_id, *ids)
        return ids

    async def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[int, ...]:
        """Render the conversation and encode the result; the template adds the special tokens."""
        check_length(sum(len(m.content) for m in messages))
        text = self.template.render(messages, tools=tools)
        return await self._encode(text, add_special_tokens=False)

    async def encode_parts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode consecutive texts separately; only the first text is a beginning."""
        chars = sum(map(len, texts))
        check_length(chars)
        if chars < THREAD_FROM_CHARS and not any(map(is_masked, texts)):
            return self._encode_parts_now(texts)
        return await asyncio.to_thread(self._encode_parts_now, texts)

    async def count(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Count the tokens of each user text separately, without special tokens."""
        for text in texts:
            check_length(len(text))
        texts = [self.plain_text.mask(text) for text in texts]
        if sum(map(len, texts)) < THREAD_FROM_CHARS and not any(map(is_masked, texts)):
            return self._count_now(texts)
        return await asyncio.to_thread(self._count_now, texts)

    def encode_answers(self, answers: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode texts as the model's answers to a conversation, without the end token."""
        asked = (Message("user", "a"),)
        prompt = self.template.render(asked)
        before = self._encode_now(prompt, False)
        lead = self._answer_lead(asked, prompt)
        encoded = []
        for answer in map(self.plain_text.mask, answers):
            whole = self._encode_now(prompt + lead + answer, False)
            behind = whole[: len(before)] == before
            encoded.append(whole[len(before) :] if behind else self._encode_continued(answer))
        return encoded

    def _answer_lead(self, asked: Sequence[Message], prompt: str) -> str:
        """Return the whitespace written by the template between the prompt and an answer."""
        try:
            whole = self.template.render(
                [*asked, Message("assistant", "b")], add_generation_prompt=False
            )
        except UdfArgumentError:  # The template renders no answers.
            return ""
        lead, answered, _ = whole.removeprefix(prompt).partition("b")
        return lead if whole.startswith(prompt) and answered and not lead.strip() else ""

    def specials_around(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the special tokens to put before and after a raw prompt's own ids."""
        bare, dressed = self._encode_now("a", False), self._encode_now("a", True)
        places = (i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare)
        at = next(places, None)
        if at is None:
            return (), ()
        before, after = dressed[:at], dressed[at + len(bare) :]
        if self.bos_token_id is not None and (*before, *token_ids)[:1] != (self.bos_token_id,):
            before = (self.bos_token_id, *before)
        return before, after

    def decode(self, token_ids: Sequence[int]) -> str:
        """Convert ids to text, without special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_with(self, token_ids: Sequence[int], shown: Mapping[int, str]) -> str:
        """Convert ids to text, with the spellings of some special tokens."""
        if shown.keys().isdisjoint(token_ids):
            return self.decode(token_ids)
        text, plain = [], list[int]()
        for token_id in token_ids:
            if token_id in shown:
                text += [self.decode(plain), shown[token_id]]
                plain.clear()
            else:
                plain.append(token_id)
        return "".join([*text, self.decode(plain)])

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        check_length(len(text))
        if len(text) < THREAD_FROM_CHARS and not is_masked(text):
            return self._encode_now(text, add_special_tokens)
        return await asyncio.to_thread(self._encode_now, text, add_special_tokens)

    def encode_texts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode rendered conversations without masked parts; releases the interpreter lock.

        The ids are those of ``encode_chat``. Returns nothing if the library fails at any text.
        """
        texts = list(map(_without_surrogates, texts))
        try:
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - the library raises bare Exception.
            return []
        return [tuple(encoding.ids) for encoding in encoded]

    def _count_now(self, texts: Sequence[str]) -> tuple[int, ...]:
        return tuple([len(self._encode_now(text, False)) for text in texts])

    def _encode_parts_now(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        first = [self._encode_now(text, False) for text in texts[:1]]
        return first + [self._encode_continued(text) for text in texts[1:]]

    def _encode_continued(self, text: str) -> tuple[int, ...]:
        anchor = self._encode_now(self.anchor, False)
        ids = self._encode_now(self.anchor + text, False)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self._encode_now(text, False)

    def _encode_now(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        text = _without_surrogates(text)
        if is_masked(text):
            plain = self.plain_text
            return tuple(plain.encode_dressed(text) if add_special_tokens else plain.encode(text))
        if len(text) < THREAD_FROM_CHARS:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # Same ids, but the batch call releases the interpreter lock, so the event loop's thread can
        # run. For a short text, acquiring the lock again would take longer than encoding.
        (encoding,) = self.tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return tuple(encoding.ids)


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates (possible in JSON), which are no text, by U+FFFD, as browsers do."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_length(chars: int) -> None:
    """Refuse a prompt of more than ``limits.MAX_PROMPT_CHARS`` characters."""
    if chars > limits.MAX_PROMPT_CHARS:
        raise ContextTooLongError(
            f"the prompt has {chars} characters, the limit is {limits.MAX_PROMPT_CHARS}",
            hint="Send less text; TierKV never truncates it.",
        )


def load_tokenizer(folder: Path, *, clock: Clock | None = None) -> TextTokenizer:
    """Read a model folder's tokenizer and template; blocks on disk reads.

    Raises:
        ModelFolderError: a file is missing or cannot be read.
    """
    from tierkv.dbfront.tokens.chat_template import (
        ChatTemplate,  # jinja2: statements without AI calls need not load it.
    )

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFolderError(
            f"{path} does not exist",
            hint="The front needs tokenizer.json of the served model at the same path as the "
            "compute node; copy the folder or mount it.",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises bare Exception for invalid files.
        raise ModelFolderError(f"{path} can't be read: {error}") from error
    # Files may contain truncation and padding from a training run; prompts are never truncated.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    specials = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    template = ChatTemplate(_template_source(folder, config), special_tokens=specials, clock=clock)
    bos = specials.get("bos_token") if config.get("add_bos_token") is True else None
    bos_id = tokenizer.token_to_id(bos) if bos else None
    return TextTokenizer(tokenizer, template, bos_id, _anchor(tokenizer))


def _anchor(tokenizer: Tokenizer) -> str:
    """Return the anchor: a line break if separately encoded texts do not decode to their join."""
    ids = tokenizer.encode("a", add_special_tokens=False).ids
    return "" if tokenizer.decode([*ids, *ids]) == "aa" else "\n"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} is not a JSON object")
    return value


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """Read bos_token and the other special tokens; each is a string or an object.

    The string of an object is its ``content``.
    """
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name, special_map.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Read the chat template: from its own file, else from tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{path} can't be read: {error}") from error
    source = config.get(
        "chat_template", _read_json(folder / "chat_template.json").get("chat_template")
    )
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


class TokenizerCache:
    """Loaded tokenizers by model revision; each tokenizer is loaded once, in a thread."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._loaded: OrderedDict[tuple[str, str], TextTokenizer] = OrderedDict()
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def get(self, model: ModelInfo) -> TextTokenizer:
        """Return the tokenizer of a served model.

        Raises:
            ModelFolderError: the model folder is not readable on this machine.
        """
        key = (model.folder, model.revision)
        loaded = self._loaded.get(key)
        if loaded is not None:
            return loaded
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._loaded:
                self._loaded[key] = await asyncio.to_thread(
                    load_tokenizer, folder_here(model.folder), clock=self._clock
                )
        self._locks.pop(key, None)
        if len(self._loaded) > TOKENIZERS_KEPT:
            self._loaded.popitem(last=False)
        return self._loaded[key]

"""The recipes of ``ai_agg`` and ``ai_summarize_agg``: one answer about all rows of a group.

All rows go into one prompt if the rows fit the model's context. Otherwise the rows are packed in
order into as few prompts as possible; the answers replace the rows, and the step repeats until only
one answer is left. A row longer than a prompt is first cut into pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.calls.recipe import (
    CountTokens,
    Recipe,
    Step,
    ask_model,
)
from tierkv.dbfront.contracts import CallDefaults, TokenCounts
from tierkv.kvcore.errors import ContextTooLongError
from tierkv.sql.calls.ai_call import AiCall

_SUMMARISE: Final = "Summarise the texts above in a few sentences."
_BETWEEN: Final = "\n"
_TOKENS_BETWEEN: Final = 2
_SLACK_TOKENS: Final = 32
_SLACK_SHARE: Final = 32
"""Reserve for the chat template, and for texts with more tokens in one prompt than counted
separately.
"""


def aggregate(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the answer to the instruction about all rows."""
    return (yield from _answer(call, defaults, call.text("instruction")))


def summarize(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return a summary of all rows."""
    return (yield from _answer(call, defaults, _SUMMARISE))


def _answer(call: AiCall, defaults: CallDefaults, instruction: str) -> Recipe:
    texts: Sequence[str] = call.texts("input")
    model = call.model or defaults.model
    room = yield from _room(call, defaults, instruction)
    fewest: int | None = None
    while True:
        prompts = yield from _prompts(model, texts, room)
        if fewest is not None and len(prompts) >= fewest:
            raise ContextTooLongError(
                f"answers about parts of the group don't fit into the {room} tokens of a prompt",
                hint="Set max_tokens lower.",
            )
        fewest = len(prompts)
        answers = yield tuple(
            ask_model(call, defaults, prompt, question=instruction) for prompt in prompts
        )
        if len(answers) == 1:
            return answers[0].text
        texts = [answer.text for answer in answers]


def _room(call: AiCall, defaults: CallDefaults, instruction: str) -> Generator[Step, Any, int]:
    """Return the number of tokens of rows that fit into a prompt."""
    system = defaults.system_prompt if call.system_prompt is None else call.system_prompt
    counted: TokenCounts = yield CountTokens(
        (f"\nQuestion: {instruction}", system), call.model or defaults.model
    )
    context = counted.context_tokens
    max_tokens = call.options.over(defaults.options).max_tokens or 0
    slack = _SLACK_TOKENS + context // _SLACK_SHARE
    room = context - max_tokens - sum(counted.counts) - slack
    if room <= _TOKENS_BETWEEN:
        raise ContextTooLongError(
            f"a context of {context} tokens is too small for the instruction, rows and an answer "
            f"of {max_tokens} tokens",
            hint="Set max_tokens lower, or shorten the instruction.",
        )
    return room


def _prompts(model: str | None, texts: Sequence[str], room: int) -> Generator[Step, Any, list[str]]:
    """Join neighbouring texts into prompts of at most ``room`` tokens."""
    prompts: list[list[str]] = []
    filled = room
    for piece in (yield from _pieces(model, texts, room - _TOKENS_BETWEEN)):
        tokens = piece.tokens + _TOKENS_BETWEEN
        if not prompts or filled + tokens > room:
            prompts.append([])
            filled = 0
        prompts[-1].append(piece.text)
        filled += tokens
    return [_BETWEEN.join(prompt) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class _TextPiece:
    text: str
    tokens: int


def _pieces(
    model: str | None, texts: Sequence[str], most: int
) -> Generator[Step, Any, list[_TextPiece]]:
    """Count the tokens of texts, and cut texts of more than ``most`` tokens until all fit."""
    pieces = yield from _counted(model, texts)
    while any(_too_long(piece, most) for piece in pieces):
        cut = [_cut(piece, most) if _too_long(piece, most) else () for piece in pieces]
        counted = yield from _counted(model, [text for parts in cut for text in parts])
        fresh = iter(counted)
        pieces = [
            part
            for piece, parts in zip(pieces, cut, strict=True)
            for part in (itertools.islice(fresh, len(parts)) if parts else (piece,))
        ]
    return pieces


def _counted(model: str | None, texts: Sequence[str]) -> Generator[Step, Any, list[_TextPiece]]:
    counted = yield CountTokens(tuple(texts), model)
    return [_TextPiece(text, count) for text, count in zip(texts, counted.counts, strict=True)]


def _too_long(piece: _TextPiece, most: int) -> bool:
    return piece.tokens > most and len(piece.text) > 1


def _cut(piece: _TextPiece, most: int) -> list[str]:
    """Cut a text into pieces of about equal length, between words if a word ends nearby."""
    text = piece.text
    size = -(-len(text) // -(-piece.tokens // most))
    cut: list[str] = []
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            space = text.rfind(" ", start + size // 2, end)
            end = space + 1 if space >= 0 else end
        cut.append(text[start:end])
        start = end
    return cut

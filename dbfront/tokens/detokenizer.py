"""An answer's tokens as a client sees them: a stream of text, and on request each token.

``Detokenizer`` never returns half a character. ``StopStrings`` cuts the answer at a stop string and
holds back text that may become a stop string. Calls that ask for log-probabilities
(dbfront/generation/answering.py) also have a ``TokenSpelling``, which writes single tokens, and a
``TokenReport``, which gives tokens out together with their text: a client never sees a token of
text that a stop string cut off.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from tokenizers import Tokenizer

from tierkv.dbfront.answer_token import AnswerToken, SpelledToken
from tierkv.kvcore.request import TokenLogprobs

REPLACEMENT = "\ufffd"

MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes, so a longer run of incomplete bytes is not text and is shown as
is.
"""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Converts ids to text incrementally; O(1) amortised per token.

    Each step decodes a short window: the last tokens shown, as context for the decoder's treatment
    of spaces, and the tokens after the context. The text gained by the window is new text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add new tokens and return the text that is now certain, often empty."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._shift(text)

    def flush(self) -> str:
        """Return the remaining text; incomplete characters become U+FFFD."""
        if not self._pending:
            return ""
        return self._shift(self._decode(self._context + self._pending))

    def _shift(self, text: str) -> str:
        """Return the window's new text and move the window."""
        if not text.startswith(self._context_text):
            # Bytes already shown as U+FFFD became a character; shown text is not changed.
            text = self._context_text + self._decode(self._pending)
        new = text[len(self._context_text) :]
        if new:
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        elif len(self._pending) >= MAX_PENDING_TOKENS:
            self._pending = []  # Special tokens: nothing to show, the context stays valid.
        return new


@dataclass(frozen=True, slots=True)
class Cut:
    """Text ready for display, and the stop string that ended the answer, if any."""

    text: str
    stop: str = ""


class StopStrings:
    """Finds stop strings in a stream of text.

    Attributes:
        held: text held back as a possible beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self.held = ""

    def push(self, text: str) -> Cut:
        """Add text; return the text before the first stop string, or before a possible one."""
        if not self._stops:
            return Cut(text)
        text = self.held + text
        self.held = ""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            return Cut(text[:at], stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        if keep:
            self.held = text[-keep:]
            text = text[:-keep]
        return Cut(text)

    def flush(self) -> str:
        """Return the held text; at the end of the answer it can no longer become a stop string."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE: Final = "\u2581"
"""Stands for a space in the pieces of SentencePiece."""


@cache
def byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others follow from U+0100, in order. The
    alphabet is that of GPT-2's byte-level BPE.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


class TokenSpelling:
    """The bytes of single tokens. A character may consist of several tokens of one byte each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._kinds = frozenset(_decoders(tokenizer))
        self._known: dict[int, bytes] = {}

    def spell(self, token_id: int) -> bytes:
        """Return a token's own bytes; those of its name for a special token."""
        if token_id not in self._known:
            self._known[token_id] = self._spell(token_id)
        return self._known[token_id]

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:  # Models are padded to round numbers of tokens.
            return b""
        if "ByteLevel" in self._kinds:
            table = byte_of()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return str(piece).encode()
        byte = _BYTE.fullmatch(piece)
        if byte and "ByteFallback" in self._kinds:
            return bytes([int(byte[1], 16)])
        if _SPACE in piece and self._kinds & {"Replace", "Metaspace"}:
            return str(piece).replace(_SPACE, " ").encode()
        if self._kinds & {"Replace", "Metaspace", "ByteFallback"}:
            return str(piece).encode()
        return str(self._tokenizer.decode([token_id])).encode()


def _decoders(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the types of a tokenizer's decoders."""
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"{}"
    waiting = [json.loads(state)]
    while waiting:
        decoder = waiting.pop()
        yield str(decoder.get("type"))
        waiting.extend(decoder.get("decoders", ()))


class TokenReport:
    """Tokens that wait for their text.

    A token is given out when a character behind its beginning is shown. The tokens of one
    character therefore come together, and a token that a stop string cuts in two comes as well.
    """

    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling = spelling
        self._waiting: deque[AnswerToken] = deque()
        self._written = 0
        self._shown = 0

    def add(self, token_id: int, logprobs: TokenLogprobs, *, gained: int) -> None:
        """Add a token.

        Args:
            token_id: the token.
            logprobs: log-probabilities of the token and its alternatives.
            gained: characters of the answer that became certain with the token.
        """
        spell = self._spelling.spell
        top = tuple(SpelledToken(spell(one), logprob) for one, logprob in logprobs.top)
        spelled = spell(token_id)
        # Bytes before it that turned out to be no character became certain with it.
        start = self._written + max(0, gained - len(spelled.decode(errors="replace")))
        self._waiting.append(AnswerToken(spelled, logprobs.logprob, top, start=start))
        self._written += gained

    def shown(self, chars: int) -> tuple[AnswerToken, ...]:
        """Count characters that the client gets now; return their tokens."""
        self._shown += chars
        ready = []
        while self._waiting and self._waiting[0].start < self._shown:
            ready.append(self._waiting.popleft())
        return tuple(ready)

    def rest(self) -> tuple[AnswerToken, ...]:
        """Return all tokens that wait, at the end of an answer that no stop string cut."""
        ready = tuple(self._waiting)
        self._waiting.clear()
        return ready

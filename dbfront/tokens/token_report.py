"""The tokens of an answer as a client sees them: bytes, log-probabilities, and where they begin.

``TokenSpelling`` writes single tokens. ``TokenReport`` gives tokens out together with their text,
so a client never sees a token of text that a stop string cut off. Both belong to one call, and only
to calls that ask for log-probabilities (dbfront/generation/answering.py).
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Final

from tokenizers import Tokenizer

from tierkv.dbfront.answer_token import AnswerToken, SpelledToken
from tierkv.kvcore.request import TokenLogprobs

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

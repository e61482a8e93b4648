"""Converts a stream of token ids to a stream of text for immediate display.

Pure. ``Detokenizer`` never returns half a character. ``StopStrings`` cuts the answer at a stop
string and holds back text that may become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

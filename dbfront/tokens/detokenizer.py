"""From a stream of token ids to a stream of text that can be shown at once.

Pure. ``Detokenizer`` never gives half a character; ``StopStrings`` cuts the answer where a stop
string begins and holds text back while it might still become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"

MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes, so longer runs without one are not text and are shown as is."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Turns ids into text as they come; O(1) amortised per token.

    Each step decodes a short window: the tokens shown last, as context for the decoder's treatment
    of spaces, and the ones after them. What the window gained is new text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is now certain, often empty."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._shift(text)

    def flush(self) -> str:
        """Return what is left, half characters shown as U+FFFD."""
        if not self._pending:
            return ""
        return self._shift(self._decode(self._context + self._pending))

    def _shift(self, text: str) -> str:
        """Take the window's new text and let the window move on."""
        if not text.startswith(self._context_text):
            # Bytes shown as U+FFFD became a character after all; what was shown stays.
            text = self._context_text + self._decode(self._pending)
        new = text[len(self._context_text) :]
        if new:
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        elif len(self._pending) >= MAX_PENDING_TOKENS:
            self._pending = []  # special tokens: nothing to show, and the context still holds
        return new


@dataclass(frozen=True, slots=True)
class Cut:
    """Text that may be shown, and whether a stop string ended the answer."""

    text: str
    stopped: bool = False


class StopStrings:
    """Looks for stop strings in a stream of text.

    Attributes:
        held: text kept back, because it may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self.held = ""

    def push(self, text: str) -> Cut:
        """Add text; return what comes before the first stop string, or what can't be one."""
        if not self._stops:
            return Cut(text)
        text = self.held + text
        self.held = ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            return Cut(text[: min(found)], stopped=True)
        keep = max(_overlap(text, stop) for stop in self._stops)
        if keep:
            self.held = text[-keep:]
            text = text[:-keep]
        return Cut(text)

    def flush(self) -> str:
        """Return what was held back: the answer ended, so it is no stop string."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

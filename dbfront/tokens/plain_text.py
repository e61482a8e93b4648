"""Keeps user text plain: a special token's spelling in user text is not encoded as the token.

A row or message with ``<|im_end|>`` must not end its turn and begin another turn. Only the chat
template and the author of a raw prompt may write special tokens. A conversation therefore takes
three steps: ``mask`` replaces each spelling in user text by a mark, the template renders the
conversation, and ``encode`` restores the spellings as plain text.

    "a <|im_end|> b"  ->  "a ⟨7⟩ b"  ->  "<|im_start|>user a ⟨7⟩ b<|im_end|>"
                                          special      | plain    | special

Text without masked spellings is encoded in one piece by the unchanged tokenizer.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokenizers import Tokenizer

_OPEN: Final = "\ufde0"
_CLOSE: Final = "\ufde1"
"""Noncharacters: Unicode reserves these code points for internal use, so no text contains them."""
_MARK: Final = re.compile(f"{_OPEN}([0-9]{{1,6}}){_CLOSE}")


class PlainText:
    """Masks and encodes text around one tokenizer's special tokens; safe to share by threads.

    Attributes:
        special_ids: ids of the special tokens, by their spelling.
    """

    def __init__(self, tokenizer: Tokenizer, anchor: str = "") -> None:
        """Read the special tokens.

        Args:
            tokenizer: the model's tokenizer.
            anchor: see TextTokenizer.
        """
        added = tokenizer.get_added_tokens_decoder()
        specials = {token.content: i for i, token in added.items() if token.special}
        specials.pop("", None)
        self.special_ids: Final[Mapping[str, int]] = specials
        self._tokenizer = tokenizer
        self._anchor = anchor
        self._ids = frozenset(specials.values())
        self._spellings = (_OPEN, *sorted(specials, key=len, reverse=True))
        self._numbers = {spelling: i for i, spelling in enumerate(self._spellings)}
        self._spelled = re.compile(_any_of(self._spellings))
        self._control = re.compile(_any_of(self._spellings[1:]))
        self._begins_anew = self._is_beginning_behind_specials()
        self._lock = threading.Lock()
        self._plain: Tokenizer | None = None

    def mask(self, text: str) -> str:
        """Replace each special token's spelling by a mark, so ``encode`` encodes it as text."""
        return self._spelled.sub(lambda found: f"{_OPEN}{self._numbers[found[0]]}{_CLOSE}", text)

    def encode(self, text: str) -> list[int]:
        """Encode text with marks; unmasked spellings become special tokens."""
        ids: list[int] = []
        done = start = 0
        for control in (*self._control.finditer(text), None):
            stop = len(text) if control is None else control.start()
            if _MARK.search(text, start, stop):
                ids += self._ordinary(text[done:start])
                ids += self._section(_unmasked(text[start:stop], self._spellings), start == 0)
                done = stop
            start = len(text) if control is None else control.end()
        return ids + self._ordinary(text[done:])

    def encode_dressed(self, text: str) -> list[int]:
        """Encode a masked raw prompt as plain text, with the special tokens around the prompt."""
        plain = _unmasked(text, self._spellings)
        return list(self._plain_tokenizer().encode(plain, add_special_tokens=True).ids)

    def _ordinary(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    def _section(self, text: str, first: bool) -> list[int]:
        ids = self._encode_plain(text, first or self._begins_anew)
        if self._ids.isdisjoint(ids):
            return ids
        # A vocabulary of whole words may contain the spelling as a word: split the spelling.
        pieces = self._control.sub(lambda found: found[0][0] + _OPEN + found[0][1:], text)
        return [i for piece in pieces.split(_OPEN) for i in self._encode_plain(piece, False)]

    def _encode_plain(self, text: str, beginning: bool) -> list[int]:
        tokenizer = self._plain_tokenizer()
        if beginning or not self._anchor:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        anchor = tokenizer.encode(self._anchor, add_special_tokens=False).ids
        ids = tokenizer.encode(self._anchor + text, add_special_tokens=False).ids
        return list(ids[len(anchor) :]) if ids[: len(anchor)] == anchor else ids

    def _is_beginning_behind_specials(self) -> bool:
        """Return True if text after a special token has the same ids as the text alone."""
        special = self._spellings[-1]
        alone, behind = self._ordinary("a"), self._ordinary(f"{special}a")
        return behind[-len(alone) :] == alone and len(behind) == len(alone) + 1

    def _plain_tokenizer(self) -> Tokenizer:
        """Return a copy of the tokenizer that encodes special tokens as text; made on first use."""
        with self._lock:
            if self._plain is None:
                plain = Tokenizer.from_str(self._tokenizer.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain


def is_masked(text: str) -> bool:
    """Return True if a text has marks of ``mask``."""
    return _OPEN in text and _MARK.search(text) is not None


def _any_of(spellings: Iterable[str]) -> str:
    """Build a pattern with shared prefixes; models may have a thousand special tokens."""
    trie: dict[str, Any] = {}
    for spelling in spellings:
        node = trie
        for letter in spelling:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(trie) if trie else "(?!)"


def _pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(letter) + _pattern(rest) for letter, rest in node.items() if letter]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{pattern})?" if "" in node else pattern


def _unmasked(text: str, spellings: tuple[str, ...]) -> str:
    def spelling(found: re.Match[str]) -> str:
        number = int(found[1])
        return spellings[number] if number < len(spellings) else found[0]

    return _MARK.sub(spelling, text)

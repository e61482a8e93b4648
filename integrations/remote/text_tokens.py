"""Text as token ids, for engines that take text only: an id per byte, and marks between messages.

Ids ``[0, 256)`` are bytes of UTF-8; higher ids are marks. The files in ``text_model/`` give the
front the same encoding: a tokenizer without merges and a chat template. The content of a message
can't forge a mark: the template escapes the first character of marks, and ``messages_of`` removes
the escapes. A raw prompt has no template, and its marks are the caller's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import UserError

MARK: Final = "\ufdd0"
"""Begins and ends the text of a mark: a code point that Unicode reserves as a noncharacter."""

ESCAPE: Final = "\ufdd1"
"""Is written as ``ESCAPE 1``; ``MARK`` is written as ``ESCAPE 0``."""

ROLES: Final = ("system", "user", "assistant", "tool", "developer")
END: Final = 256
"""Ends an answer."""

ANSWER: Final = END + 1
"""Marks the beginning of the answer."""

_FIRST_ROLE: Final = ANSWER + 1
VOCABULARY: Final = _FIRST_ROLE + len(ROLES)

NAMES: Final = {END: f"{MARK}end{MARK}", ANSWER: f"{MARK}answer{MARK}"} | {
    _FIRST_ROLE + i: f"{MARK}{role}{MARK}" for i, role in enumerate(ROLES)
}
"""The text of each mark in the tokenizer."""

TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message.role not in " + repr(list(ROLES)) + " -%}"
    "{{- raise_exception('this engine has no role ' ~ message.role) -}}"
    "{%- endif -%}"
    f"{{{{- '{MARK}' ~ message.role ~ '{MARK}' -}}}}"
    f"{{{{- message.content | replace('{ESCAPE}', '{ESCAPE}1')"
    f" | replace('{MARK}', '{ESCAPE}0') -}}}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{NAMES[ANSWER]}' -}}}}{{%- endif -%}}"
)
"""The chat template of ``text_model/``."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """One message of a conversation."""

    role: str
    content: str


def text_folder() -> Path:
    """Return the folder with the files of this tokenizer."""
    return Path(__file__).parent / "text_model"


def folder_here(folder: str) -> Path:
    """Return a tokenizer's folder on this machine; this tokenizer is part of TierKV."""
    ours = text_folder()
    return ours if Path(folder).parts[-3:] == ours.parts[-3:] else Path(folder)


def messages_of(token_ids: Sequence[int]) -> tuple[Spoken, ...]:
    """Decode a conversation; a raw prompt is one message without a role.

    Raises:
        UserError: an id is outside this tokenizer's vocabulary.
    """
    if not all(0 <= token < VOCABULARY for token in token_ids):
        raise UserError(f"token ids must be in [0, {VOCABULARY})")
    if max(token_ids, default=0) < END:
        return (Spoken("", text_of(token_ids)),)
    spoken: list[Spoken] = []
    role, begin = "", 0
    for at, token in enumerate(token_ids):
        if token < END:
            continue
        if role or at > begin:
            spoken.append(Spoken(role or "user", _unescaped(text_of(token_ids[begin:at]))))
        role = ROLES[token - _FIRST_ROLE] if token >= _FIRST_ROLE else ""
        begin = at + 1
    if role or begin < len(token_ids):
        content = _unescaped(text_of(token_ids[begin:]))
        spoken.append(Spoken(role or "assistant", content))
    return tuple(spoken)


def text_of(token_ids: Sequence[int]) -> str:
    """Decode bytes to text; incomplete characters become U+FFFD."""
    return bytes(token for token in token_ids if token < END).decode(errors="replace")


def tokens_of(text: str) -> tuple[int, ...]:
    """Return the bytes of a text; a lone surrogate, which JSON can carry, becomes U+FFFD."""
    return tuple(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode())


def _unescaped(text: str) -> str:
    return text.replace(ESCAPE + "0", MARK).replace(ESCAPE + "1", ESCAPE)

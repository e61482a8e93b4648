"""Hints for PostgreSQL's errors about functions whose names look like AI functions.

A database may have functions of its own called ``ai_...``, so only PostgreSQL knows which of them
there is; when it does not, what was meant may be one of ours, misspelt.
"""

from __future__ import annotations

import re
from typing import Final

from tierkv.dbfront.postgres.wire import messages
from tierkv.sql.calls.functions import AI_FUNCTIONS, PROMPT_TEMPLATE
from tierkv.sql.text.suggest import ai_function_hint

_NAME: Final = re.compile(rb"\b(ai_\w+)\(")
_STATE: Final = b"C42883\0"
_NOT_SEEN: Final = (
    "AI calls are answered in the client's own statement of at most 16 MiB; write them without a "
    "schema."
)


def hinted(data: bytes) -> bytes:
    """Give an error at the start of what PostgreSQL sent the name that was probably meant."""
    if data[:1] != b"E" or _STATE not in data[:256]:
        return data
    end = 1 + int.from_bytes(data[1:5], "big")
    name = _NAME.search(data[:end])
    hint = None if end > len(data) or name is None else _hint(name[1].decode("ascii", "replace"))
    if hint is None:
        return data
    values = messages.fields(data[:end]) | {"H": hint.encode()}
    return messages.with_fields(b"E", values) + data[end:]


def _hint(name: str) -> str | None:
    if name in AI_FUNCTIONS or name == PROMPT_TEMPLATE:
        return _NOT_SEEN
    return ai_function_hint(name, [*AI_FUNCTIONS, PROMPT_TEMPLATE]) or None

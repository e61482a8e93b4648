"""A label from an engine that can't tell chances of tokens: held to the labels as a schema.

Used by dbfront/generation/generation.py in place of dbfront/generation/readouts.py. The engine
answers with one label, and so the one has all of the probability: nothing is known of the others.
"""

from __future__ import annotations

import json

from tierkv.dbfront.contracts import TextCall
from tierkv.kvcore.errors import RowLevelError

_AROUND = 8
"""Tokens beside the label's own bytes: quotes, an end, a space."""

_SHOWN_CHARS = 80


def label_schema(labels: tuple[str, ...]) -> str:
    """Return the JSON Schema of an answer that is one of the labels."""
    schema = {"type": "string", "enum": [label.strip() for label in labels]}
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def most_label_tokens(call: TextCall) -> int:
    """Return the most tokens an answer may have: a token is a byte at least."""
    return _AROUND + max(len(json.dumps(label).encode()) for label in call.labels)


def read_label(text: str, labels: tuple[str, ...], *, cut: bool = False) -> int:
    """Return which label an answer is; an engine that heeds no schema may leave out the quotes.

    Raises:
        RowLevelError: it is none of them, or was cut and may have become another one.
    """
    said = "" if cut else _said(text)
    exact = [number for number, label in enumerate(labels) if label.strip() == said]
    plain = said.strip(" \t\r\n.\"'").casefold()
    alike = [number for number, label in enumerate(labels) if label.strip().casefold() == plain]
    for found in (exact, alike):
        if found:
            return found[0]
    raise RowLevelError(
        f"the model answered {text[:_SHOWN_CHARS]!r}, which is none of the labels",
        hint="the engine has to support response_format with a JSON schema",
    )


def _said(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    return value if isinstance(value, str) else text.strip()

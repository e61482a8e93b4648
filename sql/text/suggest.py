"""Did you mean: the nearest known name for a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, if any."""
    return next(iter(get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.6)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint with the nearest known name, or with all names when none is near."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f"Did you mean {near}?"
    return f"Known names: {', '.join(names)}."


_ELSEWHERE: Final = {
    "ai_sentiment": "ai_classify(text, ['positive', 'neutral', 'negative'])",
    "ai_translate": "ai_generate(text || E'\\nTranslate this into English.')",
    "ai_summarize": "ai_generate(text || E'\\nSummarize this.'), or ai_summarize_agg(text)",
    "ai_gen": "ai_generate(prompt)",
    "ai_query": "ai_generate(prompt)",
}
"""Functions of other databases, and their equivalents here."""


def ai_function_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown AI function; empty when no known name is near."""
    instead = _ELSEWHERE.get(name.lower())
    if instead is not None:
        return f"Use {instead}."
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else ""

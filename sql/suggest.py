"""Did you mean: the nearest known name for a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the nearest known name, or all of them when none is near."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Known names: {', '.join(names)}."

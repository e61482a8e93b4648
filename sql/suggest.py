"""Did you mean: the nearest known name for a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, if there is one."""
    return next(iter(get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.6)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the nearest known name, or all of them when none is near."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f"Did you mean {near}?"
    return f"Known names: {', '.join(names)}."

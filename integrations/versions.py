"""Which releases of other engines TierKV was tested with, and what is said of the others.

Read by what runs in an engine and by ``tierkv connect``; docs/engines.md has the same table with
what was tested how. An untested release is used all the same: what does not fit there is a miss.
"""

from __future__ import annotations

import re
from typing import Final

TESTED: Final = {"vllm": ("0.32",), "sglang": ("0.5.23",)}
"""Per engine the beginnings of the releases that tests run with."""


def untested(engine: str, version: str) -> str:
    """Say that a release was not tested; empty where it was."""
    known = TESTED.get(engine, ())
    if any(re.match(rf"{re.escape(start)}(?![0-9])", version) for start in known):
        return ""
    return f"{engine} {version} was not tested with TierKV; tested: {', '.join(known) or 'none'}"

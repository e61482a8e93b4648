"""Releases of vLLM and SGLang in TierKV's tests, and the warning for further releases.

Read by the code inside engines and by ``tierkv connect``. docs/engines.md has the same table with
the kinds of tests. An untested release is used all the same: an incompatibility is a miss.
"""

from __future__ import annotations

import re
from typing import Final

TESTED: Final = {"vllm": ("0.32",), "sglang": ("0.5.23",)}
"""Prefixes of the tested releases, per engine."""


def untested(engine: str, version: str) -> str:
    """Return a warning for an untested release; empty for a tested one."""
    known = TESTED.get(engine, ())
    if any(re.match(rf"{re.escape(start)}(?![0-9])", version) for start in known):
        return ""
    return f"{engine} {version} was not tested with TierKV; tested: {', '.join(known) or 'none'}"

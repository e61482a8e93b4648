"""What the programs of REST clients share: a question, and a JSON line per step.

TIERKV_URL is the address of the front, without a path.
"""

from __future__ import annotations

import json
from typing import Any

QUESTION = (
    "Customer: Jonas Ortiz. Product: blender. City: Vienna.\n"
    "Question: Where does the customer live?"
)


def said(what: str, got: Any) -> None:
    """Print what came of a step."""
    print(json.dumps({"what": what, "got": got}), flush=True)

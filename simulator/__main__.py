"""One simulation in a process of its own: a question on standard input, its answer on output.

Started by dbfront/databases/simulations.py, so that minutes of computing neither slow the front
down nor outlive a cancelled statement. Both are one JSON object (``asker`` is the process that
waits); an error is an answer too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tierkv.kvcore.errors import TierKVError
from tierkv.simulator.request import parse
from tierkv.simulator.run import simulate

NICENESS = 10
"""The front and its neighbours go first."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics, or what is wrong with the question; end when nobody waits any more."""

    def still_asked(*said: object) -> None:
        if os.getppid() != question["asker"]:
            sys.exit("whoever asked is gone")

    try:
        request = parse(question["options"])
        found = simulate(Path(question["trace"]), request, progress=still_asked, told=still_asked)
    except TierKVError as error:
        return {"error": {"message": error.message, "detail": error.detail, "hint": error.hint}}
    return {"metrics": found.metrics, "notes": found.notes}


def main() -> None:
    """Answer one question."""
    os.nice(NICENESS)
    json.dump(answer(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()

"""A simulation as a separate process: a question on standard input, the answer on output.

Started by dbfront/databases/simulations.py, so minutes of computing neither slow the front down nor
outlive a cancelled statement. Question and answer are one JSON object each (``asker`` is the id of
the waiting process); an error is an answer too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tierkv.kvcore.errors import TierKVError
from tierkv.simulator.options import parse
from tierkv.simulator.run import simulate

NICENESS = 10
"""The front and other processes of the machine go first."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics or the error of a question; exit when the asking process is gone."""

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

"""A process of the pool benchmark: holds contenders and measures one round at a time on demand.

Started by bench.pool as ``python -m bench.pool_worker KIND``, with the interpreter of the virtual
environment for KIND. The worker speaks JSON lines on stdin and stdout. If a contender fails, the
worker returns the error and continues.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, Final

from bench.pool_cell import Cell, Contender, Values, run_round, verify
from bench.pool_cores import client_side

MODULES: Final = {
    "house": ("bench.pool_raw", "bench.pool_stripped", "bench.pool_ours"),
    "redis": ("bench.pool_redis",),
    "mooncake": ("bench.pool_mooncake",),
}


class Worker:
    """The contenders of one process and the values to move."""

    def __init__(self, kind: str) -> None:
        self._contenders: dict[str, Contender] = {}
        self._values: Values | None = None
        for module in MODULES[kind]:
            self._contenders |= importlib.import_module(module).contenders()

    def handle(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        if ask["do"] == "names":
            return {"ops": {name: c.ops for name, c in self._contenders.items()}}
        if ask["do"] == "size":
            return self._take_size(ask)
        assert self._values is not None, "no size was given"
        contender, cell = self._contenders[ask["name"]], Cell(**ask["cell"])
        if ask["do"] == "verify":
            verify(contender, cell, self._values)
            return {}
        return asdict(run_round(contender, cell, seconds=ask["seconds"]))

    def _take_size(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Store new values; the result names each contender that failed, with the reason."""
        self._values = None
        values = self._values = Values(ask["size"], threads=ask["threads"], seed=ask["seed"])
        failed = {}
        for name, contender in self._contenders.items():
            try:
                contender.store(values)
            except Exception as error:  # noqa: BLE001 - the others are still measured
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
        return {"failed": failed}

    def close(self) -> None:
        """Stop all processes started by the contenders."""
        for contender in self._contenders.values():
            contender.close()


def main(kind: str) -> None:
    """Serve commands until stdin ends."""
    client_side()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of a library must not mix with the answers.
    worker = Worker(kind)
    try:
        for line in sys.stdin:
            try:
                answer = worker.handle(json.loads(line))
            except Exception as error:  # noqa: BLE001 - the driver decides what a failure means
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        worker.close()


if __name__ == "__main__":
    main(sys.argv[1])

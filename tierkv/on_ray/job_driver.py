"""Hands the partitions of an AI job to tasks of a Ray: ``python -m tierkv.on_ray.job_driver``.

tierkv/parts/job_queue.py starts this program for a job with ``runner = 'ray'`` and writes a request
as JSON to standard input. Each task logs in at a front's SQL door, as any client does, and runs
``RUN AI JOB ... PARTITION ...`` there. The machines of Ray need psycopg, but not TierKV. A task
with a lost machine, front or connection starts again elsewhere and goes on behind the last
checkpoint. The program ends with a partition's error as JSON on standard output, or with nothing.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

RETRY_FOR_S = 300.0
PAUSE_S = 0.5


def run_partition(door: str, statement: str, retry_for_s: float, pause_s: float) -> str:
    """Run one partition through a front; return the error as text, empty for success.

    Args:
        door: DSN of the fronts.
        statement: RUN AI JOB.
        retry_for_s: longest time without a front, or with an earlier session of the partition.
        pause_s: seconds between two tries.
    """
    import psycopg  # On the machine of the task.

    until = time.monotonic() + retry_for_s
    while True:
        began = time.monotonic()
        try:
            with psycopg.connect(door, autocommit=True) as connection:
                connection.execute(statement.encode())
            return ""
        except psycopg.Error as error:
            state = error.sqlstate or "08000"
            passing = state[:2] in ("08", "40", "53", "57") or state == "55006"
            if state in ("57014", "53400") or not passing:
                return f"{state} {error}"
            until = max(until, began + retry_for_s) if time.monotonic() - began > 60 else until
            if time.monotonic() > until:
                return f"{state} {error}"
        time.sleep(pause_s)


def main() -> None:
    """Read a request, run the partitions, and print the first error."""
    import ray

    request: dict[str, Any] = json.load(sys.stdin)
    ray.init(address=request["address"], log_to_driver=False, logging_level=logging.ERROR)
    task = ray.remote(run_partition).options(num_cpus=request["cpus"], max_retries=-1)
    waiting = [
        task.remote(request["door"], text, RETRY_FOR_S, PAUSE_S) for text in request["statements"]
    ]
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1)
        for error in filter(None, ray.get(ended)):
            print(json.dumps({"error": error}), flush=True)
            sys.exit(1)


if __name__ == "__main__":
    main()

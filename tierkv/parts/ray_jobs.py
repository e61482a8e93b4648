"""Jobs with ``runner = 'ray'``: a driver program hands the parts to a Ray that runs already.

The front starts tierkv/on_ray/job_driver.py as a process of its own: Ray's client library starts
threads and signal handlers, which don't belong into a front. Killing the driver ends its tasks, and
with the tasks their sessions at the fronts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from tierkv.dbfront.jobs.job import AiJob
from tierkv.dbfront.jobs.job_commands import RunParts
from tierkv.kvcore.errors import SqlError
from tierkv.settings import FrontSettings

_CPUS_PER_TASK: Final = 0.1
"""A task waits for a front most of the time."""

_MOST_SHOWN: Final = 2_000


def ray_runner(settings: FrontSettings) -> RunParts | None:
    """Return the runner of jobs on Ray; None without ``front.ray_address``."""
    if not settings.ray_address or not settings.ray_door:
        return None

    async def run_parts(job: AiJob, look: Callable[[], Awaitable[None]]) -> None:
        retries = " WITH (retry_failed = true)" if job.options.retry_failed else ""
        request = {
            "address": settings.ray_address,
            "door": settings.ray_door,
            "cpus": _CPUS_PER_TASK,
            "statements": [
                f'RUN AI JOB "{job.name}" PARTITION {part.number}{retries}' for part in job.parts
            ],
        }
        await _run_driver(json.dumps(request).encode(), look)

    return run_parts


async def _run_driver(request: bytes, look: Callable[[], Awaitable[None]]) -> None:
    """Run the driver to its end.

    Raises:
        SqlError: the error of a partition; 58000, Ray is not there.
    """
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tierkv.on_ray.job_driver",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    ending = asyncio.create_task(driver.communicate(request))
    try:
        while not ending.done():
            await look()
        told, trouble = ending.result()
    finally:
        ending.cancel()
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
    if driver.returncode == 0:
        return
    try:
        sqlstate, _, message = json.loads(told or b"")["error"].partition(" ")
    except ValueError:
        lines = trouble.decode("utf-8", "replace").strip().splitlines()
        raise SqlError(
            "jobs can't be run on Ray",
            sqlstate="58000",
            detail=lines[-1][:_MOST_SHOWN] if lines else "",
            hint="Check front.ray_address, and that tierkv[ray] is installed here.",
        ) from None
    raise SqlError(message[:_MOST_SHOWN], sqlstate=sqlstate)

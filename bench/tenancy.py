"""What a loud tenant costs a quiet one in hits and in time, without a limit and with limits.

Run ``python -m bench.tenancy``. One pool node and one compute node with few pages, as processes.
The quiet tenant asks 16 prompts in turn, two a second, alone at first. Then a loud tenant asks
beside it, as fast as four callers can, 120 prompts, whose KV is larger than the pool: without a
limit, with a quarter of the pool's memory, and last with a limit of its calls too, evenly spaced.
Counted are the share of the quiet tenant's prompt
tokens that were not computed, the time of one of its calls in a hundred, and the largest part of
the capacity that the loud one ever used. The same run measures a pool node alone
(bench/tenancy_node.py) and its slot table (bench/namespace_table.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench import namespace_table, tenancy_node
from bench.report import Report, finish, make_parser

_POOL_BYTES = 64 << 20
_CAPACITY = _POOL_BYTES // 4
_LOUD_CALLERS = 4
_QUIET_PROMPTS, _LOUD_PROMPTS = 16, 120
_QUICK_PROMPTS = 4
_QUIET_PAUSE_S = 0.4
_OBEYED_S = 2.0
"""Pool nodes obey a change of a namespace within this time."""
_WORDS = ("pool", "block", "prefix", "node", "cache", "token", "layer", "model", "prompt", "query")
_LOGINS = {
    "TIERKV_FRONT_API_KEYS": json.dumps({"quiet-key": "quiet", "loud-key": "loud"}),
    "TIERKV_FRONT_USERS": json.dumps({"quiet": "a password of the bench"}),
}
_AI_LIMIT = "ALTER TENANT loud SET AI LIMIT (requests = '2/s', max_in_flight = 1, smooth = on)"
_USED = "SELECT used_bytes FROM tierkv.namespaces WHERE name = 'loud'"


class Front:
    """Calls of the two tenants.

    Attributes:
        url: of the REST door.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self._rng = random.Random(seed)
        self._client = httpx.AsyncClient(timeout=60.0)

    def text(self) -> str:
        """Return a new prompt."""
        return " ".join(self._rng.choices(_WORDS, k=150))

    def one_of(self, prompts: Sequence[str]) -> str:
        """Return one of the prompts by chance."""
        return self._rng.choice(prompts)

    async def ask(self, key: str, prompt: str) -> tuple[int, int]:
        """Ask one prompt; return its tokens, and those that were not computed."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        while True:
            reply = await self._client.post(
                f"{self.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )
            if reply.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            await asyncio.sleep(float(reply.headers["retry-after"]))
        usage = reply.raise_for_status().json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    async def used(self) -> int:
        """Return what the loud tenant keeps in the pool; 0 while it has no limit."""
        rows = (await self.run(_USED))["rows"]
        return (rows[0][0] if isinstance(rows[0], list) else rows[0]["used_bytes"]) if rows else 0

    async def run(self, statement: str) -> Any:
        """Run a statement as the quiet tenant, who is the admin; return the reply."""
        reply = await self._client.post(
            f"{self.url}/v1/sql",
            json={"sql": statement},
            headers={"authorization": "Bearer quiet-key"},
        )
        return reply.raise_for_status().json()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--policy", default="default", help="dmp.eviction_policy; or leaf_lru")
    arguments = parser.parse_args(argv)
    report = Report("tenancy")
    rounds, prompts = (1, _QUICK_PROMPTS) if arguments.quick else (5, _QUIET_PROMPTS)
    with running(arguments.policy) as (url, meta):
        asyncio.run(_measure(report, Front(url, arguments.seed), meta, rounds, prompts))
    tenancy_node.measure(report, 2.0 if arguments.quick else 10.0)
    namespace_table.measure(report, arguments.seed, quick=arguments.quick)
    finish(report, arguments.format)


@contextmanager
def running(policy: str) -> Iterator[tuple[str, str]]:
    """Run a cluster until the block ends; yield the REST door and the meta server's address."""
    with tempfile.TemporaryDirectory(prefix="tierkv-tenancy-") as folder:
        processes: list[subprocess.Popen[bytes]] = []

        def start(role: str, *settings: str) -> dict[str, str]:
            words = [word for each in (f"cluster.run_dir={folder}", *settings)
                     for word in ("--set", each)]  # fmt: skip
            with (Path(folder) / f"{role}.log").open("wb") as log:
                command = [sys.executable, "-m", "tierkv", "serve", role, "--node-id", role]
                process = subprocess.Popen(
                    [*command, *words], stdout=subprocess.PIPE, stderr=log,
                    env=os.environ | _LOGINS if role == "front" else None,
                )  # fmt: skip
            processes.append(process)
            assert process.stdout is not None
            while line := process.stdout.readline():
                told: dict[str, str] = json.loads(line)
                if told.get("event") == "ready":
                    return told
            sys.exit(f"bench.tenancy: {role} did not start")

        try:
            meta = start("meta")["address"]
            known = f"cluster.meta_address={meta}"
            start(
                "dmp", known, f"dmp.capacity={_POOL_BYTES}", "dmp.remove_on_stop=true",
                f"dmp.eviction_policy={policy}",
            )  # fmt: skip
            start(
                "compute", known, "compute.l1_capacity=8MiB", "compute.threads=1",
                "compute.block_tokens=16", "compute.load_policy=always",
            )  # fmt: skip
            ports = ("front.pg_port=0", "front.http_port=0")
            front = start("front", known, *ports, "front.database=:memory:", "front.admins=quiet")
            yield f"http://{front['http']}", meta
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(30)


def _limit(meta: str) -> None:
    arguments = ("set", "loud", "--capacity", str(_CAPACITY))
    subprocess.run(
        [sys.executable, "-m", "tierkv", "namespace", *arguments, "--set",
         f"cluster.meta_address={meta}"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


async def _measure(report: Report, front: Front, meta: str, rounds: int, count: int) -> None:
    prompts = [front.text() for _ in range(count)]
    others = [front.text() for _ in range(_LOUD_PROMPTS)]
    await _share(front, prompts, 2)
    _tell(report, "alone", await _share(front, prompts, rounds))
    highest = [0]
    for name in ("without_limit", "with_limit", "with_ai_limit"):
        if name == "with_limit":
            await asyncio.to_thread(_limit, meta)
            await asyncio.sleep(_OBEYED_S)
        if name == "with_ai_limit":
            await front.run(_AI_LIMIT)
        loud = [asyncio.create_task(_flood(front, others)) for _ in range(_LOUD_CALLERS)]
        looking = asyncio.create_task(_look(front, highest))
        await _share(front, prompts, max(3, rounds))  # The loud one fills what it may.
        _tell(report, name, await _share(front, prompts, rounds))
        for task in (*loud, looking):
            task.cancel()
        for error in await asyncio.gather(*loud, looking, return_exceptions=True):
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError("a caller ended early") from error
    report.add("loud_highest_use_of_capacity", highest[0] / _CAPACITY)
    await front.close()


async def _share(front: Front, prompts: Sequence[str], rounds: int) -> tuple[float, float]:
    """Ask prompts in turn, a few a second.

    Returns:
        Share of tokens that were not computed, and the 99th percentile of a call in milliseconds.
    """
    total = cached = 0
    took = []
    for _ in range(rounds):
        for prompt in prompts:
            began = time.perf_counter()
            tokens, hit = await front.ask("quiet-key", prompt)
            took.append(1_000 * (time.perf_counter() - began))
            total, cached = total + tokens, cached + hit
            await asyncio.sleep(_QUIET_PAUSE_S)
    return cached / total, float(np.percentile(took, 99))


def _tell(report: Report, name: str, told: tuple[float, float]) -> None:
    report.add(f"quiet_hit_share_{name}", told[0])
    report.add(f"quiet_p99_{name}_ms", told[1])


async def _flood(front: Front, prompts: Sequence[str]) -> None:
    while True:
        await front.ask("loud-key", front.one_of(prompts))


async def _look(front: Front, highest: list[int]) -> None:
    while True:
        highest[0] = max(highest[0], await front.used())
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()

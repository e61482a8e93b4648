"""What a lost process costs in hits: a meta server, front, pool node or compute node is killed.

Run ``python -m bench.leaving``. A cluster of processes on this machine: three meta servers, two
fronts, and two hosts with a pool node and a compute node each. Callers ask prompts of a fixed set
again and again, more than the compute nodes' pages hold. The share of prompt tokens that were not
computed is counted before the kill, and in steps after it; then the process is started again. A
caller whose front is gone asks the other front.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.report import Report, finish, parse_arguments
from tierkv.processes.cluster_files import segment_prefix

_METAS = ("meta-0", "meta-1", "meta-2")
_FRONTS = ("front-0", "front-1")
_NODES = ("dmp-0", "dmp-1", "compute-0", "compute-1")
_KILLED = ("meta-0", "front-0", "dmp-0", "compute-0")
_CALLERS = 4
_WORDS = ("pool", "block", "prefix", "node", "cache", "token", "layer", "model", "prompt", "query")


class Cluster:
    """Processes of one cluster, each started by name and killed by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, str] = {}
        self.urls: list[str] = []

    def start(self, *names: str) -> None:
        """Start processes together and wait until each is ready."""
        for name in names:
            settings = [word for each in self._settings(name) for word in ("--set", each)]
            role = name.partition("-")[0]
            with (self._folder / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "tierkv", "serve", role, "--node-id", name, *settings],
                    stdout=subprocess.PIPE, stderr=log,
                )  # fmt: skip
        for name in names:
            told = self._ready(name)
            if name in _METAS:
                self._ports[name] = told["address"].rpartition(":")[2]
            if name in _FRONTS:
                self._ports[name] = told["http"].rpartition(":")[2]
        self.urls = [f"http://127.0.0.1:{self._ports[n]}" for n in _FRONTS if n in self._ports]

    def _ready(self, name: str) -> dict[str, str]:
        out = self._processes[name].stdout
        assert out is not None
        while line := out.readline():
            told: dict[str, str] = json.loads(line)
            if told.get("event") == "ready":
                return told
        sys.exit(f"bench.leaving: {name} did not start")

    def _settings(self, name: str) -> Iterator[str]:
        yield f"cluster.run_dir={self._folder / 'run'}"
        yield "cluster.secret=a secret of the bench"
        metas = [f"127.0.0.1:{self._ports[each]}" for each in _METAS if each in self._ports]
        if name in _METAS:
            yield f"meta.port={self._ports.get(name, 0)}"
        else:
            yield f"cluster.meta_address={','.join(metas)}"
        if name in _FRONTS:
            yield from ("front.pg_port=0", f"front.http_port={self._ports.get(name, 0)}")
            yield "front.database=:memory:"
        if name in _NODES:
            yield f"cluster.host=host-{name[-1]}"
            yield from ("dmp.capacity=256MiB", "dmp.remove_on_stop=true")
            yield from ("compute.l1_capacity=8MiB", "compute.threads=1", "compute.block_tokens=16")
            yield "compute.load_policy=always"

    def kill(self, name: str) -> None:
        """Kill -9; a pool node's memory goes with its machine."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        if name.startswith("dmp"):
            prefix = segment_prefix(self._folder / "run")
            Path(f"/dev/shm/{prefix}{name}.seg").unlink()

    def stop(self) -> None:
        """End everything."""
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            process.wait(30)


class Load:
    """Callers, and what they were told, in order of time.

    Attributes:
        answers: (when, prompt tokens, of these not computed).
        failed: statements that no front answered.
    """

    def __init__(self, cluster: Cluster, prompts: Sequence[str], seed: int) -> None:
        self.answers: list[tuple[float, int, int]] = []
        self.failed = 0
        self._cluster = cluster
        self._prompts = prompts
        self._rng = random.Random(seed)

    async def run(self) -> None:
        """Ask until cancelled."""
        async with httpx.AsyncClient(timeout=60.0) as client, asyncio.TaskGroup() as group:
            for number in range(_CALLERS):
                group.create_task(self._caller(client, number))

    async def _caller(self, client: httpx.AsyncClient, number: int) -> None:
        while True:
            body = {"prompt": self._rng.choice(self._prompts), "max_tokens": 1, "temperature": 0}
            urls = self._cluster.urls
            for attempt in range(len(urls)):
                url = urls[(number + attempt) % len(urls)]
                try:
                    reply = await client.post(f"{url}/v1/completions", json=body)
                except httpx.TransportError:
                    continue
                if reply.status_code == httpx.codes.OK:
                    usage = reply.json()["usage"]
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    self.answers.append((time.monotonic(), usage["prompt_tokens"], cached))
                    break
            else:
                self.failed += 1
                await asyncio.sleep(0.1)

    def hit_share(self, begin: float, end: float) -> float:
        """Return the share of prompt tokens between two times that were not computed."""
        some = [(total, cached) for at, total, cached in self.answers if begin <= at < end]
        return sum(cached for _, cached in some) / max(1, sum(total for total, _ in some))


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    report = Report("leaving")
    rng = random.Random(arguments.seed)
    prompts = [" ".join(rng.choices(_WORDS, k=120)) for _ in range(60)]
    step_s, steps = (2.0, 2) if arguments.quick else (5.0, 6)
    with running() as cluster:
        asyncio.run(
            _measure(report, cluster, Load(cluster, prompts, arguments.seed), step_s, steps)
        )
    finish(report, arguments.format)


@contextmanager
def running() -> Iterator[Cluster]:
    """Run the cluster until the block ends."""
    with tempfile.TemporaryDirectory(prefix="tierkv-leaving-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start(*_METAS)
            cluster.start(*_NODES, *_FRONTS)
            yield cluster
        finally:
            cluster.stop()


async def _measure(report: Report, cluster: Cluster, load: Load, step_s: float, steps: int) -> None:
    calling = asyncio.create_task(load.run())
    await asyncio.sleep(4 * step_s)  # The pool fills.
    for name in _KILLED:
        began = time.monotonic()
        await asyncio.sleep(step_s)
        killed = time.monotonic()
        cluster.kill(name)
        await asyncio.sleep(steps * step_s)
        role = name.partition("-")[0]
        report.add(f"{role}_hit_share_before", load.hit_share(began, killed))
        for step in range(steps):
            at = killed + step * step_s
            share = load.hit_share(at, at + step_s)
            report.add(f"{role}_hit_share_after_{(step + 1) * step_s:.0f}s", share)
        await asyncio.to_thread(cluster.start, name)
        await asyncio.sleep(2 * step_s)
    calling.cancel()
    await asyncio.wait([calling])
    report.add("answers", len(load.answers))
    report.add("failed", load.failed)
    if error := None if calling.cancelled() else calling.exception():
        raise error


if __name__ == "__main__":
    main()

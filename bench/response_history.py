"""Turns of a kept conversation, against clients that send the whole history with each turn.

Run ``python -m bench.response_history``. A cluster of real processes (``tierkv up``, one compute
node, the shipped model) answers the same conversations in two ways, turn by turn in alternation:

- ``kept``: ``/v1/responses`` with ``previous_response_id``, and the new message alone;
- ``sent``: ``/v1/responses`` with ``store = false``, and all messages so far.

The answers must be the same. Measured are the bytes of the requests, the processor time of the
front, and the time to the first text.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from bench.batch import cluster
from bench.report import Report, finish, make_parser
from bench.sessions import _WORDS

_FIRST_WORDS, _MORE_WORDS = 120, 40
_LISTENS = "0A"  # State of a socket in /proc/net/tcp.


@dataclass(slots=True)
class Measured:
    """What the turns of one way took."""

    request_bytes: int = 0
    cpu_s: float = 0.0
    first_s: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    arguments = parser.parse_args(argv)
    talks, turns = (2, 4) if arguments.quick else (12, 16)
    rng = random.Random(arguments.seed)
    report = Report("response_history")
    report.add("turns", talks * turns)
    with cluster(1) as (_, url):
        port = int(url.rpartition(":")[2].partition("/")[0])
        found = asyncio.run(_run(url, _pid_of(port), rng, talks, turns))
    for way, told in found.items():
        report.add(f"{way}_request_bytes", told.request_bytes / (talks * turns))
        report.add(f"{way}_front_cpu_s", told.cpu_s / (talks * turns))
        report.add(f"{way}_first_token_s", statistics.median(told.first_s))
    for what in ("request_bytes", "front_cpu_s", "first_token_s"):
        report.add(f"kept_to_sent_{what}", _ratio(report, what))
    finish(report, arguments.format)


def _ratio(report: Report, what: str) -> float:
    return report.metrics[f"kept_{what}"] / max(report.metrics[f"sent_{what}"], 1e-9)


async def _run(
    url: str, pid: int, rng: random.Random, talks: int, turns: int
) -> dict[str, Measured]:
    found: dict[str, Measured] = defaultdict(Measured)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for number in range(talks):
            history: list[Any] = []
            previous = None
            for turn in range(turns):
                count = _MORE_WORDS if turn else _FIRST_WORDS
                words = " ".join(rng.choice(_WORDS) for _ in range(count))
                said = {"role": "user", "content": f"Talk {number}, turn {turn}: {words}."}
                asks: dict[str, dict[str, Any]] = {
                    "kept": {"input": [said], "previous_response_id": previous},
                    "sent": {"input": [*history, said], "store": False},
                }
                answers = {}
                # The second of a turn finds the prompt of the first: each way begins as often.
                for way in sorted(asks, reverse=bool(turn % 2)):
                    fields = {key: value for key, value in asks[way].items() if value is not None}
                    answers[way] = await _asked(client, pid, fields, found[way])
                if answers["kept"][0] != answers["sent"][0]:
                    raise AssertionError("the two ways give other answers")
                text, previous = answers["kept"]
                history += [said, {"role": "assistant", "content": text}]
    return dict(found)


async def _asked(
    client: openai.AsyncOpenAI, pid: int, fields: dict[str, Any], measured: Measured
) -> tuple[str, str]:
    """Ask for one turn; return its text and the id of the response."""
    fields = {"model": "tierkv-demo", "temperature": 0, "max_output_tokens": 8} | fields
    measured.request_bytes += len(json.dumps(fields | {"stream": True}))
    cpu_s, began = _cpu_s(pid), time.perf_counter()
    text, response_id, is_first = "", "", True
    async for event in await client.responses.create(
        **fields, stream=True, extra_body={"ignore_eos": True}
    ):
        if event.type == "response.output_text.delta":
            if is_first:
                measured.first_s.append(time.perf_counter() - began)
            is_first = False
            text += event.delta
        elif event.type == "response.incomplete":
            response_id = event.response.id
    measured.cpu_s += _cpu_s(pid) - cpu_s
    return text, response_id


def _pid_of(port: int) -> int:
    """Return the process that listens on a port of 127.0.0.1."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    inodes = {
        f"socket:[{f[9]}]" for f in lines if f[1].endswith(f":{port:04X}") and f[3] == _LISTENS
    }
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(each) in inodes for each in folder.iterdir()):
                return int(folder.parent.name)
        except OSError:
            continue
    raise RuntimeError(f"no process listens on port {port}")


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process's threads, in nanoseconds' resolution."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


if __name__ == "__main__":
    main()

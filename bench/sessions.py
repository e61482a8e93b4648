"""Conversations of agents in little memory, with hints and without; and the cost of tools.

Run ``python -m bench.sessions``. A cluster of real processes (``tierkv up``, one compute node, the
shipped model, no pool) has memory for a tenth of the conversations' KV. Agents take turns of
growing prompts; between turns each pauses as for a tool. The same conversations run, with the same
pauses, once for each way:

- ``told``: the client says when the next turn comes (``reuse.next_turn_s``);
- ``learned``: the client names the conversation only (``session_id``);
- ``unknown``: the client says nothing;
- ``lru``: as ``unknown``, and pages are evicted least recently used first.

The answers must be the same in each way. Then the same answer is generated with a tool's grammar
and without.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from bench.batch import cluster
from bench.report import Report, finish, make_parser

_KV_BYTES_PER_TOKEN = 2_944  # The shipped model's, with the block's header.
_FIRST_WORDS, _MORE_WORDS = 400, 60
_TOKENS_PER_WORD = 1.6
_LEAST_BYTES = 2_100 * _KV_BYTES_PER_TOKEN  # Pages for the longest conversation.
_WORDS = (
    "parcel", "river", "kettle", "station", "signature", "lamp", "order", "blender", "late",
    "refund", "city", "agent",
)  # fmt: skip
_WAYS = ("told", "learned", "unknown", "lru")


@dataclass(frozen=True, slots=True)
class Turn:
    """The text that a turn adds, and the pause after it in seconds."""

    text: str
    pause_s: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--sessions", type=int, default=0, help="conversations at a time")
    parser.add_argument("--turns", type=int, default=0, help="turns of each conversation")
    arguments = parser.parse_args(argv)
    sessions = arguments.sessions or (8 if arguments.quick else 48)
    turns = arguments.turns or (2 if arguments.quick else 6)
    mean_s = 1.0 if arguments.quick else 8.0
    rng = random.Random(arguments.seed)
    talks = [_talk(rng, number, turns, mean_s) for number in range(sessions)]
    words = sum(len(turn.text.split()) for talk in talks for turn in talk)
    wanted = int(words * _TOKENS_PER_WORD) * _KV_BYTES_PER_TOKEN
    pages = max(_LEAST_BYTES, wanted // 10)
    report = Report("sessions")
    report.add("sessions", sessions)
    report.add("wanted_bytes", wanted)
    report.add("memory_share", pages / wanted)
    found: dict[str, list[str]] = {}
    for way in _WAYS:
        settings = [f"compute.l1_capacity={pages}"]
        if way == "lru":
            settings.append("compute.eviction_policy=leaf_lru")
        with cluster(1, *settings, pool_nodes=0) as (_, url):
            first_s, found[way] = asyncio.run(_run(url, talks, way))
            if way == "unknown":
                asyncio.run(_tools(report, url, 3 if arguments.quick else 15))
        report.add(f"{way}_first_token_s", statistics.median(first_s))
        report.add(f"{way}_first_token_p95_s", statistics.quantiles(first_s, n=20)[-1])
    for way in _WAYS[1:]:
        if found[way] != found["told"]:
            raise AssertionError(f"{way}: other answers")
    for way in ("unknown", "lru"):
        ratio = report.metrics[f"{way}_first_token_s"] / report.metrics["told_first_token_s"]
        report.add(f"told_speedup_over_{way}", ratio)
    finish(report, arguments.format)


def _talk(rng: random.Random, number: int, turns: int, mean_s: float) -> list[Turn]:
    talk = []
    for turn in range(turns):
        count = _MORE_WORDS if turn else _FIRST_WORDS
        text = " ".join(rng.choice(_WORDS) for _ in range(count))
        pause_s = min(4 * mean_s, max(mean_s / 4, rng.expovariate(1 / mean_s)))
        talk.append(Turn(f"Agent {number}, step {turn}: {text}.", pause_s))
    return talk


async def _run(
    url: str, talks: Sequence[Sequence[Turn]], way: str
) -> tuple[list[float], list[str]]:
    """Run all conversations; return the later turns' times to the first token, and answers."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        each = [_converse(client, number, talk, way) for number, talk in enumerate(talks)]
        ended = await asyncio.gather(*each)
    return [s for times, _ in ended for s in times], [a for _, answers in ended for a in answers]


async def _converse(
    client: openai.AsyncOpenAI, number: int, talk: Sequence[Turn], way: str
) -> tuple[list[float], list[str]]:
    messages: list[Any] = []
    first_s, answers = [], []
    await asyncio.sleep(0.2 * number)
    for step, turn in enumerate(talk):
        messages.append({"role": "user", "content": turn.text})
        more: dict[str, Any] = {}
        if way in ("told", "learned"):
            more["session_id"] = f"agent-{number}"
        if way == "told":
            last = step == len(talk) - 1
            more["reuse"] = {"next_turn": False} if last else {"next_turn_s": turn.pause_s}
        began = time.perf_counter()
        stream = await client.chat.completions.create(
            model="tierkv-demo", messages=messages, temperature=0, max_tokens=8, stream=True,
            extra_body={**more, "ignore_eos": True},
        )  # fmt: skip
        answer = ""
        async for chunk in stream:
            if not answer and chunk.choices and chunk.choices[0].delta.content and step:
                first_s.append(time.perf_counter() - began)
            answer += (chunk.choices and chunk.choices[0].delta.content) or ""
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer})
        await asyncio.sleep(turn.pause_s)
    return first_s, answers


async def _tools(report: Report, url: str, rounds: int) -> None:
    """Measure the time per generated token, with a grammar of calls and without, in turns.

    Tokens are sampled: greedy answers without a grammar are guessed ahead, several per step.
    """
    text = {"type": "string", "minLength": 60, "maxLength": 60}
    schema = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    tools: list[Any] = [{"type": "function", "function": {"name": "say", "parameters": schema}}]
    ways: dict[str, list[float]] = {"free": [], "tool": []}
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for _ in range(rounds):
            for way, seconds in ways.items():
                fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
                if way == "free":
                    fields = {"tool_choice": "none", "extra_body": {"ignore_eos": True}}
                began = time.perf_counter()
                answer = await client.chat.completions.create(
                    model="tierkv-demo", temperature=1, seed=1, max_tokens=64, tools=tools,
                    messages=[{"role": "user", "content": "Say something."}], **fields,
                )  # fmt: skip
                assert answer.usage is not None
                seconds.append((time.perf_counter() - began) / answer.usage.completion_tokens)
    for way, seconds in ways.items():
        report.add(f"{way}_token_s", statistics.median(seconds))
    report.add("tool_token_ratio", report.metrics["tool_token_s"] / report.metrics["free_token_s"])


if __name__ == "__main__":
    main()

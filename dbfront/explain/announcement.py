"""The NOTICE before a large statement's calls are made: how many, how many tokens, how long.

Made by dbfront/statement/ai_statement.py when a statement passes ``tierkv.notice_calls``. Where all
calls are known at once it estimates from a sample of them; a stream's calls come in windows, so it
tells what they took so far. No model is asked.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import Notice
from tierkv.dbfront.explain.estimate import Estimate
from tierkv.kvcore.errors import TierKVError

MOST_SAMPLED: Final = 200
"""Calls whose prompts are made and weighed; the others are taken to be like them."""

_HINT: Final = (
    "SET tierkv.max_calls refuses large statements; SET tierkv.notice_calls = 0 says nothing."
)


async def announce_batch(calls: int, weighing: Awaitable[Estimate]) -> Notice:
    """Say what the calls of a statement take that are all known now."""
    try:
        estimate = await weighing
    except TierKVError:
        # Whatever it is, the calls themselves run into it and say so.
        return _notice(f"this statement makes at least {calls:,} AI calls")
    tokens = round(estimate.total.prompt_tokens)
    return _notice(
        f"this statement makes at least {calls:,} AI calls: about {tokens:,} prompt tokens, "
        f"{_time(estimate.seconds)}"
    )


def announce_stream(calls: int, stats: AiStats) -> Notice:
    """Say what a stream took so far; how many rows are left is not known."""
    seconds = stats.engine_s + stats.llm_s
    return _notice(
        f"this statement has come to {calls:,} AI calls and goes on; so far "
        f"{stats.prompt_tokens:,} prompt tokens in {_time(seconds)}"
    )


def _notice(message: str) -> Notice:
    return Notice("NOTICE", message, detail="A cancel (Ctrl-C) stops it.", hint=_HINT)


def _time(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} minutes"

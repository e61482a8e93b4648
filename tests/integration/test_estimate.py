"""EXPLAIN (AI_ESTIMATE) over a whole cluster in one process: what it foretells is what happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fix_text import text_call
from tierkv.config import load_config
from tierkv.dbfront.contracts import ClientInfo, Message
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.embedded import EmbeddedCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DEADLINE_S = 60.0
FLAGS = {
    "dmp.capacity": "64MiB",
    "compute.threads": 1,
    "compute.block_tokens": 16,
    "front.max_calls": 100,
}
TABLE = """
CREATE TABLE notes AS SELECT i AS id, 'Customer: ' || n || '. Product: ' || p || '. Order: '
  || (1000 + i) || '. City: ' || c || '. The parcel was sent by night train.' AS body
  FROM (VALUES (1, 'Mia Brandt', 'kettle', 'Porto'), (2, 'Tom Weber', 'lamp', 'Vienna'),
    (3, 'Ana Ruiz', 'blender', 'Rome'), (4, 'Jonas Ortiz', 'radio', 'Oslo')) v(i, n, p, c)
"""
QUERY = (
    "SELECT id, ai_generate(body || E'\\nQuestion: What did the customer buy?'), "
    "ai_generate(body || E'\\nQuestion: Where does the customer live?') FROM notes"
)


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    cluster = EmbeddedCluster(load_config(None, flags=FLAGS))
    await cluster.start()
    yield cluster
    await cluster.stop()


async def open_session(cluster: EmbeddedCluster, user: str) -> DuckDbSession:
    session = await cluster.front.database.open_session(ClientInfo(user=user))
    await session.execute(f"CREATE OR REPLACE {TABLE.strip().removeprefix('CREATE ')}")
    await session.execute("SET tierkv.max_tokens = 8")
    return session


async def ai_plan(session: DuckDbSession, options: str, query: str = QUERY) -> dict[str, Any]:
    result = await session.execute(f"EXPLAIN ({options}, FORMAT JSON) {query}")
    plan: dict[str, Any] = json.loads(result.rows[0][1])["AI Plan"]
    return plan


async def estimate_when_cached(session: DuckDbSession, tokens: int) -> dict[str, Any]:
    """Estimate until the directory has heard of that many cached tokens."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            told = (await ai_plan(session, "AI_ESTIMATE"))["Estimate"]
            if sum(told["Cached Tokens"].values()) >= tokens:
                return dict(told)
            await asyncio.sleep(0.01)


async def test_what_is_estimated_is_what_happens(cluster: EmbeddedCluster) -> None:
    session = await open_session(cluster, "ann")
    cold = await ai_plan(session, "AI_ESTIMATE")
    generated = cluster.front.generation.live
    assert not generated
    first = await ai_plan(session, "ANALYZE")
    told, took = cold["Estimate"], first["Totals"]
    assert sum(told["Cached Tokens"].values()) == 0
    for name in ("Distinct Calls", "Requests", "Prompt Tokens", "Shared Tokens"):
        assert told[name] == took[name], name
    assert told["Distinct Calls"] == 8
    # Both questions about a note share it: the second finds what the first computed.
    assert told["Shared Tokens"] > 0
    assert told["Expected Hit Tokens"] == took["Hit Tokens"]
    for before, after in zip(cold["Calls"], first["Calls"], strict=True):
        assert before["Prompt Tokens"] == after["Prompt Tokens"]
        assert before["Distinct Calls"] == after["Distinct Calls"]

    await cluster.nodes.settle()
    full_blocks = sum(
        tokens // 16 * 16 for tokens in await prompt_lengths(cluster, session, took["Requests"])
    )
    warm = await estimate_when_cached(session, full_blocks)
    second = (await ai_plan(session, "ANALYZE"))["Totals"]
    # The directory knows whole blocks; L1 has the rest of each prompt, too.
    assert sum(second["Hit Tokens"].values()) == sum(
        await prompt_lengths(cluster, session, took["Requests"])
    )
    expected = sum(warm["Expected Hit Tokens"].values())
    assert full_blocks <= expected <= sum(second["Hit Tokens"].values())
    assert sum(second["Hit Tokens"].values()) > sum(took["Hit Tokens"].values())
    assert warm["Prompt Tokens"] == second["Prompt Tokens"]
    assert warm["Seconds"] > 0
    # It has learned by now how long such answers are.
    assert 0 < warm["Answer Tokens"] <= 8 * 8
    assert any(text.startswith("answers as long as earlier ones") for text in warm["Assumed"])


async def test_what_another_tenant_cached_is_not_there(cluster: EmbeddedCluster) -> None:
    ann = await open_session(cluster, "ann")
    await ann.execute(QUERY)
    await cluster.nodes.settle()
    assert sum((await estimate_when_cached(ann, 16))["Cached Tokens"].values()) > 0
    bob = await open_session(cluster, "bob")
    told = (await ai_plan(bob, "AI_ESTIMATE"))["Estimate"]
    assert sum(told["Cached Tokens"].values()) == 0


async def prompt_lengths(cluster: EmbeddedCluster, session: DuckDbSession, count: int) -> list[int]:
    """Return how long the prompts are but for the token that is always computed."""
    rows = (await session.execute("SELECT body FROM notes ORDER BY id")).rows
    lengths = []
    for (body,) in rows:
        for question in ("What did the customer buy?", "Where does the customer live?"):
            call = text_call(
                messages=(Message("user", f"{body}\nQuestion: {question}"),),
                tenant="ann",
                max_tokens=8,
            )
            prepared = await cluster.front.generation.prepare(call)
            lengths.append(len(prepared.request.token_ids) - 1)
    assert len(lengths) == count
    return lengths

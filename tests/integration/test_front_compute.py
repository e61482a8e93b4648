"""The front over real compute nodes: text in, text out, the same whoever answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from tests.fix_model import node_config, tiny_config
from tests.fix_text import text_call, write_model_folder
from tierkv.compute.client import LocalComputeClient
from tierkv.compute.config import RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.dbfront.contracts import Message, TextCall
from tierkv.dbfront.generation.generation import Generation
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.server import HttpServer
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView

pytestmark = pytest.mark.integration

TALK = (Message("system", "Answer in few words, please."), Message("user", "Who are you?"))


@asynccontextmanager
async def nodes_for(folder: Path, *roles: NodeRole) -> AsyncIterator[list[ComputeNode]]:
    nodes = [
        ComputeNode(
            node_config(
                node_id=NodeId(f"c{number}"),
                role=role,
                random_model=RandomModelSpec(tiny_config(vocab_size=261), seed=3),
                tokenizer_folder=str(folder),
            ),
            incarnation=Incarnation(1),
        )
        for number, role in enumerate(roles, start=1)
    ]
    for node in nodes:
        await node.start()
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.stop()


@asynccontextmanager
async def front_over(*nodes: ComputeNode) -> AsyncIterator[tuple[Generation, Dispatcher]]:
    view = ClusterView(fixed=[LocalComputeClient(node) for node in nodes])
    dispatcher = Dispatcher(view, config=SchedulerConfig(backoff_initial_s=0.01))
    await dispatcher.start()
    try:
        yield Generation(dispatcher), dispatcher
        dispatcher.state.check_invariants()
    finally:
        await dispatcher.stop()


def call(**changes: object) -> TextCall:
    fields = {"messages": TALK, "max_tokens": 40, "ignore_eos": True}
    return text_call(**(fields | changes))


async def text_of(generation: Generation, asked: TextCall) -> tuple[str, int]:
    answer = await generation.answer(await generation.prepare(asked))
    return answer.text, answer.usage.hit_tokens.total


async def test_the_cache_is_seen_in_the_usage_and_not_in_the_text(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    async with nodes_for(folder, NodeRole.COMPUTE) as nodes, front_over(*nodes) as (front, _):
        cold, no_hits = await text_of(front, call(cache=False))
        first, _ = await text_of(front, call())
        warm, hits = await text_of(front, call())
        assert cold == first == warm
        assert (no_hits, hits >= 32) == (0, True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_node_that_stops_mid_answer_is_replaced_with_the_same_text(
    tmp_path: Path, temperature: float
) -> None:
    folder = write_model_folder(tmp_path)
    asked = call(temperature=temperature, seed=11, max_tokens=200)
    roles = (NodeRole.COMPUTE, NodeRole.COMPUTE)
    async with nodes_for(folder, *roles) as nodes, front_over(*nodes) as (front, dispatcher):
        want, _ = await text_of(front, asked)
        prepared = await front.prepare(asked)
        got, stopping = "", None
        async for event in front.stream(prepared):
            got += event.text
            if stopping is None and len(got) > 3:
                victim = next(n for n in nodes if n.config.node_id == event.node_id)
                stopping = asyncio.create_task(victim.stop())
        assert stopping is not None
        await stopping
        assert got == want
        assert dispatcher.snapshot().dispatched == 3


async def test_prefill_and_decode_nodes_answer_as_one(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    async with nodes_for(folder, NodeRole.COMPUTE) as nodes, front_over(*nodes) as (front, _):
        want, _ = await text_of(front, call())
    roles = (NodeRole.PREFILL, NodeRole.DECODE)
    async with nodes_for(folder, *roles) as nodes, front_over(*nodes) as (front, dispatcher):
        assert (await text_of(front, call()))[0] == want
        assert dispatcher.snapshot().handoffs == 1


async def test_the_openai_client_talks_to_a_real_model(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    async with nodes_for(folder, NodeRole.COMPUTE) as nodes, front_over(*nodes) as (front, _):
        want, _ = await text_of(front, call(cache=False))
        server = HttpServer(HttpConfig(port=0), front)
        port = await server.start()
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any")
        try:
            answers = [
                await client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": m.role, "content": m.content} for m in TALK],
                    max_tokens=40,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(2)
            ]
            embedded = await client.embeddings.create(model="tiny", input=["Who?", "You?"])
        finally:
            await client.close()
            await server.stop()
        assert [answer.choices[0].message.content for answer in answers] == [want, want]
        cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
        assert cached[1] >= 32
        vectors = [
            (await front.answer(await front.prepare(text_call(prompt=text, embed=True)))).embedding
            for text in ("Who?", "You?")
        ]
        assert [each.embedding for each in embedded.data] == [
            pytest.approx(v, abs=1e-4) for v in vectors
        ]
        assert vectors[0] != vectors[1]

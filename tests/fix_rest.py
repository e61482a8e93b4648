"""REST over real compute nodes in this process, for other people's clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai

from tests.fix_model import node_config, tiny_config
from tierkv.compute.client import LocalComputeClient
from tierkv.compute.config import RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.dbfront.generation.generation import Generation
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.server import HttpServer
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView


@asynccontextmanager
async def rest_cluster(
    folder: Path, count: int = 1
) -> AsyncIterator[tuple[Generation, list[ComputeNode]]]:
    """Start compute nodes with a random byte-level model, and a generator over them."""
    model = RandomModelSpec(
        tiny_config(vocab_size=261, eos_token_id=1, max_position_embeddings=4_096), seed=3
    )
    nodes = [
        ComputeNode(
            node_config(
                node_id=NodeId(f"c{number}"),
                random_model=model,
                tokenizer_folder=str(folder),
                l1_pages=500,
            ),
            incarnation=Incarnation(1),
        )
        for number in range(count)
    ]
    for node in nodes:
        await node.start()
    view = ClusterView(fixed=[LocalComputeClient(node) for node in nodes])
    dispatcher = Dispatcher(view, config=SchedulerConfig(backoff_initial_s=0.01))
    await dispatcher.start()
    try:
        yield Generation(dispatcher), nodes
        dispatcher.state.check_invariants()
    finally:
        await dispatcher.stop()
        for node in nodes:
            await node.stop()


@asynccontextmanager
async def rest_door(generation: Generation) -> AsyncIterator[str]:
    """Serve REST; yields the address."""
    server = HttpServer(HttpConfig(port=0), generation)
    port = await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def openai_client(generation: Generation) -> AsyncIterator[openai.AsyncOpenAI]:
    """Serve REST to a client of OpenAI's library."""
    async with (
        rest_door(generation) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client

"""The front over compute nodes behind real gRPC, found through a real directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fix_model import node_config, tiny_config
from tests.fix_text import text_call, write_model_folder
from tierkv.compute.client import connect_compute
from tierkv.compute.config import RandomModelSpec
from tierkv.dbfront.contracts import Message, TextAnswer
from tierkv.dbfront.generation.generation import Generation
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.parts.compute_part import ComputePart
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView

pytestmark = pytest.mark.integration

PATIENT = SchedulerConfig(refresh_interval_s=0.1, backoff_initial_s=0.05, locate_timeout_s=5.0)


class Cluster:
    """Two compute nodes on two hosts, a directory, and a front."""

    def __init__(self, folder: Path) -> None:
        self.meta = LocalMeta(MetaConfig())
        self.parts = [
            ComputePart(
                node_config(
                    node_id=NodeId(f"c{number}"),
                    host=HostId(f"h{number}"),
                    random_model=RandomModelSpec(tiny_config(vocab_size=261), seed=3),
                    tokenizer_folder=str(folder),
                    # Many passes for the instruction, one for a question: a node that is slow by
                    # chance is still cheaper with the instruction than the other without.
                    max_batch_tokens=16,
                ),
                self.meta,
            )
            for number in (1, 2)
        ]
        view = ClusterView(
            meta=self.meta, connect=lambda info: connect_compute(info.control_address)
        )
        self.dispatcher = Dispatcher(view, meta=self.meta, config=PATIENT)
        self.front = Generation(self.dispatcher)

    async def ask(self, question: str, **changes: object) -> TextAnswer:
        instruction = "Read the record below and answer with one word only, please. " * 5
        call = text_call(
            **{
                "messages": (Message("system", instruction), Message("user", question)),
                "max_tokens": 30,
                "ignore_eos": True,
            }
            | changes
        )
        answer = await self.front.answer(await self.front.prepare(call))
        for part in self.parts:
            if part.node.config.node_id == answer.node_id:
                await part.flush()
        return answer


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(write_model_folder(folder))
    for part in cluster.parts:
        await part.start(listen="127.0.0.1:0")
    await cluster.dispatcher.start()
    try:
        yield cluster
        cluster.dispatcher.state.check_invariants()
        assert not cluster.dispatcher.state.requests
    finally:
        await cluster.dispatcher.stop()
        for part in cluster.parts:
            await part.stop()
        await cluster.meta.close()


async def test_questions_go_where_their_prefix_is_and_tenants_do_not_share(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        cold = await cluster.ask("Who wrote it?", cache=False)
        first = await cluster.ask("Who wrote it?")
        assert (first.text, first.usage.hit_tokens.total) == (cold.text, 0)
        for question in ("Who wrote it?", "When was it?", "Where is it?"):
            again = await cluster.ask(question)
            assert again.node_id == first.node_id
            assert again.usage.hit_tokens.l1 >= 280
        stranger = await cluster.ask("Who wrote it?", tenant="stranger")
        assert (stranger.text, stranger.usage.hit_tokens.total) == (cold.text, 0)
        assert not cluster.dispatcher.snapshot().cache_errors


async def test_a_node_that_stops_mid_answer_is_replaced_over_the_wire(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        call = text_call(prompt="Once upon a time", max_tokens=300, ignore_eos=True)
        want = await cluster.front.answer(await cluster.front.prepare(call))
        prepared = await cluster.front.prepare(call)
        got, dying = "", None
        async for event in cluster.front.stream(prepared):
            got += event.text
            if dying is None and got:
                (part,) = (p for p in cluster.parts if p.node.config.node_id == event.node_id)
                dying = asyncio.create_task(part.node.stop())
        assert dying is not None
        await dying
        assert got == want.text
        assert dict(cluster.dispatcher.snapshot().cache_errors) == {"transport_error": 1}

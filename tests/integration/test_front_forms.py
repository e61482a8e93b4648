"""Labels, embeddings and JSON over real nodes behind gRPC: the same answers whoever gives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from tests.fix_model import running_node, tiny_config
from tests.fix_pool import MemoryPoolNode
from tests.fix_text import text_call, write_model_folder
from tierkv.compute.client import connect_compute
from tierkv.compute.config import RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.compute.service import serve_node
from tierkv.dbfront.contracts import Message, TextAnswer
from tierkv.dbfront.generation.generation import Generation
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import FinishReason
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView

pytestmark = pytest.mark.integration

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 60}, "good": {"type": "boolean"}},
        "required": ["name", "good"],
        "additionalProperties": False,
    }
)
LABELS = ("good", "great", "bad", "go")


@asynccontextmanager
async def cluster(
    folder: Path, *roles: NodeRole
) -> AsyncIterator[tuple[Generation, Dispatcher, list[ComputeNode]]]:
    pool, nodes, clients = MemoryPoolNode(), [], []
    async with AsyncExitStack() as stack:
        for number, role in enumerate(roles):
            node = await stack.enter_async_context(
                running_node(
                    pool,
                    node_id=NodeId(f"c{number}"),
                    role=role,
                    random_model=RandomModelSpec(
                        tiny_config(vocab_size=261, eos_token_id=1), seed=3
                    ),
                    tokenizer_folder=str(folder),
                )
            )
            bound = await serve_node(node, "127.0.0.1:0")
            stack.push_async_callback(bound.server.stop, 0)
            clients.append(connect_compute(bound.address))
            nodes.append(node)
        dispatcher = Dispatcher(
            ClusterView(fixed=clients), config=SchedulerConfig(backoff_initial_s=0.01)
        )
        await dispatcher.start()
        stack.push_async_callback(dispatcher.stop)
        yield Generation(dispatcher), dispatcher, nodes
        dispatcher.state.check_invariants()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


async def ask(front: Generation, text: str = "Who is it?", **changes: object) -> TextAnswer:
    call = text_call(messages=(Message("user", text),), max_tokens=200, **changes)
    return await front.answer(await front.prepare(call))


async def test_one_node_and_a_split_cluster_answer_alike(folder: Path) -> None:
    forms: list[dict[str, object]] = [{"json_schema": SCHEMA}, {"labels": LABELS}, {"embed": True}]
    async with cluster(folder, NodeRole.COMPUTE) as (front, _, _):
        want = [await ask(front, **form) for form in forms]
        jsonschema.validate(json.loads(want[0].text), json.loads(SCHEMA))
        assert want[0].finish_reason is FinishReason.STOP
        assert want[1].text in LABELS
        again = [await ask(front, **form) for form in forms]
        assert [(a.text, a.label_probabilities) for a in again[:2]] == [
            (a.text, pytest.approx(a.label_probabilities, abs=1e-5)) for a in want[:2]
        ]
        assert again[2].embedding == pytest.approx(want[2].embedding, abs=1e-5)
        assert all(answer.usage.hit_tokens.total >= 8 for answer in again)
    async with cluster(folder, NodeRole.PREFILL, NodeRole.DECODE) as (front, dispatcher, nodes):
        got = [await ask(front, **form) for form in forms]
        assert dispatcher.snapshot().handoffs == 1, "only JSON has anything to decode"
        assert got[0].text == want[0].text and got[1].text == want[1].text
        assert got[1].label_probabilities == pytest.approx(want[1].label_probabilities, abs=1e-5)
        assert got[2].embedding == pytest.approx(want[2].embedding, abs=1e-5)
        assert {got[1].node_id, got[2].node_id} == {nodes[0].config.node_id}


async def test_a_node_lost_in_the_middle_of_json_is_replaced(folder: Path) -> None:
    roles = (NodeRole.COMPUTE, NodeRole.COMPUTE)
    async with cluster(folder, *roles) as (front, dispatcher, nodes):
        want = await ask(front, json_schema=SCHEMA)
        call = text_call(messages=(Message("user", "Who is it?"),), max_tokens=200,
                        json_schema=SCHEMA)  # fmt: skip
        got, stopping = "", None
        async for event in front.stream(await front.prepare(call)):
            got += event.text
            if stopping is None and len(got) > 3:
                victim = next(n for n in nodes if n.config.node_id == event.node_id)
                stopping = asyncio.create_task(victim.stop())
        assert stopping is not None
        await stopping
        assert got == want.text
        assert dispatcher.snapshot().dispatched == 3


async def test_all_kinds_of_answers_at_once(folder: Path) -> None:
    texts = [f"Number {number} of some, please" for number in range(6)]
    async with cluster(folder, NodeRole.COMPUTE, NodeRole.COMPUTE) as (front, _, _):
        plain = [(await ask(front, text)).text for text in texts]
        answers = await asyncio.gather(
            *(ask(front, text) for text in texts),
            *(ask(front, text, json_schema=SCHEMA) for text in texts),
            *(ask(front, text, labels=LABELS) for text in texts),
            *(ask(front, text, embed=True) for text in texts),
        )
    assert [answer.text for answer in answers[:6]] == plain
    for answer in answers[6:12]:
        jsonschema.validate(json.loads(answer.text), json.loads(SCHEMA))
    assert all(answer.text in LABELS for answer in answers[12:18])
    assert all(len(answer.embedding) == 64 for answer in answers[18:])


async def test_a_schema_refused_by_the_node_comes_back_as_it_is(folder: Path) -> None:
    """A front without the compiler leaves the check to the node."""
    async with cluster(folder, NodeRole.COMPUTE) as (front, dispatcher, _):
        prepared = await front.prepare(
            text_call(messages=(Message("user", "Who?"),), json_schema=SCHEMA, max_tokens=200)
        )
        broken = replace(prepared.request, guide='{"not": {}}')
        with pytest.raises(UdfArgumentError, match="not"):
            async for _ in dispatcher.submit(broken, model=prepared.model):
                pass
        assert (await ask(front, json_schema=SCHEMA)).finish_reason is FinishReason.STOP

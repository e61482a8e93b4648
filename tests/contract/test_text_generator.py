"""The TextGenerator contract (dbfront/contracts.py), sentence by sentence.

``Generation`` answers over a compute node with a tiny model; the instant generator of
tests/fix_sql.py is trusted in the SQL tests because it passes too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fix_model import running_node, tiny_config
from tests.fix_sql import InstantGenerator
from tests.fix_text import text_call, write_model_folder
from tierkv.compute.client import LocalComputeClient
from tierkv.compute.config import RandomModelSpec
from tierkv.dbfront.calls.question_runner import SortedCalls
from tierkv.dbfront.contracts import CallPlan, Message, TextCall, TextGenerator
from tierkv.dbfront.generation.generation import Generation
from tierkv.kvcore.errors import ContextTooLongError, UdfArgumentError, UnknownModelError
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True)
class Subject:
    """A generator, how many requests a model got from it so far, and how many it is answering."""

    generator: TextGenerator
    asked: Callable[[], int]
    running: Callable[[], int]


@asynccontextmanager
async def instant_subject(folder: Path) -> AsyncIterator[Subject]:
    generator = InstantGenerator()
    yield Subject(generator, lambda: len(generator.prompts), lambda: generator._running)


@asynccontextmanager
async def generation_subject(folder: Path) -> AsyncIterator[Subject]:
    shape = tiny_config(vocab_size=261, eos_token_id=1, max_position_embeddings=4_096)
    settings = {"random_model": RandomModelSpec(shape, seed=3), "l1_pages": 257}
    tokenizer_folder = str(write_model_folder(folder))
    async with running_node(tokenizer_folder=tokenizer_folder, **settings) as node:
        dispatcher = Dispatcher(ClusterView(fixed=[LocalComputeClient(node)]))
        await dispatcher.start()
        state = dispatcher.state
        yield Subject(Generation(dispatcher), lambda: state.arrived, lambda: len(state.requests))
        await dispatcher.stop()


SUBJECTS = {"generation": generation_subject, "instant": instant_subject}


@pytest.fixture(params=sorted(SUBJECTS))
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    async with SUBJECTS[request.param](tmp_path) as subject:
        yield subject


@pytest.fixture
def generator(subject: Subject) -> TextGenerator:
    """Every implementation in turn."""
    return subject.generator


def call(text: str = "hello", **changes: object) -> TextCall:
    return text_call(messages=(Message("user", text),), **changes)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (call(model="no-such-model"), UnknownModelError),
        (call("x" * 100_000), ContextTooLongError),
        (call(temperature=9.0), UdfArgumentError),
        (call(labels=("a", "a")), UdfArgumentError),
        (call(labels=("a", "b"), embed=True), UdfArgumentError),
    ],
)
async def test_1_prepare_refuses_what_can_not_work(
    generator: TextGenerator, wrong: TextCall, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await generator.prepare(wrong)


async def test_1_prepare_makes_token_ids(generator: TextGenerator) -> None:
    prepared = await generator.prepare(call(tenant="ann"))
    assert prepared.request.token_ids
    assert prepared.request.tenant == "ann"
    assert prepared.model.name == prepared.request.model


async def test_2_only_the_last_event_has_a_finish_reason(generator: TextGenerator) -> None:
    events = [event async for event in generator.stream(await generator.prepare(call()))]
    assert all(event.finish_reason is None for event in events[:-1])
    assert events[-1].finish_reason is not None
    assert events[-1].usage is not None


async def test_2_closing_the_iterator_cancels(subject: Subject) -> None:
    prepared = await subject.generator.prepare(call(max_tokens=200, ignore_eos=True))
    async with aclosing(subject.generator.stream(prepared)) as events:  # type: ignore[type-var]
        await anext(events)
        assert subject.running() == 1
    assert subject.running() == 0


async def test_3_answer_is_stream_gathered(generator: TextGenerator) -> None:
    prepared = await generator.prepare(call())
    text = "".join([event.text async for event in generator.stream(prepared)])
    assert (await generator.answer(prepared)).text == text


async def test_3_readouts_come_with_the_last_event(generator: TextGenerator) -> None:
    chosen = await generator.answer(await generator.prepare(call(labels=("yes", "no"))))
    assert sum(chosen.label_probabilities) == pytest.approx(1.0)
    assert chosen.text == max(zip(chosen.label_probabilities, ("yes", "no"), strict=True))[1]
    embedded = await generator.answer(await generator.prepare(call(embed=True)))
    assert sum(x * x for x in embedded.embedding) == pytest.approx(1.0)
    assert embedded.text == ""
    assert chosen.usage.completion_tokens == embedded.usage.completion_tokens == 0
    said = await generator.answer(await generator.prepare(call(json_schema=SCHEMA)))
    assert json.loads(said.text)["n"] in (1, 22)


async def test_8_a_prompt_of_any_length_has_tokens_and_tokens_have_a_text(
    subject: Subject,
) -> None:
    generator = subject.generator
    asked = text_call(prompt="hello " * 4_000)
    tokens = await generator.token_ids(asked)
    assert len(tokens) > 4_096, "more than the context of the model"
    assert "hello hello" in await generator.text_of(tokens[-60:], None)
    short = call()
    assert await generator.token_ids(short) == (await generator.prepare(short)).request.token_ids
    assert subject.asked() == 0
    with pytest.raises(UnknownModelError):
        await generator.text_of((), "no-such-model")


async def test_5_counting_runs_nothing(generator: TextGenerator) -> None:
    counted = await generator.count_tokens(("", "hello", "hello hello"), None)
    assert counted.counts[0] == 0 < counted.counts[1] < counted.counts[2]
    assert counted.context_tokens > 0
    with pytest.raises(UnknownModelError):
        await generator.count_tokens((), "no-such-model")


async def plan_of(generator: TextGenerator, *, way: str, max_in_flight: int) -> CallPlan:
    """Plan six calls with a long beginning in common, or order them without a plan."""
    texts = [f"{'the same beginning ' * 4}{n % 2}{' of a document' * 4}{n}" for n in range(6)]
    calls = [await generator.prepare(call(text, max_tokens=8)) for text in texts]
    if way == "plan":
        return generator.plan(calls, max_in_flight=max_in_flight)
    return SortedCalls(calls, sort=way == "sorted")


@pytest.mark.parametrize("way", ["plan", "sorted", "as_they_come"])
async def test_4_a_plan_gives_every_call_once_to_whoever_asks(
    generator: TextGenerator, way: str
) -> None:
    plan = await plan_of(generator, way=way, max_in_flight=3)
    taken: list[int] = []
    running = 0

    async def work() -> None:
        nonlocal running
        while (turn := await plan.take()) is not None:
            taken.append(turn.index)
            running += 1
            assert running <= 3
            async for _ in generator.stream(turn):
                plan.prefilled(turn.index)
                await asyncio.sleep(0)
            running -= 1
            plan.ended(turn.index, answered=turn.index != 2)

    async with asyncio.timeout(20):
        await asyncio.gather(*(work() for _ in range(3)))
    await plan.close()
    assert sorted(taken) == list(range(6))
    if way != "as_they_come":
        assert [index % 2 for index in taken] == [0, 0, 0, 1, 1, 1]
    assert (plan.runs > 0) == (way == "plan")
    assert (plan.shared_tokens > 0) == (way == "plan")


@pytest.mark.parametrize("way", ["plan", "sorted"])
async def test_4_who_shares_a_beginning_waits_for_the_first_of_them(
    generator: TextGenerator, way: str
) -> None:
    plan = await plan_of(generator, way=way, max_in_flight=6)
    first = await plan.take()
    assert first is not None
    second = asyncio.create_task(plan.take())
    await asyncio.sleep(0)
    assert not second.done()
    plan.prefilled(first.index)
    turn = await asyncio.wait_for(second, 20)
    assert turn is not None
    assert turn.index != first.index
    await plan.close()


async def test_6_forecast_counts_and_asks_nobody(subject: Subject) -> None:
    generator = subject.generator
    texts = [f"{'the same beginning ' * 4}{n}" for n in range(3)]
    calls = [await generator.prepare(call(text, max_tokens=7)) for text in texts]
    prospect = await generator.forecast(calls, max_in_flight=2)
    found = prospect.forecast.calls
    assert [one.prompt_tokens for one in found] == [len(c.request.token_ids) for c in calls]
    assert sorted(one.shared_tokens > 0 for one in found) == [False, True, True]
    assert len(prospect.answer_tokens) == 3
    assert all(0 < tokens <= 7 for tokens in prospect.answer_tokens)
    nothing = await generator.forecast([], max_in_flight=2)
    assert nothing.forecast.calls == ()
    assert nothing.forecast.total_s(0.0) == 0.0
    assert subject.asked() == 0


async def test_7_prompts_encoded_ahead_are_those_encoded_alone(subject: Subject) -> None:
    generator = subject.generator
    calls = [call(f"{n} {'words ' * n}") for n in range(20)]
    ahead = await generator.encode_ahead([*calls, call(model="no-such-model")])
    assert len(ahead) == len(calls) + 1 and subject.asked() == 0
    for one, encoded in zip(calls, ahead, strict=False):
        alone = (await generator.prepare(one)).request.token_ids
        assert (await generator.prepare(one, encoded)).request.token_ids == alone

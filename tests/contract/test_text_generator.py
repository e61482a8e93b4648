"""The TextGenerator contract (dbfront/contracts.py), sentence by sentence.

The instant generator of tests/fix_sql.py is trusted in the SQL tests because it passes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dbfront.contracts import Message, TextCall, TextGenerator
from kvcore.errors import ContextTooLongError, UdfArgumentError, UnknownModelError
from tests.fix_sql import InstantGenerator

Maker = Callable[[], TextGenerator]


@pytest.fixture(params=[InstantGenerator], ids=["instant"])
def make_generator(request: pytest.FixtureRequest) -> Maker:
    maker: Maker = request.param
    return maker


def call(text: str = "hello", **changes: object) -> TextCall:
    return TextCall(messages=(Message("user", text),), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (call(model="no-such-model"), UnknownModelError),
        (call("x" * 100_000), ContextTooLongError),
        (call(temperature=9.0), UdfArgumentError),
    ],
)
async def test_1_prepare_refuses_what_can_not_work(
    make_generator: Maker, wrong: TextCall, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await make_generator().prepare(wrong)


async def test_1_prepare_makes_token_ids(make_generator: Maker) -> None:
    prepared = await make_generator().prepare(call(tenant="ann"))
    assert prepared.request.token_ids
    assert prepared.request.tenant == "ann"
    assert prepared.model.name == prepared.request.model


async def test_2_only_the_last_event_has_a_finish_reason(make_generator: Maker) -> None:
    generator = make_generator()
    events = [event async for event in generator.stream(await generator.prepare(call()))]
    assert all(event.finish_reason is None for event in events[:-1])
    assert events[-1].finish_reason is not None
    assert events[-1].usage is not None


async def test_3_answer_is_stream_gathered(make_generator: Maker) -> None:
    generator = make_generator()
    prepared = await generator.prepare(call())
    text = "".join([event.text async for event in generator.stream(prepared)])
    assert (await generator.answer(prepared)).text == text

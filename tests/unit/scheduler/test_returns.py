"""When conversations come back, and that their KV is loaded before."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.fix_scheduler import make_model
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import NamespaceKey, NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.request import GenerateRequest, ReuseHint
from tierkv.scheduler.requests.returns import MAX_PAUSE_S, ReturnBook, ReturnKeeper


def test_a_client_that_says_when_is_believed() -> None:
    book = ReturnBook()
    assert book.left("s", 0.0, ReuseHint(next_turn_s=30.0)) == 30.0
    assert book.left("s", 0.0, ReuseHint(next_turn=False)) is None
    assert book.left("s", 0.0, ReuseHint(next_turn_s=0.05)) is None, "back at once"
    assert book.left("s", 0.0, ReuseHint(next_turn_s=2 * MAX_PAUSE_S)) is None


def test_two_pauses_are_learned_and_the_next_is_expected_early() -> None:
    book, now = ReturnBook(), 0.0
    due: list[float | None] = []
    for _ in range(20):
        due.append(book.left("s", now, None))
        now += 8.0
        book.came("s", now)
        now += 1.0
    assert due[:2] == [None, None]
    assert due[2] is not None and 0.2 <= due[2] < 8.0
    assert due[-1] is not None and 7.5 < due[-1] <= 8.0
    assert book.left("other", now, None) is None


def test_long_and_repeated_ends_teach_nothing() -> None:
    book = ReturnBook()
    for now in (0.0, 10.0):
        book.left("s", now, None)
    book.came("s", 11.0)
    book.came("s", 500.0)
    book.left("s", 500.0, None)
    book.came("s", 501.0 + MAX_PAUSE_S)
    assert book.left("s", 2_000.0, None) is None, "one pause is known"


@given(st.lists(st.floats(0.0, 700.0), max_size=30))
def test_what_is_due_lies_in_the_future_and_within_bounds(pauses: list[float]) -> None:
    book, now = ReturnBook(), 0.0
    for pause in pauses:
        due = book.left("s", now, None)
        assert due is None or 0.2 <= due <= MAX_PAUSE_S
        now += pause
        book.came("s", now)


def request(session: str | None, seconds: float | None = 0.4, **changes: object) -> GenerateRequest:
    hint = None if seconds is None else ReuseHint(next_turn_s=seconds)
    return GenerateRequest(
        RequestId("r"), "tiny", (1, 2, 3), NamespaceKey(b"n" * 32), session_id=session, hint=hint,
        **changes,  # type: ignore[arg-type]
    )  # fmt: skip


async def test_the_node_that_answered_loads_prompt_and_answer() -> None:
    loaded: asyncio.Queue[tuple[GenerateRequest, NodeId]] = asyncio.Queue()

    async def load(asked: GenerateRequest, layout: BlockLayout, node: NodeId) -> None:
        loaded.put_nowait((asked, node))

    keeper, layout = ReturnKeeper(load, SystemClock(), bytes_per_s=1e9), make_model("tiny").layout
    keeper.left(request("s"), (4, 5), layout, NodeId("c1"))
    for unwanted in (request(None), request("t", None), request("u", use_cache=False)):
        keeper.left(unwanted, (), layout, NodeId("c2"))
    keeper.left(request("early"), (), layout, NodeId("c3"))
    keeper.came(request("early"))
    asked, node = await loaded.get()
    assert (asked.token_ids, node) == ((1, 2, 3, 4, 5), "c1")
    keeper.left(request("later", 60.0), (), layout, NodeId("c4"))
    await keeper.stop()
    assert loaded.empty() and keeper.loads == 1

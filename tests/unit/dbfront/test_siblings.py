"""Workers of one front ask each other; one that is away is left out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tierkv.dbfront import siblings
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.siblings import Siblings
from tierkv.dbfront.views.admin import joined_rows
from tierkv.scheduler.routing_stats import SchedulerStats


@asynccontextmanager
async def workers(folder: Path, count: int) -> AsyncIterator[list[Siblings]]:
    folder.mkdir()
    async with AsyncExitStack() as stack:
        made = [Siblings(folder, index=index, count=count) for index in range(count)]
        for worker in made:
            await worker.start()
            stack.push_async_callback(worker.stop)
        yield made


async def test_one_process_asks_nobody() -> None:
    alone = Siblings()
    await alone.start()
    assert not alone.shared and await alone.ask_all("rows", view="queue") == []
    assert await joined_rows(alone, [{"pid": 1}]) == [{"pid": 1, "worker": 0}]
    await alone.stop()


async def test_all_others_answer_through_a_folder_of_any_length(tmp_path: Path) -> None:
    async with workers(tmp_path / ("long" * 50), 3) as (first, second, third):

        async def rows(details: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"of": details["view"], "worker": 2}]

        second.answers["yes"] = lambda details: _answer(details["pid"] == 7)
        third.answers |= {"yes": lambda details: _answer(False), "rows": rows}
        second.answers["rows"] = lambda details: _answer([])
        assert await first.any_does("yes", pid=7)
        assert not await first.any_does("yes", pid=8)
        assert await joined_rows(first, [], view="queue") == [{"of": "queue", "worker": 2}]


async def _answer(value: Any) -> Any:
    return value


async def test_a_worker_that_is_away_fails_or_is_slow_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(tmp_path / "front", 4) as (asking, away, failing, good):
        await away.stop()

        async def fail(_: dict[str, Any]) -> None:
            raise RuntimeError("a bug")

        failing.answers["question"] = fail
        good.answers["question"] = lambda _: _answer("here")
        assert await asking.ask_all("question") == ["here"]
        assert "could not be answered" in caplog.text
        monkeypatch.setattr(siblings, "ANSWER_S", 0.0)
        assert await asking.ask_all("question") == []


async def test_a_worker_started_again_takes_its_place(tmp_path: Path) -> None:
    async with workers(tmp_path / "front", 2) as (first, killed):
        again = Siblings(tmp_path / "front", index=1, count=2)
        again.answers["name"] = lambda _: _answer("again")
        assert killed.index == 1
        await again.start()  # Over the socket that a killed process left.
        assert await first.ask_all("name") == ["again"]
        await again.stop()


def _metrics(dispatched: int) -> Metrics:
    none = dict.fromkeys(
        (
            "arrived",
            "finished",
            "failed",
            "cancelled",
            "resent",
            "handoffs",
            "located",
            "prefetches",
        ),
        0,
    )
    stats = SchedulerStats(
        **none, live=3, waiting=1, nodes_alive=2, nodes_suspended=0, dispatched=dispatched,
        cache_errors=(),
    )  # fmt: skip
    metrics = Metrics(lambda: stats)
    metrics.register_models(["m"])
    return metrics


def test_metrics_of_workers_are_sums_but_nodes_are_the_same() -> None:
    text = _metrics(4).render([_metrics(5).families(), _metrics(6).families()])[0].decode()
    assert "tierkv_dispatched_total 15.0" in text
    assert 'tierkv_nodes{state="alive"} 2.0' in text
    assert "tierkv_requests_in_flight 6.0" in text
    assert text.count("# TYPE tierkv_requests_total counter") == 1
    alone = _metrics(4).render()[0].decode()
    assert [line.split()[0] for line in alone.splitlines()] == [
        line.split()[0] for line in text.splitlines()
    ]

"""Every WorkLog against a plain model: any order of operations, several groups and consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.fix_queue import PLACES, LogPlace, file_place, server_place
from tests.fix_valkey import redis_server, valkey_server
from tierkv.dbfront.queue.work_log import WorkLog

T = TypeVar("T")
AGED_S = 1_000.0

groups = st.sampled_from(["g", "other"])
consumers = st.sampled_from(["ann", "bob", "eve"])
counts = st.integers(1, 4)
picks = st.integers(0, 30)
QUEUE = "q"


@dataclass
class Held:
    consumer: str
    deliveries: int = 1
    aged: bool = False


@dataclass
class ModelGroup:
    next: int = 0
    held: dict[int, Held] = field(default_factory=dict)

    def first_open(self) -> int:
        return min(self.held, default=self.next)


class WorkLogMachine(RuleBasedStateMachine):
    """Entries are numbered from 0; ``ids`` has the log's names for them."""

    place: ClassVar[LogPlace]

    def __init__(self) -> None:
        super().__init__()
        self.place.clear()
        self.runner = asyncio.Runner()
        self.logs: list[WorkLog] = [self.place.opens(), self.place.opens()]
        self.ids: list[str] = []
        self.groups: dict[str, ModelGroup] = {}
        self.trimmed = 0
        self.dead: list[tuple[str, int, int]] = []

    def do(self, work: Callable[[WorkLog], Coroutine[Any, Any, T]]) -> T:
        """Do something through either connection, in turn."""
        self.logs.reverse()
        return self.runner.run(work(self.logs[0]))

    def some_id(self, pick: int) -> tuple[int, str]:
        """Return an entry, perhaps one that is done; or an id that no entry has."""
        number = pick % (len(self.ids) + 1)
        return (number, self.ids[number]) if number < len(self.ids) else (-1, "0-7")

    def held_by(self, group: str, number: int, consumer: str) -> Held | None:
        held = self.groups.get(group, ModelGroup()).held.get(number)
        return held if held is not None and held.consumer == consumer else None

    @rule()
    def add(self) -> None:
        self.ids.append(self.do(lambda log: log.add(QUEUE, f"body {len(self.ids)}")))

    @rule(group=groups, consumer=consumers, count=counts)
    def read(self, group: str, consumer: str, count: int) -> None:
        found = self.do(lambda log: log.read(QUEUE, group, consumer, count=count))
        model = self.groups.setdefault(group, ModelGroup(self.trimmed))
        expected = range(model.next, min(model.next + count, len(self.ids)))
        assert [(entry.id, entry.body, entry.deliveries) for entry in found] == [
            (self.ids[number], f"body {number}", 1) for number in expected
        ]
        model.held |= {number: Held(consumer) for number in expected}
        model.next += len(expected)

    @rule(group=groups, consumer=consumers, pick=picks)
    def ack(self, group: str, consumer: str, pick: int) -> None:
        number, name = self.some_id(pick)
        held = self.held_by(group, number, consumer)
        assert self.do(lambda log: log.ack(QUEUE, group, consumer, name)) == (held is not None)
        if held is not None:
            del self.groups[group].held[number]

    @rule(group=groups, consumer=consumers, pick=picks)
    def touch(self, group: str, consumer: str, pick: int) -> None:
        number, name = self.some_id(pick)
        has_it = self.groups.get(group, ModelGroup()).held.get(number)
        told = self.do(lambda log: log.touch(QUEUE, group, consumer, name))
        assert told == ("" if has_it is None else has_it.consumer)
        if has_it is not None and has_it.consumer == consumer:
            has_it.aged = False

    @rule(group=groups, pick=picks)
    def age(self, group: str, pick: int) -> None:
        held = self.groups.get(group, ModelGroup()).held
        if held:
            number = sorted(held)[pick % len(held)]
            self.place.age(QUEUE, group, self.ids[number], AGED_S)
            held[number].aged = True

    @rule(group=groups, consumer=consumers, count=counts, only_aged=st.booleans())
    def claim(self, group: str, consumer: str, count: int, only_aged: bool) -> None:
        idle_s = AGED_S / 2 if only_aged else 0.0
        found = self.do(
            lambda log: log.claim(QUEUE, group, consumer, min_idle_s=idle_s, count=count)
        )
        held = self.groups.get(group, ModelGroup()).held
        chosen = [n for n in sorted(held) if held[n].aged or not only_aged][:count]
        for number in chosen:
            held[number] = Held(consumer, held[number].deliveries + 1)
        assert [(entry.id, entry.body, entry.deliveries) for entry in found] == [
            (self.ids[number], f"body {number}", held[number].deliveries) for number in chosen
        ]

    @rule(group=groups, consumer=consumers, pick=picks)
    def release(self, group: str, consumer: str, pick: int) -> None:
        number, name = self.some_id(pick)
        held = self.held_by(group, number, consumer)
        assert self.do(lambda log: log.release(QUEUE, group, consumer, name)) == bool(held)
        if held is not None:
            held.deliveries -= 1
            held.aged = True

    @rule(group=groups, consumer=consumers, pick=picks)
    def bury(self, group: str, consumer: str, pick: int) -> None:
        number, name = self.some_id(pick)
        held = self.held_by(group, number, consumer)
        buried = self.do(lambda log: log.bury(QUEUE, group, consumer, name, reason="bad"))
        assert buried == bool(held)
        if held is not None:
            del self.groups[group].held[number]
            self.dead.append((group, number, held.deliveries))

    @rule(pick=picks)
    def forget_dead(self, pick: int) -> None:
        if self.dead:
            at = pick % len(self.dead)
            letters = self.do(lambda log: log.dead(QUEUE, count=100))
            assert self.do(lambda log: log.forget_dead(QUEUE, [letters[at].id])) == 1
            del self.dead[at]

    @rule()
    def trim(self) -> None:
        firsts = [group.first_open() for group in self.groups.values()]
        first = min(firsts, default=self.trimmed)
        assert self.do(lambda log: log.trim(QUEUE)) == first - self.trimmed
        self.trimmed = first

    @invariant()
    def shows_what_the_model_has(self) -> None:
        letters = self.do(lambda log: log.dead(QUEUE, count=100))
        assert [(each.group, each.body, each.deliveries) for each in letters] == [
            (group, f"body {number}", deliveries) for group, number, deliveries in self.dead
        ]
        for name, group in self.groups.items():
            pending = self.do(lambda log, g=name: log.pending(QUEUE, g, count=100))  # type: ignore[misc]
            assert [(each.id, each.consumer, each.deliveries) for each in pending] == [
                (self.ids[n], held.consumer, held.deliveries)
                for n, held in sorted(group.held.items())
            ]
        states = self.do(lambda log: log.queues())
        if not self.ids and not self.groups:
            assert states == []
            return
        (state,) = states
        assert (state.length, state.dead) == (len(self.ids) - self.trimmed, len(self.dead))
        assert [(g.name, g.waiting, g.pending, g.consumers) for g in state.groups] == [
            (
                name,
                len(self.ids) - group.next,
                len(group.held),
                len({held.consumer for held in group.held.values()}),
            )
            for name, group in sorted(self.groups.items())
        ]

    def teardown(self) -> None:
        for log in self.logs:
            self.runner.run(log.close())
        self.runner.close()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogPlace]:
    if request.param == "file":
        yield file_place(tmp_path / "queue")
        return
    server = valkey_server if request.param == "valkey" else redis_server
    with server(tmp_path / "server") as url:
        yield server_place(url)


def test_a_log_is_as_its_model(place: LogPlace) -> None:
    machine = type("Machine", (WorkLogMachine,), {"place": place})
    few = settings(max_examples=30)  # Each asks a server, or a file, some hundred times.
    run_state_machine_as_test(machine, settings=few)  # type: ignore[no-untyped-call]

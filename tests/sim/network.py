"""A network and a time that exist only in one thread: messages get lost, doubled, late, overtaken.

Everything random comes from one seeded generator, so a seed is a history. Processes run *tasks*:
generators that yield a Sleep or an Ask and get the answer back, None when there was none in time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import CacheError

Steps = Generator["Sleep | Ask | All", Any, Any]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Go on after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Put a question to a process; a generator it returns runs there as a task of its own.

    The answer is None when the question or the answer was lost, when the process is down, when it
    took too long, and when it raised a CacheError.
    """

    target: str
    question: Callable[[Any], Any]
    timeout_s: float = 0.5


@dataclass(frozen=True, slots=True)
class All:
    """Put several questions at once; the answers come when all are there or overdue."""

    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad it is: shares of messages lost and doubled, and the longest usual delay."""

    loss: float = 0.0
    double: float = 0.0
    delay_s: float = 0.002
    """Delays are drawn up to this; one in ten messages takes up to twenty times as long."""


PEACE = Faults()

LONGEST_DELAY_S = 3.0
"""No message is later than this, however slow the way: then storms have an end."""


class Network:
    """What happens next, and when.

    Attributes:
        clock: virtual time.
        rng: the seed's dice.
        faults: how messages fare now.
        slow: factor by which the way to a process is slowed down.
        cuts: pairs of processes that can't ask each other.
        processes: who is up, by name.
        story: what happened, for people.
    """

    def __init__(self, seed: int) -> None:
        self.clock = ManualClock(1_000.0)
        self.rng = random.Random(seed)
        self.faults = PEACE
        self.slow: dict[str, float] = {}
        self.cuts: set[frozenset[str]] = set()
        self.processes: dict[str, Process] = {}
        self.story: list[str] = []
        self.lost = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.now - 1_000:8.3f}  {text}")

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later; nothing can go wrong with that."""
        self._serial += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._serial, action))

    def run(self, seconds: float, check: Callable[[], None]) -> None:
        """Let time pass, and check after every step."""
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            at, _, action = heapq.heappop(self._agenda)
            self.clock.advance(max(0.0, at - self.now))
            action()
            check()
        self.clock.advance(max(0.0, end - self.now))

    def delay_s(self, target: str) -> float:
        """Draw how long a message takes."""
        late = 20.0 if self.rng.random() < 0.1 else 1.0
        usual_s = self.rng.random() * self.faults.delay_s * self.slow.get(target, 1.0)
        return min(late * usual_s, LONGEST_DELAY_S)

    def loses(self) -> bool:
        """Draw whether a message is lost."""
        lost = self.rng.random() < self.faults.loss
        self.lost += lost
        return lost

    def send(self, target: str, deliver: Callable[[Any], None]) -> None:
        """Send a message that may get lost, come twice, and overtake others."""
        copies = 2 if self.rng.random() < self.faults.double else 1
        for _ in range(copies):
            if not self.loses():
                self.after(self.delay_s(target), lambda: self._deliver(target, deliver))

    def _deliver(self, target: str, deliver: Callable[[Any], None]) -> None:
        process = self.processes.get(target)
        if process is not None:
            deliver(process)

    def ask(self, asker: Process, ask: Ask, done: Callable[[Any], None]) -> None:
        """Carry an Ask out; ``done`` is called once."""
        open_ = [True]

        def close(answer: Any) -> None:
            if open_ and asker.alive:
                open_.clear()
                done(answer)

        def reply(answer: Any) -> None:
            self.send(asker.name, lambda process: close(answer) if process is asker else None)

        if frozenset((asker.name, ask.target)) in self.cuts:
            self.lost += 1
        else:
            self.send(ask.target, lambda process: process.answer(ask.question, reply))
        self.after(ask.timeout_s, lambda: close(None))


class Process:
    """One life of a process. Whoever crashes is another Process when it is started again.

    Attributes:
        skew_s: how far its clock is from the network's.
    """

    def __init__(self, name: str, net: Network) -> None:
        self.name = name
        self.net = net
        self.skew_s = net.rng.uniform(-900.0, 900.0)
        self.alive = True
        net.processes[name] = self

    @property
    def now(self) -> float:
        """The time by this process's own clock."""
        return self.net.now + self.skew_s

    def spawn(self, steps: Steps, ended: Callable[[Any], None] = lambda result: None) -> Task:
        """Run a task; ``ended`` gets what it returns."""
        task = Task(self, steps, ended)
        task.step(None)
        return task

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something again and again, while this life lasts."""

        def again() -> None:
            if self.alive:
                action()
                self.net.after(seconds, again)

        self.net.after(self.net.rng.random() * seconds, again)

    def answer(self, question: Callable[[Any], Any], reply: Callable[[Any], None]) -> None:
        """Answer a question, in one go or after some steps."""
        try:
            answer = question(self)
        except CacheError:
            answer = None
        if isinstance(answer, Generator):
            self.spawn(answer, reply)
        else:
            reply(answer)

    def crash(self) -> None:
        """End this life: what it had in memory is gone, its tasks never go on."""
        self.alive = False
        del self.net.processes[self.name]


class Task:
    """A generator that waits for something."""

    def __init__(self, process: Process, steps: Steps, ended: Callable[[Any], None]) -> None:
        self._process = process
        self._steps = steps
        self._ended = ended
        self._over = False

    def step(self, value: Any) -> None:
        """Go on with what was waited for."""
        if self._over or not self._process.alive:
            return
        try:
            wait = self._steps.send(value)
        except StopIteration as stop:
            self._finish(stop.value)
        except CacheError:
            self._finish(None)
        else:
            net = self._process.net
            if isinstance(wait, Sleep):
                net.after(wait.seconds, lambda: self.step(None))
            elif isinstance(wait, All):
                self._gather(wait)
            else:
                net.ask(self._process, wait, self.step)

    def _gather(self, wait: All) -> None:
        answers: dict[int, Any] = {}

        def take(number: int, answer: Any) -> None:
            answers[number] = answer
            if len(answers) == len(wait.asks):
                self.step([answers[each] for each in range(len(wait.asks))])

        net = self._process.net
        for number, ask in enumerate(wait.asks):
            net.ask(self._process, ask, lambda answer, n=number: take(n, answer))
        if not wait.asks:
            net.after(0.0, lambda: self.step([]))

    def cancel(self) -> None:
        """Stop it where it waits; its ``finally`` blocks run."""
        if not self._over and self._process.alive:
            self._over = True
            self._steps.close()

    def _finish(self, result: Any) -> None:
        self._over = True
        self._ended(result)


class Stream:
    """One answer under way from a node to a front: in order and complete, until it breaks."""

    def __init__(self, client: Process, server: str, on_break: Callable[[], None]) -> None:
        self.client = client
        self.server = server
        self.over = False
        self.on_close: Callable[[], None] = lambda: None
        self._on_break = on_break
        self._net = client.net
        self._last = self._net.now

    def open(self, request: Callable[[Any], None]) -> None:
        """Connect and send the request; a process that is down breaks the stream."""

        def arrive() -> None:
            process = self._net.processes.get(self.server)
            if process is None:
                self.break_off()
            elif not self.over:
                request(process)

        self._pass_on(arrive)

    def tell(self, news: Callable[[], None]) -> None:
        """Send something from the node to the front."""
        self._pass_on(lambda: None if self.over or not self.client.alive else news())

    def _pass_on(self, action: Callable[[], None]) -> None:
        if self._net.loses():
            self.break_off()
            return
        self._last = max(self._last, self._net.now + self._net.delay_s(self.server))
        self._net.after(self._last - self._net.now, action)

    def close(self) -> None:
        """End it from the front's side; the node hears of it a little later."""
        if not self.over:
            self.over = True
            self._net.after(0.05, self.on_close)

    def break_off(self) -> None:
        """Lose the connection: both sides notice some time later."""

        def noticed() -> None:
            if not self.over:
                self.over = True
                self.on_close()
                if self.client.alive:
                    self._on_break()

        self._net.after(0.3, noticed)

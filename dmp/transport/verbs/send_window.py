"""How many work requests are in flight on a queue pair, and which of them ask for a completion.

Pure; called by dmp/transport/verbs/link.py. Requests of one queue pair complete in order, so one
completion stands for all requests before it: every n-th is signalled, and the last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SendWindow:
    """Progress of one list of work requests; their numbers are [0, total).

    Attributes:
        total: how many there are.
        depth: most in flight; at least ``signal_every``, or nothing would ever complete.
        signal_every: distance of signalled requests.
        posted: requests [0, posted) were posted.
        completed: requests [0, completed) are done.
    """

    total: int
    depth: int
    signal_every: int
    posted: int = 0
    completed: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.signal_every <= self.depth, (self.signal_every, self.depth)

    @property
    def is_finished(self) -> bool:
        """Whether all are done."""
        return self.completed == self.total

    @property
    def has_room(self) -> bool:
        """Whether one more may be posted."""
        return self.posted < self.total and self.posted - self.completed < self.depth

    def post(self) -> tuple[int, bool]:
        """Take the next request: its number, and whether it is signalled."""
        assert self.has_room
        number = self.posted
        self.posted += 1
        return number, self.posted == self.total or self.posted % self.signal_every == 0

    def complete(self, number: int) -> None:
        """Note a completion: that request and all before it are done."""
        assert self.completed <= number < self.posted, (number, self.completed, self.posted)
        self.completed = number + 1

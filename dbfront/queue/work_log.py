"""The contract of a log with consumer groups, and the values in it.

Implemented by file_log.py (an SQLite file, for the processes of one machine) and valkey_log.py
(Streams of Valkey or Redis, for several fronts). An entry's life in one group:

    added -> pending of a consumer -> acknowledged
                |  ^         |
                +--+         +-> dead letter, with a reason
              claimed after idle time

A dying consumer leaves entries pending. Time without a ``touch`` makes an entry idle, and another
consumer claims the entry. Hence an entry may be delivered twice, and the work of an entry must
allow for a second worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlError, TierKVError

RELEASED_IDLE_S: Final = 86_400.0
"""Idle time of a released entry: every consumer may claim it."""


class QueueLostError(TierKVError):
    """The log can't be reached; users see the error of statements about the queue.

    Attributes:
        reason: what happened and where, for the log of the front; clients never see it.
    """

    code = "queue_lost"
    sqlstate = "58030"
    http_status = 503

    def __init__(self, reason: str) -> None:
        super().__init__(
            "the queue can't be read or written at present",
            hint="Try again later, or without the queue; the log of the front has the reason.",
        )
        self.reason = reason


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An entry as delivered to a consumer.

    Attributes:
        id: orders the entries of a queue; opaque to callers.
        body: the text that was added.
        deliveries: number of deliveries in the group, the present delivery included.
    """

    id: str
    body: str
    deliveries: int = 1


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """An entry delivered to a consumer and not acknowledged.

    Attributes:
        id, body, deliveries: see QueueEntry.
        consumer: who has the entry.
        idle_s: seconds since the delivery or the last touch.
    """

    id: str
    body: str
    deliveries: int
    consumer: str
    idle_s: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry that was given up.

    Attributes:
        id: of the dead letter.
        group: the group that gave the entry up.
        body, deliveries: see QueueEntry.
        reason: why.
        at_s: Unix time.
    """

    id: str
    group: str
    body: str
    deliveries: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group of a queue: new entries, pending entries, and consumers.

    Attributes:
        name: of the group.
        waiting: entries that were never delivered in this group.
        pending: entries delivered and not acknowledged.
        consumers: number of consumers with pending entries.
        oldest_idle_s: longest idle time of a pending entry; None without one.
    """

    name: str
    waiting: int
    pending: int
    consumers: int
    oldest_idle_s: float | None


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue: length, dead letters, and groups in order of names."""

    name: str
    length: int
    dead: int
    groups: tuple[GroupState, ...]


class WorkLog(Protocol):
    """Named logs with consumer groups.

    1. ``add`` appends a text and returns the entry's id. Entries are delivered in the order of
       ``add``. A body too large or empty, and a full queue, are refused: nothing is added.
    2. ``read`` delivers the oldest entries new to the group, at most ``count``. Without an entry
       ``read`` waits up to ``block_s`` for the next ``add``, by any process.
       A new group begins with the oldest entry of the queue. Each entry goes to one consumer.
    3. A delivered entry is pending until ``ack``, ``bury``, or a claim by another consumer.
       ``ack`` returns True if the entry was pending for this consumer, and otherwise changes
       nothing: a consumer thought dead can't end the work of another.
    4. ``touch`` begins the idle time anew if the entry is this consumer's, and returns the
       holder of the entry; empty if the entry is not pending. It counts no delivery.
    5. ``claim`` gives a consumer the pending entries of all consumers that have been idle for
       ``min_idle_s``, oldest entries first, at most ``count``, and counts a delivery. Of several
       claims at the same time only the first succeeds.
    6. ``release`` makes an entry of this consumer claimable at once and takes the delivery back;
       for a worker's stop in good order. It returns whether the entry was this consumer's.
    7. ``bury`` moves an entry of this consumer from the group to the dead letters, and returns
       whether the entry was this consumer's. A dead letter stays until ``forget_dead``; beyond
       ``limits.MAX_DEAD_LETTERS`` the oldest goes.
    8. ``trim`` removes the oldest entries ended by every group, up to the first entry open in any
       group, and returns the number of removed entries. A queue without groups keeps all.
    9. ``pending``, ``dead`` and ``queues`` show the state and change nothing.
    10. Every method raises QueueLostError if the log can't be reached. The
        operation may have happened or not.
    """

    async def add(self, queue: str, body: str) -> str: ...

    async def read(
        self, queue: str, group: str, consumer: str, *, count: int = 1, block_s: float = 0.0
    ) -> list[QueueEntry]: ...

    async def ack(self, queue: str, group: str, consumer: str, entry: str) -> bool: ...

    async def touch(self, queue: str, group: str, consumer: str, entry: str) -> str: ...

    async def claim(
        self, queue: str, group: str, consumer: str, *, min_idle_s: float, count: int = 1
    ) -> list[QueueEntry]: ...

    async def release(self, queue: str, group: str, consumer: str, entry: str) -> bool: ...

    async def bury(
        self, queue: str, group: str, consumer: str, entry: str, *, reason: str
    ) -> bool: ...

    async def trim(self, queue: str) -> int: ...

    async def pending(self, queue: str, group: str, *, count: int) -> list[PendingEntry]: ...

    async def dead(self, queue: str, *, count: int) -> list[DeadLetter]: ...

    async def forget_dead(self, queue: str, letters: Sequence[str]) -> int: ...

    async def queues(self) -> list[QueueState]: ...

    async def close(self) -> None: ...


def check_names(*names: str) -> None:
    """Refuse unusable names of queues, groups and consumers.

    Raises:
        SqlError: 22023.
    """
    for name in names:
        if not name or len(name) > limits.MAX_QUEUE_NAME_CHARS or "\0" in name:
            raise SqlError(
                f'"{name[:40]}" is no name of a queue, group or consumer',
                sqlstate="22023",
                hint=f"Use 1 to {limits.MAX_QUEUE_NAME_CHARS} characters.",
            )


def check_body(body: str) -> bytes:
    """Return the bytes of a body.

    Raises:
        SqlError: 54000, too many; 22023, none, or not UTF-8.
    """
    try:
        data = body.encode()
    except UnicodeEncodeError:
        raise SqlError("the body of an entry is not UTF-8", sqlstate="22023") from None
    if not data:
        raise SqlError("the body of an entry is empty", sqlstate="22023")
    if len(data) > limits.MAX_QUEUE_BODY_BYTES:
        raise SqlError(
            f"an entry of {len(data)} bytes is too large for a queue",
            sqlstate="54000",
            hint=f"An entry has at most {limits.MAX_QUEUE_BODY_BYTES} bytes; put the data into a "
            "table and queue its key.",
        )
    return data


def full_queue(queue: str) -> SqlError:
    """Return the error of a queue with limits.MAX_QUEUE_ENTRIES entries."""
    return SqlError(
        f"queue {queue} is full: {limits.MAX_QUEUE_ENTRIES} entries wait",
        sqlstate="53400",
        hint="Try again when tierkv.queues shows fewer entries.",
    )

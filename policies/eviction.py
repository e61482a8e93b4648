"""What a cache tells an eviction policy, and what it may ask: one contract for every cache.

The page pool of a compute node, the slot table of a DMP node and the simulator call a policy for
each block. A policy keeps no bytes, reads no clock and never evicts: it only says who is worth
least; the cache decides what may go at all.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol


class Expectation(IntEnum):
    """What is known about the next use of a block, from least to most worth keeping."""

    NONE = 0
    """Nobody is expected: a final answer, or what only one call of a statement needed."""

    UNKNOWN = 1
    TURN = 2
    """Another turn of the session is expected."""

    ROWS = 3
    """Calls of a running statement that are still to come will read it."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What a cache knows about a block when it is used.

    Attributes:
        key: the same for the same content, also after eviction; policies remember it for a while.
        parent: key of the block before it; None for the first of a prompt, or when not known.
        depth: blocks before it in its prompt.
        tail: the last block of the prompt that used it.
        expectation: of its next use.
        expected_in_s: seconds until that; None when not known.
        prompt_blocks: of the prompt that it was new in; 0 when not known.
    """

    key: Hashable
    parent: Hashable | None = None
    depth: int = 0
    tail: bool = False
    expectation: Expectation = Expectation.UNKNOWN
    expected_in_s: float | None = None
    prompt_blocks: int = 0


def whole_seconds(now: float) -> float:
    """Return the time as live caches tell it to policies, which work anew when it changes.

    A trace names all blocks of a request at one time; a live cache meets them one by one, and no
    policy has an opinion on less than a second.
    """
    return now // 1.0


NO_FACTS: Final = BlockFacts(key=None)
"""Of a block about which nothing is known, as after an attach; its key is remembered by nobody."""


class EvictionPolicy(Protocol):
    """Says which block is worth least; amortised O(1) or O(log blocks) per call.

    Handles are small integers that the cache chooses (page or slot numbers) and may use again
    after ``left``. ``now`` is in seconds, of any origin, and never goes backwards.

    1. A block is resident from ``entered`` to ``left``; ``used`` is called once for each request
       that uses a resident block, head of the prompt to its end, or end to head.
    2. ``offer`` puts a resident block among those that may be evicted, ``withdraw`` takes it out;
       both may be repeated, and ``left`` withdraws. ``used`` does neither.
    3. ``victim`` answers an offered block, and None only if none is offered. It removes nothing:
       asked twice, it names the same one.
    4. A cache that evicts leaves only offers a block when its last child has left, and withdraws it
       when a child enters; the policy relies on nothing of that.
    5. ``admits`` is asked right before ``victim`` for a block that needs room: False means that the
       newcomer is worth less than the one that would have to go. It is always True while nothing
       is offered. A cache that can't do without the block ignores the answer.
       ``refused`` names the blocks behind one that was not let in; they are learned from as well.
    6. The same calls give the same answers: a policy's chance has a seed.
    """

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        """Note that a block became resident."""

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        """Note that a request uses a resident block; newer facts replace older ones."""

    def left(self, handle: int, now: float) -> None:
        """Note that a block was evicted or dropped."""

    def offer(self, handle: int) -> None:
        """Let a block be chosen: it has no reference, pin, hold or child."""

    def withdraw(self, handle: int) -> None:
        """Let a block be chosen no more."""

    def victim(self, now: float) -> int | None:
        """Return the offered block least worth keeping."""

    def admits(self, facts: BlockFacts, now: float) -> bool:
        """Return whether a new block is worth more than the victim it would displace."""

    def refused(self, facts: BlockFacts, now: float) -> None:
        """Note that a request used a block that is not let in, because the one before it is not."""

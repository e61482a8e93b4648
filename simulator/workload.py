"""A trace made ready for the cluster simulation: chains of numbered blocks, and who follows whom.

Built once and replayed many times, under each router and size. A block's number stands for its
whole prefix, whatever the ids of the trace do; only full blocks count, because only full blocks are
ever reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.kvcore.block import Outlook
from tierkv.policies.eviction import BlockFacts
from tierkv.simulator.trace import Request

NOBODY = -1


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """One request of the workload.

    Attributes:
        number: its place in the workload.
        arrival_s: when it arrives in an open loop, or as the first of its session.
        input_tokens: of the prompt, at least 1.
        output_tokens: of the answer, at least 1.
        blocks: its full blocks, as numbers.
        session_id: as the trace says.
        conversation: number of the conversation it belongs to; without a session id it is told
            from the prompts: one that contains an earlier prompt goes on with it.
        follower: the next request of its session, or NOBODY.
        pause_s: closed loop: from the answer before it to its arrival; None when not known.
        gap_s: closed loop: from the arrival of the request before it, where the pause isn't known.
    """

    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session_id: str | None
    conversation: int
    follower: int
    pause_s: float | None
    gap_s: float
    is_first: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """All prompts in order of their arrival, and the facts of every block.

    Attributes:
        prompts: in the order of the trace.
        facts: per block number, what caches tell their policies about it.
        block_tokens: tokens of a block.
    """

    prompts: tuple[WorkloadPrompt, ...]
    facts: tuple[BlockFacts, ...]
    block_tokens: int

    @property
    def block_references(self) -> int:
        """Blocks of all prompts."""
        return sum(len(prompt.blocks) for prompt in self.prompts)


def make_workload(
    requests: Sequence[Request], *, block_tokens: int, speed: float = 1.0
) -> Workload:
    """Number the blocks and link the sessions.

    Args:
        requests: in the order of their timestamps.
        block_tokens: tokens one id stands for.
        speed: timestamps are divided by it: 2 is twice the load of an open loop.
    """
    numbers: dict[tuple[int, int], int] = {}
    facts: list[BlockFacts] = []
    chains = [_chain(request, block_tokens, numbers, facts) for request in requests]
    conversations = _conversations(requests, chains)
    followers, leaders = _links(requests)
    prompts: list[WorkloadPrompt] = []
    for number, request in enumerate(requests):
        leader = leaders[number]
        gap_s = request.timestamp_s - requests[leader].timestamp_s if leader != NOBODY else 0.0
        prompts.append(
            WorkloadPrompt(
                number=number,
                arrival_s=request.timestamp_s / speed,
                input_tokens=max(1, request.input_tokens),
                output_tokens=max(1, request.output_tokens),
                blocks=chains[number],
                session_id=request.session_id,
                conversation=conversations[number],
                follower=followers[number],
                pause_s=request.think_time_s,
                gap_s=gap_s,
                is_first=leader == NOBODY,
            )
        )
    return Workload(tuple(prompts), tuple(facts), block_tokens)


def _chain(
    request: Request,
    block_tokens: int,
    numbers: dict[tuple[int, int], int],
    facts: list[BlockFacts],
) -> tuple[int, ...]:
    """Number the full blocks; a number is made from the parent's and the trace's id."""
    chain: list[int] = []
    parent = NOBODY
    names = request.block_ids[: request.input_tokens // block_tokens]
    for depth, name in enumerate(names):
        number = numbers.setdefault((parent, name), len(facts))
        if number == len(facts):
            before = None if parent == NOBODY else parent
            facts.append(BlockFacts(number, before, Outlook(depth=depth), len(names)))
        chain.append(number)
        parent = number
    return tuple(chain)


def _conversations(requests: Sequence[Request], chains: Sequence[tuple[int, ...]]) -> list[int]:
    """Number the conversations, by session id or by prompts that contain an earlier one."""
    by_session: dict[str, int] = {}
    by_tip: dict[int, int] = {}
    found: list[int] = []
    for number, (request, chain) in enumerate(zip(requests, chains, strict=True)):
        if request.session_id is not None:
            conversation = by_session.setdefault(request.session_id, number)
        else:
            tip = next((block for block in reversed(chain) if block in by_tip), NOBODY)
            conversation = by_tip.pop(tip, number)  # It goes on from here: its old end is no end.
            if chain:
                by_tip[chain[-1]] = conversation
        found.append(conversation)
    return found


def _links(requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """Find who follows whom in each session of the trace."""
    followers, leaders = [NOBODY] * len(requests), [NOBODY] * len(requests)
    last: dict[str, int] = {}
    for number, request in enumerate(requests):
        if request.session_id is None:
            continue
        leader = last.get(request.session_id, NOBODY)
        leaders[number] = leader
        if leader != NOBODY:
            followers[leader] = number
        last[request.session_id] = number
    return followers, leaders

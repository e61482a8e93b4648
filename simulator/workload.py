"""A trace prepared for the cluster simulation: chains of numbered blocks, and links of sessions.

Built once and replayed many times, with each router and size. A block's number stands for its whole
prefix, whatever the trace's ids mean. Only full blocks count, because only full blocks are ever
reused.
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
        number: index in the workload.
        arrival_s: time of arrival in an open loop, or as the first request of a session.
        input_tokens: tokens of the prompt, at least 1.
        output_tokens: tokens of the answer, at least 1.
        blocks: numbers of the prompt's full blocks.
        session_id: session id of the trace.
        conversation: number of the conversation. Without a session id the conversation follows from
            the prompts: a prompt that contains an earlier prompt continues its conversation.
        follower: number of the session's next request, or NOBODY.
        pause_s: closed loop: time from the previous answer to this arrival; None when unknown.
        gap_s: closed loop: time from the previous arrival, used when the pause is unknown.
        is_first: whether the session has no earlier request.
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
    """All prompts in order of arrival, and the facts of every block.

    Attributes:
        prompts: prompts in the order of the trace.
        facts: facts for the eviction policies, by block number.
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
        requests: requests in the order of their timestamps.
        block_tokens: tokens per id.
        speed: divisor of timestamps: 2 doubles the load of an open loop.
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
    """Number the full blocks; a number follows from the parent's number and the trace's id."""
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
    """Number the conversations, by session id or by prompts that contain an earlier prompt."""
    by_session: dict[str, int] = {}
    by_tip: dict[int, int] = {}
    found: list[int] = []
    for number, (request, chain) in enumerate(zip(requests, chains, strict=True)):
        if request.session_id is not None:
            conversation = by_session.setdefault(request.session_id, number)
        else:
            tip = next((block for block in reversed(chain) if block in by_tip), NOBODY)
            conversation = by_tip.pop(tip, number)  # Continues here: the old end is no end.
            if chain:
                by_tip[chain[-1]] = conversation
        found.append(conversation)
    return found


def _links(requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """Find the next and the previous request of each request in its session."""
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

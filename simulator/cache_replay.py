"""Replays a trace through one cache, block by block, and counts the hits of a policy.

The single-level question, without times of computing or loading: which policy keeps the right
blocks. Hints are facts about the future in a trace that a client could have given; each kind is
switched on separately, to measure its worth (docs/policies.md). `tierkv simulate --capacity-blocks`
and bench/policies.py call this module; nodes, routers and pools are in the cluster simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, Protocol

from tierkv.kvcore.block import Expectation, Outlook
from tierkv.kvcore.errors import UserError
from tierkv.policies.eviction import BlockFacts, EvictionPolicy
from tierkv.policies.select import PRODUCTION_POLICIES, make_policy
from tierkv.simulator.trace import DEFAULT_BLOCK_TOKENS, Request
from tierkv.simulator.yardsticks import BLOCK_POLICIES, belady_hits

Progress = Callable[[int, int], None]
"""Called from time to time with the finished and the total number of requests."""

Order = Literal["head", "tail", "leaves"]

_PROGRESS_STEP = 256


class Hint(NamedTuple):
    """Hint of one request: the first two fields of Outlook."""

    expectation: Expectation = Expectation.UNKNOWN
    expected_in_s: float | None = None


NO_HINT: Final = Hint()


class Hints(Protocol):
    """Source of hints."""

    def of(self, requests: Sequence[Request]) -> Iterator[Hint]:
        """Yield the hint of each request."""


@dataclass(frozen=True, slots=True)
class TraceHints:
    """The hints of a replay.

    Attributes:
        turn: an answer that ended in a tool call has another turn.
        final: the last request of a session is marked as last, all earlier requests as followed.
        think_time: time until the next turn, if the trace has this time.
    """

    turn: bool = False
    final: bool = False
    think_time: bool = False

    def of(self, requests: Sequence[Request]) -> Iterator[Hint]:
        """Yield the hint of each request; hints that need a session are unknown without one."""
        if not (self.turn or self.final or self.think_time):
            for _ in requests:
                yield NO_HINT
            return
        for request, following in zip(requests, _next_turns(requests), strict=True):
            yield self._hint(request, following)

    def _hint(self, request: Request, following: Request | None) -> Hint:
        expectation, expected_in_s = Expectation.UNKNOWN, None
        if self.turn and request.tool_use:
            expectation = Expectation.TURN
        if self.final and request.session_id is not None:
            expectation = Expectation.NONE if following is None else Expectation.TURN
        if self.think_time and following is not None:
            expected_in_s = following.think_time_s
        return Hint(expectation, expected_in_s)


NO_HINTS: Final = TraceHints()


def _next_turns(requests: Sequence[Request]) -> list[Request | None]:
    """Return the next request of the session for each request."""
    found: list[Request | None] = [None] * len(requests)
    latest: dict[str, Request] = {}
    for index in range(len(requests) - 1, -1, -1):
        session = requests[index].session_id
        if session is not None:
            found[index] = latest.get(session)
            latest[session] = requests[index]
    return found


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Hits of a replay.

    Attributes:
        policy: name of the policy.
        capacity_blocks: capacity of the cache.
        requests: number of replayed requests.
        block_references: blocks of all prompts.
        block_hits: block references in the longest resident prefix of their request.
        prompt_tokens: tokens of all prompts.
        token_hits: prompt tokens in hit blocks.
    """

    policy: str
    capacity_blocks: int
    requests: int
    block_references: int
    block_hits: int
    prompt_tokens: int
    token_hits: int

    @property
    def block_hit_rate(self) -> float:
        """Share of block references that hit, 0 to 1."""
        return self.block_hits / self.block_references if self.block_references else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of prompt tokens in hit blocks, 0 to 1."""
        return self.token_hits / self.prompt_tokens if self.prompt_tokens else 0.0


def policy_names() -> tuple[str, ...]:
    """Return the policy names of `replay`, production first and the optimum last."""
    return (*PRODUCTION_POLICIES, *BLOCK_POLICIES, "belady")


def replay(
    requests: Sequence[Request],
    policy_name: str,
    capacity_blocks: int,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    hints: Hints = NO_HINTS,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    order: Order = "head",
) -> ReplayResult:
    """Replay requests in the order given; the caller sorts the requests by time.

    Args:
        requests: requests of a trace.
        policy_name: a name from `policy_names`.
        capacity_blocks: capacity of the cache, at least 1.
        seed: seed of the policy's random choices.
        progress: called with the progress.
        hints: facts of the trace to tell the policy.
        block_tokens: tokens per id.
        order: for policies on single blocks. ``head``: use a prompt's blocks from the first on,
            like a simple engine; ``tail``: from the last on; ``leaves``: evict only leaves, like
            the production policies.

    Raises:
        UserError: the policy is unknown, or the capacity is below 1.
    """
    if capacity_blocks < 1:
        raise UserError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
    if policy_name == "belady":
        hits = belady_hits(requests, capacity_blocks)
    elif policy_name in PRODUCTION_POLICIES:
        hits = _leaf_hits(
            requests, make_policy(policy_name, capacity_blocks, seed=seed), capacity_blocks, hints
        )
    elif policy_name in BLOCK_POLICIES:
        policy = BLOCK_POLICIES[policy_name](capacity_blocks, seed)
        if order == "leaves":
            hits = _leaf_hits(requests, policy, capacity_blocks, hints)
        else:
            hits = _block_hits(requests, policy, capacity_blocks, tail_first=order == "tail")
    else:
        raise UserError(
            f"unknown eviction policy {policy_name!r}", hint=f"Known: {', '.join(policy_names())}."
        )
    return _counted(requests, policy_name, capacity_blocks, hits, block_tokens, progress)


def _counted(
    requests: Sequence[Request],
    policy_name: str,
    capacity_blocks: int,
    hits: Iterator[int],
    block_tokens: int,
    progress: Progress | None,
) -> ReplayResult:
    """Add up the hits of each request."""
    references = block_hits = prompt_tokens = token_hits = 0
    for done, (request, hit) in enumerate(zip(requests, hits, strict=True), start=1):
        references += len(request.block_ids)
        block_hits += hit
        prompt_tokens += request.input_tokens
        token_hits += min(hit * block_tokens, request.input_tokens)
        if progress is not None and (done % _PROGRESS_STEP == 0 or done == len(requests)):
            progress(done, len(requests))
    return ReplayResult(
        policy_name,
        capacity_blocks,
        len(requests),
        references,
        block_hits,
        prompt_tokens,
        token_hits,
    )


def _leaf_hits(
    requests: Sequence[Request], policy: EvictionPolicy, capacity_blocks: int, hints: Hints
) -> Iterator[int]:
    """Yield hit blocks per request of a cache that evicts leaves outside the current request."""
    cache = _LeafCache(policy, capacity_blocks)
    for request, hint in zip(requests, hints.of(requests), strict=True):
        yield cache.serve(request.block_ids, hint, request.timestamp_s)


class _LeafCache:
    """Blocks by id; the id is also the policy's handle.

    Attributes:
        _parent: parent block of each resident block.
        _children: number of resident children of each resident block.
    """

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self._policy = policy
        self._capacity = capacity_blocks
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        self._facts: dict[int, BlockFacts] = {}

    def serve(self, chain: tuple[int, ...], hint: Hint, now: float) -> int:
        """Use the resident blocks of a prompt, admit the missing blocks, and return the hits."""
        children = self._children
        hit = next((i for i, block in enumerate(chain) if block not in children), len(chain))
        facts = self._facts_of(chain, hint)
        used = self._policy.used
        for block, fact in zip(chain[:hit], facts, strict=False):
            used(block, fact, now)
        if hit:
            self._policy.withdraw(chain[hit - 1])
        here = hit
        while here < len(chain) and self._enter(chain, here, facts[here], now):
            here += 1
        for fact in facts[here:]:
            self._policy.refused(fact, now)
        if here and not children[chain[here - 1]]:
            self._policy.offer(chain[here - 1])
        return hit

    def _facts_of(self, chain: tuple[int, ...], hint: Hint) -> list[BlockFacts]:
        blocks = len(chain)
        if hint != NO_HINT:
            return [
                BlockFacts(block, parent, Outlook(*hint, depth, depth == blocks - 1), blocks)
                for depth, (block, parent) in enumerate(zip(chain, (None, *chain), strict=False))
            ]
        known, parent = self._facts, None
        for depth, block in enumerate(chain):
            if block not in known:
                known[block] = BlockFacts(block, parent, Outlook(depth=depth), blocks)
            parent = block
        facts = [known[block] for block in chain]
        if chain:
            outlook = replace(facts[-1].outlook, tail=True)
            facts[-1] = replace(facts[-1], outlook=outlook, prompt_blocks=blocks)
        return facts

    def _enter(self, chain: tuple[int, ...], depth: int, facts: BlockFacts, now: float) -> bool:
        """Admit one block; return False if the cache makes no room."""
        block, parent = chain[depth], chain[depth - 1] if depth else None
        if block in self._children:
            return False  # Only if equal ids have different prefixes.
        if len(self._children) >= self._capacity and not self._make_room(facts, now):
            return False
        self._parent[block] = parent
        self._children[block] = 0
        if parent is not None:
            self._children[parent] += 1
        self._policy.entered(block, facts, now)
        return True

    def _make_room(self, facts: BlockFacts, now: float) -> bool:
        """Evict one block; the newcomer's parent is protected already."""
        policy = self._policy
        victim = policy.victim(now)
        if victim is None or not policy.admits(facts, now):
            return False
        del self._children[victim]
        policy.left(victim, now)
        parent = self._parent.pop(victim)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent] and parent != facts.parent:
                policy.offer(parent)
        return True


def _block_hits(
    requests: Sequence[Request], policy: EvictionPolicy, capacity_blocks: int, *, tail_first: bool
) -> Iterator[int]:
    """Yield hit blocks per request of a cache of single blocks, used one after the other.

    Every resident block may be evicted at any time, as in the published algorithms.
    """
    here: dict[int, BlockFacts] = {}
    for request in requests:
        chain, now = request.block_ids, request.timestamp_s
        yield next((i for i, block in enumerate(chain) if block not in here), len(chain))
        for block in reversed(chain) if tail_first else chain:
            facts = here.get(block)
            if facts is not None:
                policy.used(block, facts, now)
                continue
            facts = BlockFacts(block)
            if len(here) >= capacity_blocks:
                victim = policy.victim(now) if policy.admits(facts, now) else None
                if victim is None:
                    continue
                policy.left(victim, now)
                del here[victim]
            here[block] = facts
            policy.entered(block, facts, now)
            policy.offer(block)

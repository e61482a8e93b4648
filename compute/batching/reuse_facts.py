"""What is known about when a block of a request will be wanted again, for eviction.

Pure; used by the batcher for L1 and by the savers for the pool. It translates the request's hint
(kvcore/request.py) into the facts that policies understand (policies/eviction.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tierkv.compute.batching.sequence import Sequence
from tierkv.kvcore.block import BlockSpec, Expectation, Outlook, Owner, shared_owner
from tierkv.kvcore.request import ReuseHint
from tierkv.policies.eviction import BlockFacts

_NOTHING_SAID: Final = (Expectation.UNKNOWN, None)
_FAR_S: Final = 1e9
"""Later is as good as this: pool nodes refuse a time that makes no sense, and all with it."""


def block_of(seq: Sequence, block: int) -> BlockSpec:
    """Describe a full block of a request, with what the request knows about the next use."""
    key, parent = seq.key_and_parent(block)
    expectation, expected_in_s = _future(seq, (block + 1) * seq.block_tokens)
    outlook = Outlook(expectation, expected_in_s, block, tail=block == _tail(seq))
    return BlockSpec(key, parent, seq.block_tokens, owner=owner_of(seq), outlook=outlook)


def end_of(seq: Sequence, stop: int) -> BlockSpec:
    """Describe an unfinished block, which ends at token ``stop``."""
    key, parent = seq.tail(stop)
    expectation, expected_in_s = _future(seq, stop)
    outlook = Outlook(expectation, expected_in_s, stop // seq.block_tokens, tail=True)
    tokens = stop % seq.block_tokens
    return BlockSpec(key, parent, tokens, owner=owner_of(seq), outlook=outlook)


def owner_of(seq: Sequence) -> Owner:
    """Return whose blocks a request makes."""
    return shared_owner(seq.request.model, seq.request.tenant, seq.session)


def prompt_blocks(seq: Sequence) -> int:
    """Return the number of full blocks of the prompt."""
    return seq.prompt_length // seq.block_tokens


def facts_of_hits(seq: Sequence, known: Iterable[BlockFacts]) -> list[BlockFacts]:
    """Say the same of the request's first blocks, of which others knew something before.

    Args:
        seq: the request.
        known: of its leading blocks; what does not change is not made again, for there may be
            thousands.
    """
    tail = _tail(seq)
    facts = []
    for block, before in enumerate(known):
        expectation, expected_in_s = _future(seq, (block + 1) * seq.block_tokens)
        now, was = (expectation, expected_in_s, block == tail), before.outlook
        if (was.expectation, was.expected_in_s, was.tail) != now:
            outlook = Outlook(expectation, expected_in_s, was.depth, tail=block == tail)
            before = replace(before, outlook=outlook)
        facts.append(before)
    return facts


def _tail(seq: Sequence) -> int:
    """Return the last full block of the prompt."""
    return prompt_blocks(seq) - 1


def _future(seq: Sequence, end: int) -> tuple[Expectation, float | None]:
    hint = seq.request.hint
    if hint is None:
        return _NOTHING_SAID
    expectation = expectation_of(hint, end)
    if expectation is not Expectation.TURN or hint.next_turn_s is None:
        return expectation, None
    return expectation, min(hint.next_turn_s, _FAR_S)


def expectation_of(hint: ReuseHint, end: int) -> Expectation:
    """Return what a hint expects of a block that ends at token ``end``.

    A block that only this call of a statement has is done with, unless its session goes on; so is
    all of a session's last answer. With the last call of a statement (``pending_calls`` 0) what its
    calls shared is what any other block is: another statement may come.
    """
    if hint.pending_tokens and end <= hint.pending_tokens:
        return Expectation.ROWS if hint.pending_calls else Expectation.UNKNOWN
    if hint.next_turn is not None:
        return Expectation.TURN if hint.next_turn else Expectation.NONE
    in_statement = hint.pending_calls > 0 or hint.pending_tokens > 0
    return Expectation.NONE if in_statement else Expectation.UNKNOWN

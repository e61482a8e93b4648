"""What is known about when a block of a request will be wanted again, for eviction.

Pure; used by the batcher for L1 and by the savers for the pool. It translates the request's hint
(kvcore/reuse_hint.py) into the facts that policies understand (policies/eviction.py).
"""

from __future__ import annotations

from compute.sequence import Sequence
from kvcore.block_key import ROOT_PARENT
from kvcore.reuse_hint import ReuseHint
from policies.eviction import BlockFacts, Expectation


def facts_of(seq: Sequence, block: int) -> BlockFacts:
    """Say what a request knows about one of its full blocks, whose key is known by now."""
    key, parent = seq.key_and_parent(block)
    hint = seq.request.hint
    expectation, expected_in_s = Expectation.UNKNOWN, None
    if hint is not None:
        expectation = expectation_of(hint, (block + 1) * seq.block_tokens)
        if expectation is Expectation.TURN:
            expected_in_s = hint.next_turn_s
    return BlockFacts(
        key=key,
        parent=None if parent == ROOT_PARENT else parent,
        depth=block,
        tail=block == seq.prompt_length // seq.block_tokens - 1,
        expectation=expectation,
        expected_in_s=expected_in_s,
    )


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

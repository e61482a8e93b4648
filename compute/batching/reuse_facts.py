"""Facts about the next use of a request's blocks, for eviction.

Pure; used by the batcher for L1 and by the savers for the pool. The request's hint
(kvcore/request.py) is translated into the facts of eviction policies (policies/eviction.py).
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
"""Upper bound of an expected time: pool nodes refuse an implausible time together with all blocks
of the call.
"""


def block_of(seq: Sequence, block: int) -> BlockSpec:
    """Describe a full block of a request, with the request's expectation of the next use."""
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
    """Return the owner of a request's blocks."""
    return shared_owner(seq.request.model, seq.request.tenant, seq.session)


def prompt_blocks(seq: Sequence) -> int:
    """Return the number of full blocks of the prompt."""
    return seq.prompt_length // seq.block_tokens


def facts_of_hits(seq: Sequence, known: Iterable[BlockFacts]) -> list[BlockFacts]:
    """Update the facts of a request's leading blocks, known from earlier requests.

    Args:
        seq: the request.
        known: facts of the leading blocks; unchanged facts are not made again, because a prompt may
            have thousands.
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

    A block used by a single call of a statement is done with, unless the call's session continues;
    the same holds for all of a session's last answer. In the last call of a statement
    (``pending_calls`` 0) blocks shared by the calls have no known next use: another statement may
    come.
    """
    if hint.pending_tokens and end <= hint.pending_tokens:
        return Expectation.ROWS if hint.pending_calls else Expectation.UNKNOWN
    if hint.next_turn is not None:
        return Expectation.TURN if hint.next_turn else Expectation.NONE
    in_statement = hint.pending_calls > 0 or hint.pending_tokens > 0
    return Expectation.NONE if in_statement else Expectation.UNKNOWN

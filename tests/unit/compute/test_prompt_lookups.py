"""What the tiers are asked about a sequence, and what of it is left out."""

from __future__ import annotations

from dataclasses import replace

from tests.fix_model import make_request
from tierkv.compute.batching.sequence import Sequence, make_sequence
from tierkv.compute.tiers.prompt_lookup import PromptLookup
from tierkv.compute.transfers.prefetch import lookup_of, part_wanted
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import Blend

PROMPT = list(range(1, 21))
BLOCK = 8


def sequence(arrival_s: float = 3.0, **changes: object) -> Sequence:
    """Make a sequence of two full blocks and four more tokens; L1 has the first block."""
    request = make_request(PROMPT, **changes)
    seq = make_sequence(1, request, arrival_s=arrival_s, block_tokens=BLOCK)
    seq.add_pages([5])
    seq.computed = BLOCK
    return seq


def test_a_lookup_names_the_blocks_behind_the_pages() -> None:
    seq = sequence()
    part = part_wanted(seq, 2)
    assert part is not None
    assert part.namespace == seq.request.namespace_key and part.keys == tuple(seq.keys)
    assert (part.first_block, part.block_tokens, part.l1_tokens) == (1, BLOCK, 2)
    assert part.tokens == seq.token_bytes(BLOCK, len(PROMPT) - 1), "the last one is computed"
    assert lookup_of(seq, KvCodec.NONE, part=part) == PromptLookup(
        (seq.keys[1],), BLOCK, KvCodec.NONE, arrived_s=3.0, thorough=False, part=part
    )


def test_kv_that_is_not_stored_is_not_asked_for() -> None:
    seq = sequence()
    lookup = lookup_of(seq, None, part=part_wanted(seq, 0))
    assert lookup == PromptLookup((), BLOCK, None, arrived_s=3.0)


def test_without_a_caller_no_time_is_running() -> None:
    assert lookup_of(sequence(0.0), KvCodec.NONE).arrived_s is None


def test_a_resumed_or_preempted_request_asks_every_node() -> None:
    assert lookup_of(sequence(resumed_tokens=2), KvCodec.NONE).thorough
    preempted = sequence()
    preempted.hits_final = True
    assert lookup_of(preempted, KvCodec.NONE).thorough


def test_blends_isolated_chunks_and_requests_without_cache_take_no_parts() -> None:
    blended, isolated, uncached = sequence(), sequence(), sequence()
    blended.blend = Blend(((2, 10),))
    isolated.raw_start = 3
    uncached.request = replace(uncached.request, use_cache=False)
    assert [part_wanted(seq, 0) for seq in (blended, isolated, uncached)] == [None] * 3

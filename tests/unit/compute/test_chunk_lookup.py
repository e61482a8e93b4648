"""Chunks by name, and how the pool is asked for them."""

from __future__ import annotations

import pytest

from tests.fix_model import make_request
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.tiers.chunk_lookup import MOST_MISSES, PromptChunk, find_chunks, prompt_chunks
from tierkv.compute.tiers.finder import Source
from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, ChunkNamer, Tier
from tierkv.kvcore.request import Blend

POOL = MemoryPoolNode()


class Pool:
    """Answers with the leading known keys, as BlockFinder does, and counts the questions."""

    def __init__(self, *chunks: PromptChunk) -> None:
        self.keys = {key for chunk in chunks for key in chunk.keys}
        self.asked: list[int] = []

    def find(self, keys):
        keys = keys[: limits.MAX_CHAIN_BLOCKS]
        self.asked.append(len(keys))
        known = next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))
        return [(Source(POOL, None, Tier.L4, key),) for key in keys[:known]]


def chunks_of(*lengths: int) -> tuple[PromptChunk, ...]:
    """Return consecutive chunks of a prompt with a head of three tokens."""
    spans, at = [], 3
    for length in lengths:
        spans.append((at, at + length))
        at += length
    request = make_request(range(at + 1), blend=Blend(tuple(spans)))
    return prompt_chunks(request, block_tokens=8)


def test_names_are_those_of_the_tokens_after_the_head() -> None:
    one, two = chunks_of(9, 16)
    key = make_request([1]).namespace_key
    assert list(two.keys) == ChunkNamer(key, range(3)).block_keys(range(12, 28), block_tokens=8)
    assert (one.start, one.stop, len(one.keys), len(two.keys)) == (3, 12, 2, 2)
    assert one.parent(0) == ROOT_PARENT and one.parent(1) == one.keys[0] == one.name


def test_all_that_is_there_is_found_with_one_question() -> None:
    chunks = chunks_of(9, 16, 3)
    pool = Pool(*chunks)
    found = find_chunks(chunks, pool.find)
    assert pool.asked == [5]
    assert {name: [c[0].key for c in sources] for name, sources in found.items()} == {
        chunk.name: list(chunk.keys) for chunk in chunks
    }


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_block_means_a_missing_chunk_and_one_more_question(missing: int) -> None:
    chunks = chunks_of(17, 17, 17)
    pool = Pool(*chunks)
    pool.keys.discard(chunks[missing].keys[-1])
    found = find_chunks(chunks, pool.find)
    assert set(found) == {chunk.name for i, chunk in enumerate(chunks) if i != missing}
    assert all(len(sources) == 3 for sources in found.values())
    assert len(pool.asked) == (1 if missing == 2 else 2)


def test_after_many_misses_the_others_count_as_missing() -> None:
    chunks = chunks_of(*[8] * (MOST_MISSES + 2))
    pool = Pool(chunks[-1])
    assert find_chunks(chunks, pool.find) == {}
    assert len(pool.asked) == MOST_MISSES
    assert set(find_chunks(chunks[1:], pool.find)) == set()
    assert set(find_chunks(chunks[2:], pool.find)) == {chunks[-1].name}


def test_questions_keep_the_limit_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CHAIN_BLOCKS", 5)
    chunks = chunks_of(17, 16, 9, 48, 8)
    pool = Pool(*chunks)
    found = find_chunks(chunks, pool.find)
    assert pool.asked == [5, 2, 5, 1], "the fourth is longer than any question"
    assert set(found) == {chunk.name for i, chunk in enumerate(chunks) if i != 3}

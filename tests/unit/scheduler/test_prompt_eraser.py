from __future__ import annotations

from tests.fix_dmp import block_key
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import PromptBlocks
from tierkv.scheduler.prompt_eraser import blocks_to_erase, joined


def keys(names: str) -> tuple[BlockKey, ...]:
    return tuple(block_key(name) for name in names.split())


def erased(found: PromptBlocks, tree: str, *, ends_inside: bool = True) -> set[BlockKey]:
    """The tree: ``child<parent`` words."""
    pairs = (word.split("<") for word in tree.split())
    after = {block_key(child): block_key(parent) for child, parent in pairs}
    return set(blocks_to_erase(found, after, ends_inside=ends_inside))


def test_a_prompt_alone_goes_with_all_that_follows() -> None:
    found = PromptBlocks(keys("a b"))
    assert erased(found, "b<a c<b d<c e<b") == set(keys("a b c d e"))
    assert erased(found, "") == set(keys("a b")), "what is not stored costs nothing"


def test_blocks_that_other_prompts_begin_with_stay() -> None:
    found = PromptBlocks(keys("a b"), ends=keys("c"), others=keys("o"))
    assert erased(found, "b<a c<b x<a y<x") == set(keys("b c")), "a is the beginning of x too"
    assert erased(found, "b<a c<b o<b p<o") == set(keys("c")), "o goes on from b otherwise"
    assert erased(found, "b<a c<b") == set(keys("a b c")), "o is remembered, but not stored"


def test_unknown_blocks_after_a_prompt_go_and_known_others_only_inside_a_block() -> None:
    found = PromptBlocks(keys("a"), others=keys("o"))
    assert erased(found, "u<a v<u o<a") == set(keys("u v"))
    assert erased(found, "u<a o<a", ends_inside=False) == set(keys("a u o"))


def test_a_prompt_shorter_than_a_block_goes_where_its_tokens_are_known() -> None:
    found = PromptBlocks((), ends=keys("e"), others=keys("o"))
    assert erased(found, "f<e") == set(keys("e f"))


def test_what_nodes_know_is_joined() -> None:
    parts = [PromptBlocks(keys("a"), keys("e")), PromptBlocks(keys("a"), keys("f e"), keys("o"))]
    assert joined(parts) == PromptBlocks(keys("a"), keys("e f"), keys("o"))
    assert joined([]) == PromptBlocks()

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fix_dmp import block_key
from tests.fix_scheduler import FakeCompute, make_request
from tierkv.kvcore.block import Erased
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import TransportError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.kvcore.request import GenerateRequest, PromptBlocks
from tierkv.metaserver.client import DirectoryNode
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.scheduler.prompt_eraser import PromptEraser, blocks_to_erase, joined


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


class Node(FakeCompute):
    """Knows the blocks of every prompt, and a pool of nodes."""

    def __init__(self, *pool: str, fails: bool = False) -> None:
        super().__init__()
        self.pool, self.fails = pool, fails
        self.asked: list[bool] = []

    async def find_prompt(self, request: GenerateRequest) -> PromptBlocks:
        return PromptBlocks(keys("a b"))

    async def erase(
        self, keys: Sequence[BlockKey], *, pool: bool
    ) -> tuple[Erased, tuple[str, ...]]:
        self.asked.append(pool)
        if pool and self.fails:
            raise TransportError("the disk failed")
        return Erased(memory_blocks=pool, page_blocks=not pool), self.pool if pool else ()


class _Hurrying(ManualClock):
    """Ten seconds pass between two looks."""

    def now(self) -> float:
        self.advance(10.0)
        return super().now()


async def _nothing() -> None:
    """Nodes stay as they are."""


def eraser_of(*nodes: Node, pool: Sequence[str]) -> PromptEraser:
    view = ClusterView()
    view.compute_clients = lambda model: list(nodes)  # type: ignore[method-assign]
    view.nodes = tuple(
        DirectoryNode(
            NodeInfo(NodeId(name), Incarnation(1), NodeRole.DMP, HostId("h")),
            NodeReport(),
            0.0,
            "dead",
        )
        for name in pool
    )
    return PromptEraser(view, None, _Hurrying(), _nothing)


async def test_all_nodes_erase_pages_and_one_erases_the_pool() -> None:
    one, other = Node("dmp-0", fails=True), Node("dmp-0", "dmp-1")
    request = make_request()
    gone = await eraser_of(one, other, pool=["dmp-0", "dmp-1"]).forget(request, block_tokens=16)
    assert gone.keys == keys("b a") and gone.shared_blocks == 0
    assert gone.erased == Erased(memory_blocks=1, page_blocks=2)
    assert one.asked == [False, True] and other.asked == [False, True]


async def test_a_pool_node_that_is_away_is_named() -> None:
    request = make_request()
    with pytest.raises(TransportError, match="dmp-1 does not answer"):
        await eraser_of(Node("dmp-0"), pool=["dmp-0", "dmp-1"]).forget(request, block_tokens=16)
    with pytest.raises(TransportError, match="the disk failed"):
        await eraser_of(Node(fails=True), pool=[]).forget(request, block_tokens=16)
    with pytest.raises(TransportError, match="no compute node"):
        await eraser_of(pool=[]).forget(request, block_tokens=16)


class _Meta:
    """A meta server with a list of nodes, and no blocks."""

    nodes: tuple[DirectoryNode, ...] = ()

    async def blocks_after(self, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockKey]:
        return {}

    async def list_nodes(self) -> tuple[DirectoryNode, ...]:
        return self.nodes


async def test_a_node_that_was_just_there_is_missed() -> None:
    eraser = eraser_of(Node("dmp-0", "dmp-1"), pool=["dmp-0", "dmp-1"])
    meta = _Meta()
    meta.nodes = eraser._view.nodes
    eraser._meta = meta  # type: ignore[assignment]
    await eraser.forget(make_request(), block_tokens=16)
    meta.nodes = eraser._view.nodes = meta.nodes[:1]
    with pytest.raises(TransportError, match="dmp-1 left the cluster"):
        await eraser.forget(make_request(), block_tokens=16)

from __future__ import annotations

from collections import Counter

from tests.fix_dmp import block_key
from tierkv.dmp.client.ring import rank_nodes
from tierkv.kvcore.ids import NodeId

NODES = [(NodeId(name), 1.0) for name in ("dmp-a", "dmp-b", "dmp-c")]
KEYS = [block_key(f"block-{i}") for i in range(3000)]


def test_golden_vectors() -> None:
    """These must never change: readers without a directory look where writers put."""
    found = {f"block-{i}": "".join(n[-1] for n in rank_nodes(KEYS[i], NODES)) for i in range(6)}
    assert found == GOLDEN
    heavy = [(NodeId("dmp-a"), 1.0), (NodeId("dmp-b"), 4.0), (NodeId("dmp-c"), 1.0)]
    assert "".join(rank_nodes(KEYS[i], heavy)[0][-1] for i in range(16)) == GOLDEN_HEAVY


GOLDEN = {
    "block-0": "abc",
    "block-1": "bac",
    "block-2": "acb",
    "block-3": "acb",
    "block-4": "cab",
    "block-5": "bac",
}
GOLDEN_HEAVY = "abbabbbbbbacbbcb"


def test_the_order_of_the_nodes_does_not_matter() -> None:
    for key in KEYS[:50]:
        assert rank_nodes(key, NODES) == rank_nodes(key, NODES[::-1])


def test_blocks_follow_the_weights() -> None:
    weighted = [(NodeId("dmp-a"), 1.0), (NodeId("dmp-b"), 2.0), (NodeId("dmp-c"), 3.0)]
    first = Counter(rank_nodes(key, weighted)[0] for key in KEYS)
    assert abs(first[NodeId("dmp-a")] - 500) < 100
    assert abs(first[NodeId("dmp-b")] - 1000) < 120
    assert abs(first[NodeId("dmp-c")] - 1500) < 120


def test_a_lost_node_moves_only_its_own_blocks() -> None:
    for key in KEYS[:300]:
        before = rank_nodes(key, NODES)
        after = rank_nodes(key, NODES[:2])
        assert after == [node for node in before if node != "dmp-c"]


def test_nodes_without_weight_get_nothing() -> None:
    assert rank_nodes(KEYS[0], []) == []
    assert rank_nodes(KEYS[0], [(NodeId("full"), 0.0), *NODES[:1]]) == ["dmp-a"]

"""Placement of a new block: weighted rendezvous hashing over the live nodes.

Pure. Every writer computes the same ranking, so a reader finds a block even when the meta server is
down. A node that joins or leaves moves only its own share of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from tierkv.kvcore.ids import BlockKey, NodeId


def rank_nodes(key: BlockKey, nodes: Sequence[tuple[NodeId, float]]) -> list[NodeId]:
    """Rank nodes for a block, best first; nodes without weight are left out.

    Each node draws a number from the key and the node's name; a node of twice the weight ranks
    first twice as often.

    Args:
        key: key of the block.
        nodes: (node, weight), for example the node's capacity in bytes; order does not matter.

    Ref: Schindler & Schomaker 2005, "Weighted distributed hash tables" (logarithmic method).
    """
    scored = [(_score(key, node, weight), node) for node, weight in nodes if weight > 0]
    return [node for _, node in sorted(scored, key=lambda pair: (-pair[0], pair[1]))]


def _score(key: BlockKey, node: NodeId, weight: float) -> float:
    draw = xxhash.xxh3_64_intdigest(key + node.encode())
    # 53 bits, shifted by a half: exact in a float and never 0 or 1.
    return -weight / math.log(((draw >> 11) + 0.5) / (1 << 53))

"""Where a new block goes: weighted rendezvous hashing over the live nodes.

Pure; computed by every writer alike, so that a reader finds a block even when the meta server is
down. A node that joins or leaves moves only its own share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from tierkv.kvcore.ids import BlockKey, NodeId


def rank_nodes(key: BlockKey, nodes: Sequence[tuple[NodeId, float]]) -> list[NodeId]:
    """Rank nodes for a block, best first; nodes without weight are left out.

    Each node draws a number from the key and its name; a node of twice the weight comes first
    twice as often.

    Args:
        key: the block.
        nodes: (node, weight), for example its capacity in bytes; order does not matter.

    Ref: Schindler & Schomaker 2005, "Weighted distributed hash tables" (logarithmic method).
    """
    scored = [(_score(key, node, weight), node) for node, weight in nodes if weight > 0]
    return [node for _, node in sorted(scored, key=lambda pair: (-pair[0], pair[1]))]


def _score(key: BlockKey, node: NodeId, weight: float) -> float:
    draw = xxhash.xxh3_64_intdigest(key + node.encode())
    # 53 bits, shifted by a half: exact in a float and never 0 or 1.
    return -weight / math.log(((draw >> 11) + 0.5) / (1 << 53))

"""Where the plan of a statement wants a call to be answered."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.kvcore.ids import NodeId


@dataclass(frozen=True, slots=True)
class PreferredNode:
    """A node, and what of the prompt is there.

    Attributes:
        node_id: the node.
        tokens: leading tokens of the prompt that the plan counts as being there: because a call of
            the same statement computes them, or because it knows where their KV is and decided so.
    """

    node_id: NodeId
    tokens: int = 0

"""Erasing blocks: out of memory, disk and archive, with their bytes overwritten.

A part of DmpNode, called from any thread; dmp/node/state.py explains the lock. The order makes sure
that no copy comes back: memory first, then the end of the transfers that touched it (among them a
copy on its way to the disk), then the lower tier, then memory again, where a promotion may have put
a block meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.node.state import NodeState
from tierkv.dmp.segment.slots import SlotState
from tierkv.kvcore.block import Erased, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved
from tierkv.kvcore.errors import TransportError
from tierkv.kvcore.ids import BlockKey

_AT_ONCE: Final = 32
"""Blocks that are overwritten under one hold of the lock."""

_WAIT_S: Final = 30.0
"""Longest wait for transfers of erased blocks; a transfer ends or times out before."""


class Eraser:
    """Erases blocks of one node."""

    def __init__(
        self,
        state: NodeState,
        lower: LowerTier | None,
        gone_below: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        """Use a node's parts; ``gone_below`` is told about blocks that left the lower tier."""
        self._state = state
        self._lower = lower
        self._gone_below = gone_below

    def erase(self, keys: Sequence[BlockKey]) -> Erased:
        """Erase all copies of blocks; see PoolNode.

        Raises:
            TransportError: a transfer still touches a block, or the lower tier failed.
        """
        removed = self._out_of_memory(keys)
        self._await_transfers()
        if self._lower is None:
            return removed
        blocks, size = self._lower.erase(keys)
        self._gone_below(keys)
        again = self._out_of_memory(keys)
        self._await_transfers()
        return removed + again + Erased(resting_blocks=blocks, resting_bytes=size)

    def _out_of_memory(self, keys: Sequence[BlockKey]) -> Erased:
        blocks = size = 0
        state = self._state
        for at in range(0, len(keys), _AT_ONCE):
            events: list[BlockEvent] = []
            with state.lock:
                for key in keys[at : at + _AT_ONCE]:
                    slot = state.table.store.find(key)
                    if slot is None or slot.state is SlotState.QUARANTINED:
                        continue
                    if slot.state is SlotState.SEALED:
                        events.append(BlockRemoved(key, Tier.L2))
                        blocks, size = blocks + 1, size + slot.length
                    state.erase(slot)
                state.tell(events)
        return Erased(blocks, size)

    def _await_transfers(self) -> None:
        """Wait until no transfer touches a slot that is being erased."""
        state = self._state
        with state.lock:
            waited = set(state.erasing)
            if not state.erased.wait_for(lambda: not waited & state.erasing, _WAIT_S):
                raise TransportError(
                    f"{len(waited & state.erasing)} erased blocks of {state.config.node_id} are "
                    "still being read"
                )

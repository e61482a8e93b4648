"""Messages from the scheduler's half of the connector to the workers' half, and back.

Values only; they are pickled once per step. Blocks have the scheduler's names here. Each worker
derives the names of its own parts (integrations/keys.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tierkv.kvcore.block import ROOT_PARENT
from tierkv.kvcore.ids import BlockKey

IDLE_WAIT_S: Final = 0.002
"""Longest wait, per step, for the pool in an idle engine: about the time lost anyway, since vLLM
asks again only after an empty step and a sleep of a millisecond."""


@dataclass(frozen=True, slots=True)
class BlockSave:
    """A full block to be written to the pool.

    Attributes:
        key: name of the block.
        block_id: place of the block in the engine's memory, valid until the save is over.
        request_id: the request with the block.
        fresh: this step computes the rest of the block, so each layer is complete after its
            attention; False: the block is complete already.
        parent: name of the previous block, which the pool keeps as long as this block.
        depth: number of blocks before this block.
    """

    key: BlockKey
    block_id: int
    request_id: str
    fresh: bool
    parent: BlockKey = ROOT_PARENT
    depth: int = 0


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Leading blocks of a request, to be read from the pool in this order.

    Attributes:
        request_id: the waiting request.
        keys: names of the blocks.
        block_ids: destinations in the engine's memory.
        in_step: this step's attention reads the blocks, layer by layer; False: the request is not
            in this step, and waits for all blocks.
    """

    request_id: str
    keys: tuple[BlockKey, ...]
    block_ids: tuple[int, ...]
    in_step: bool


@dataclass(slots=True)
class StepPlan:
    """The work of one step.

    Attributes:
        saves: blocks to be written.
        loads: blocks to be read.
        closing: finished requests whose blocks are kept for saving; to be reported when the saves
            are over.
        preempted: requests whose blocks may be overwritten in this step.
        number: number of the step, if the scheduler wants a report of its end; else 0.
        idle: the step computes nothing, so a short wait delays no request.
    """

    saves: list[BlockSave] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    number: int = 0
    idle: bool = False


@dataclass(slots=True)
class StepReport:
    """A worker's report after a step.

    Attributes:
        unsaved: names of blocks that were to be saved and are not in the pool.
        step: number of the step, if the plan had one.
        load_s: duration of the load of each loaded request.
    """

    unsaved: set[BlockKey] = field(default_factory=set)
    step: int = 0
    load_s: dict[str, float] = field(default_factory=dict)

    def merged(self, other: StepReport) -> StepReport:
        """Merge two workers' reports: a block is saved only if each part is saved."""
        slower = {
            name: max(self.load_s.get(name, 0.0), other.load_s.get(name, 0.0))
            for name in self.load_s | other.load_s
        }
        return StepReport(self.unsaved | other.unsaved, max(self.step, other.step), slower)

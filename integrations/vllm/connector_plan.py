"""What the scheduler's half of the connector tells the workers' half, and what comes back.

Values only; they are pickled once per step. Blocks have the scheduler's names here; each worker
makes the names of its own parts from them (integrations/keys.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tierkv.kvcore.block_key import ROOT_PARENT
from tierkv.kvcore.ids import BlockKey

IDLE_WAIT_S: Final = 0.002
"""Longest wait, per step, for the pool in an engine that has nothing to compute: about what it
would lose anyway, since vLLM asks again only after an empty step and a sleep of a millisecond."""


@dataclass(frozen=True, slots=True)
class BlockSave:
    """A full block to be written to the pool.

    Attributes:
        key: its name.
        block_id: where it lies in the engine's memory; it stays there until the save is over.
        request_id: who has it.
        fresh: this step computes the rest of it, so each layer is there after its attention; else
            it is there already.
        parent: name of the block before it, which the pool keeps as long as this one.
        depth: blocks before it.
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
        request_id: who waits for them.
        keys: their names.
        block_ids: where they go.
        in_step: this step's attention reads them, layer by layer; else the request is not in this
            step, and waits until all is there.
    """

    request_id: str
    keys: tuple[BlockKey, ...]
    block_ids: tuple[int, ...]
    in_step: bool


@dataclass(slots=True)
class StepPlan:
    """One step's work.

    Attributes:
        saves: blocks to be written.
        loads: blocks to be read.
        closing: requests that are over and whose blocks are kept for their saves: to be reported
            when these are over too.
        preempted: requests whose blocks others may overwrite in this step.
        number: of the step, if the scheduler wants to hear when it ended; else 0.
        idle: nothing is computed in this step, so nobody is kept by waiting a moment.
    """

    saves: list[BlockSave] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    number: int = 0
    idle: bool = False


@dataclass(slots=True)
class StepReport:
    """What a worker has to say after a step.

    Attributes:
        unsaved: names of blocks that were to be saved and are not in the pool.
        step: number of the step, if the plan had one.
        load_s: of requests whose blocks were read: how long that took.
    """

    unsaved: set[BlockKey] = field(default_factory=set)
    step: int = 0
    load_s: dict[str, float] = field(default_factory=dict)

    def merged(self, other: StepReport) -> StepReport:
        """Return what two workers say together: a block is saved where each part of it is."""
        slower = {
            name: max(self.load_s.get(name, 0.0), other.load_s.get(name, 0.0))
            for name in self.load_s | other.load_s
        }
        return StepReport(self.unsaved | other.unsaved, max(self.step, other.step), slower)

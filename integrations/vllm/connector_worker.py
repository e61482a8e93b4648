"""A worker's half of the connector: carries out the scheduler's plan for each step.

Called by integrations/vllm/connector.py in the engine's thread, in vLLM's order: vacate,
begin_step, load, layer_needed and layer_computed for each layer, end_step, results. Bytes move in
the door's threads. The engine's memory is given back only when no thread of the door touches it any
more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from tierkv.dmp.client.values import PutNotes
from tierkv.integrations.keys import rank_key
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.vllm.connector_book import IDLE_WAIT_S, BlockSave, StepPlan, StepReport
from tierkv.integrations.vllm.connector_jobs import BlockReadJob, JobPatience, Saved, SaveJob
from tierkv.integrations.vllm.connector_settings import ConnectorSettings
from tierkv.integrations.vllm.kv_memory import KvMemory
from tierkv.kvcore.block import ROOT_PARENT, Outlook, Owner
from tierkv.kvcore.ids import BlockKey


@dataclass(slots=True)
class StepResults:
    """A worker's results after a step.

    Attributes:
        sent: requests whose blocks need not be kept any more.
        received: requests whose loads have ended.
        failed: places of failed loads.
        report: report to the scheduler's half.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)


class WorkerSide:
    """Moves blocks of one worker; used by one thread."""

    def __init__(
        self,
        door: PoolDoor,
        settings: ConnectorSettings,
        memory: KvMemory,
        *,
        block_tokens: int,
        now: Callable[[], float],
    ) -> None:
        """Begin without work.

        Args:
            door: the door to the pool, with this worker's part of each block in ``identity``.
            settings: the engine's settings.
            memory: the engine's KV.
            block_tokens: tokens of a block.
            now: a clock.
        """
        self._door = door
        self._memory = memory
        self._block_tokens = block_tokens
        self._patience = JobPatience(settings.load_timeout_ms / 1_000, now)
        self._layers = {name: index for index, name in enumerate(memory.layer_names)}
        self._plan = StepPlan()
        self._idle = False
        self._fresh: SaveJob | None = None
        self._saving: list[SaveJob] = []
        self._loading: list[BlockReadJob] = []
        self._in_step: list[BlockReadJob] = []
        self._closing: set[str] = set()
        self._results = StepResults()

    # A step, in this order

    def vacate(self, preempted: set[str]) -> None:
        """Wait until no thread reads blocks that may be overwritten now."""
        if not preempted:
            return
        concerned = [job for job in self._saving if job.concerns(preempted)]
        for job in concerned:
            if not _future(job).cancel():
                wait([_future(job)])

    def begin_step(self, plan: StepPlan) -> None:
        """Begin to save complete blocks, and prepare to save the blocks of this step."""
        self._plan, self._idle = plan, plan.idle
        self._results.report.step = plan.number
        self._closing |= set(plan.closing)
        late = [save for save in plan.saves if not save.fresh]
        fresh = [save for save in plan.saves if save.fresh]
        if late:
            job = self._submit(self._job(late))
            for layer in self._layers.values():
                job.layer_ready(layer)
            job.step_over(set())
        self._fresh = self._job(fresh) if fresh else None

    def load(self) -> None:
        """Begin the step's loads; called before the forward pass if the pass needs the blocks."""
        for load in self._plan.loads:
            job = BlockReadJob(load, self._parts(load.keys), self._memory, self._patience)
            job.submitted(self._door.submit(job.run, 0, name="load", urgent=True))
            (self._in_step if load.in_step else self._loading).append(job)

    def layer_needed(self, name: str) -> None:
        """Wait until the step's loads of a layer are in the engine's memory."""
        layer = self._layers.get(name)
        if layer is None:
            return
        for job in self._in_step:
            job.wait(layer)

    def layer_computed(self, name: str) -> None:
        """Start saving the layer."""
        layer = self._layers.get(name)
        if self._fresh is None or layer is None:
            return
        self._fresh.layer_ready(layer)
        if self._fresh.future is None:
            # Not earlier: the job waits for layers, in a thread that this step's loads may need.
            self._submit(self._fresh)

    def end_step(self) -> None:
        """End the step's work; afterwards no load of the step writes to the engine's memory."""
        spoilt = {job.load.request_id for job in self._in_step if self._end_load(job)}
        self._in_step.clear()
        if self._fresh is not None:
            self._fresh.step_over(spoilt)
            if self._fresh.future is None:  # No layer was computed.
                self._results.report.unsaved |= self._fresh.nothing.unsaved
        self._fresh = None
        self._plan = StepPlan()

    def results(self) -> StepResults:
        """Return the results since the last call; an idle engine waits a moment for a load."""
        futures = [job.future for job in self._loading if job.future is not None]
        if futures and self._idle:
            wait(futures, IDLE_WAIT_S, FIRST_COMPLETED)
        self._see_loads()
        self._see_saves()
        found, self._results = self._results, StepResults()
        return found

    def close(self) -> None:
        """Wait until no thread touches the engine's memory; pending saves are dropped."""
        for job in self._saving:
            job.drop()
        wait([_future(job) for job in self._saving])
        for load in (*self._loading, *self._in_step):
            load.good()

    # Inside

    def _job(self, saves: Sequence[BlockSave]) -> SaveJob:
        parts = self._parts([save.key for save in saves])
        notes = [self._notes(save) for save in saves]
        return SaveJob(saves, parts, self._memory, self._patience, notes)

    def _submit(self, job: SaveJob) -> SaveJob:
        job.future = self._door.submit(job.run, job.nothing, name="save")
        self._saving.append(job)
        return job

    def _notes(self, save: BlockSave) -> PutNotes:
        """Return the eviction notes: without parents, heads of chains would be evicted first."""
        parent = save.parent if save.parent == ROOT_PARENT else self._parts([save.parent])[0]
        return PutNotes(
            parent=parent,
            tokens=self._block_tokens,
            owner=Owner(model=self._door.identity.label),
            outlook=Outlook(depth=save.depth),
        )

    def _see_loads(self) -> None:
        under_way: list[BlockReadJob] = []
        for job in self._loading:
            if job.future is None or not job.future.done():
                under_way.append(job)
                continue
            self._end_load(job)
            self._results.received.add(job.load.request_id)
        self._loading = under_way

    def _end_load(self, job: BlockReadJob) -> bool:
        """Process a load's end; return True if any block failed."""
        good = job.good()
        lost = job.load.block_ids[good:]
        self._results.failed.update(lost)
        if not job.load.in_step:
            self._results.report.load_s[job.load.request_id] = job.took_s
        self._door.count("read_bytes", good * self._memory.layer_bytes * len(self._layers))
        return bool(lost)

    def _see_saves(self) -> None:
        under_way: list[SaveJob] = []
        for job in self._saving:
            future = _future(job)
            if (job.late and future.cancel()) or future.cancelled():
                self._results.report.unsaved |= job.nothing.unsaved
            elif future.done():
                self._results.report.unsaved |= future.result().unsaved
                self._count_saved(future.result().written)
            else:
                under_way.append(job)
        self._saving = under_way
        done = {r for r in self._closing if not any(job.concerns({r}) for job in under_way)}
        self._closing -= done
        self._results.sent |= done

    def _count_saved(self, blocks: int) -> None:
        self._door.count("write_bytes", blocks * self._memory.layer_bytes * len(self._layers))
        if self._door.identity.rank == 0:
            self._door.count("stored_tokens", blocks * self._block_tokens)

    def _parts(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        identity = self._door.identity
        return [rank_key(key, identity.rank, identity.ranks) for key in keys]


def _future(job: SaveJob) -> Future[Saved]:
    assert job.future is not None
    return job.future

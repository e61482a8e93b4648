"""Transfers between the engine's memory and the pool, as work for the door's threads.

Called by integrations/vllm/connector_worker.py, which creates a job in the engine's thread and runs
the job in a thread of the door. A finished job no longer touches the engine's memory, and a job
that never ran did not touch the memory. The memory is therefore free for reuse exactly when the
job's future is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.values import PutNotes
from tierkv.dmp.client.writes import OpenPut
from tierkv.integrations.vllm.connector_book import BlockLoad, BlockSave
from tierkv.integrations.vllm.kv_memory import KvMemory, Window
from tierkv.kvcore.ids import BlockKey

BATCH_BYTES: Final = 8 << 20
"""Bytes of one call to the pool; a job checks its deadline between calls."""

FIRST_LAYERS_BYTES: Final = 1 << 20
"""Least bytes of a group of layers in one read; the first layer is read alone."""

_PUT_DEADLINE_S: Final = 120.0
"""Lifetime of open slots: longer than any step of an engine."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a job's time, and the clock to check."""

    at: float
    now: Callable[[], float]

    @property
    def over(self) -> bool:
        """True if the time is over."""
        return self.now() > self.at


@dataclass(frozen=True, slots=True)
class JobPatience:
    """The time a job may take, and its clock."""

    seconds: float
    now: Callable[[], float]

    def begin(self) -> Deadline:
        """Start the time."""
        return Deadline(self.now() + self.seconds, self.now)


class BlockReadJob:
    """Reads leading blocks of one request; whole blocks, or layer after layer.

    Attributes:
        load: the blocks to read.
        window: the destination.
        future: number of complete leading blocks; set when the job is submitted.
        took_s: time from creation to the end in seconds; 0 before the end.
    """

    def __init__(
        self, load: BlockLoad, parts: Sequence[BlockKey], memory: KvMemory, patience: JobPatience
    ) -> None:
        self.load = load
        self.window: Window = memory.window(load.block_ids)
        self.future: Future[int] | None = None
        self._parts = parts
        self._layers = len(memory.layer_names)
        self._layer_bytes = memory.layer_bytes
        self._deadline = patience.begin()
        self._now, self._began = patience.now, patience.now()
        self.took_s = 0.0
        self._change = threading.Condition()
        self._good = len(parts)
        self._there = 0
        self._awaited: set[int] = set()

    def run(self, pool: Pool) -> int:
        """Read; return the number of complete leading blocks."""
        try:
            return self._read_groups(pool)
        finally:
            self.took_s = self._now() - self._began

    def _read_groups(self, pool: Pool) -> int:
        groups = self._layer_groups() if self.load.in_step else self._block_groups()
        for blocks, layers in groups:
            wanted = range(blocks.start, min(blocks.stop, self._good))
            if self._deadline.over:
                self._good = min(self._good, blocks.start)
            elif wanted:
                self._read(pool, wanted, layers)
            if not self._good:
                break
            with self._change:
                self._there = layers.stop
                self._change.notify_all()
        return self._good

    def wait(self, layer: int) -> None:
        """Wait until a layer has arrived, or the job has ended."""
        with self._change:
            self._change.wait_for(lambda: self._there > layer or self._ended())
        self._awaited.add(layer)
        self.window.restore(layer, len(self._parts))

    def good(self) -> int:
        """Wait for the end; return the number of leading blocks the engine may use.

        A load within a step returns 0 if the engine did not wait for each layer: the engine may
        have read a layer too early.
        """
        assert self.future is not None
        good = self.future.result()
        if self.load.in_step:
            return good if len(self._awaited) == self._layers else 0
        for layer in range(self._layers if good else 0):
            self.window.restore(layer, good)
        return good

    def submitted(self, future: Future[int]) -> None:
        """Store the future of the run."""
        self.future = future
        future.add_done_callback(lambda _: self._wake())

    def _ended(self) -> bool:
        return self.future is not None and self.future.done()

    def _wake(self) -> None:
        with self._change:
            self._change.notify_all()

    def _read(self, pool: Pool, blocks: range, layers: range) -> None:
        places = [(block, layer) for block in blocks for layer in layers]
        view = self.window.view
        done = pool.get_ranges_into(
            [(self._parts[b], layer, view(layer, b)) for b, layer in places]
        )
        failed = [block for (block, _), ok in zip(places, done, strict=True) if not ok]
        self._good = min([self._good, *failed])

    def _block_groups(self) -> list[tuple[range, range]]:
        step = max(BATCH_BYTES // (self._layers * self._layer_bytes), 1)
        count = len(self._parts)
        layers = range(self._layers)
        return [(range(b, min(b + step, count)), layers) for b in range(0, count, step)]

    def _layer_groups(self) -> list[tuple[range, range]]:
        blocks = range(len(self._parts))
        step = max(FIRST_LAYERS_BYTES // (len(blocks) * self._layer_bytes), 1)
        starts = [0, *range(1, self._layers, step)]
        ends = [*starts[1:], self._layers]
        return [(blocks, range(a, b)) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save.

    Attributes:
        written: number of written blocks; other blocks were in the pool already, or failed.
        unsaved: names of the blocks that are not in the pool.
    """

    written: int
    unsaved: frozenset[BlockKey]


class SaveJob:
    """Writes blocks, each layer right after the engine computed it, and seals complete blocks.

    Attributes:
        saves: the blocks to save.
        future: the result; set when the job is submitted.
    """

    def __init__(
        self,
        saves: Sequence[BlockSave],
        parts: Sequence[BlockKey],
        memory: KvMemory,
        patience: JobPatience,
        notes: Sequence[PutNotes],
    ) -> None:
        self.saves = saves
        self.future: Future[Saved] | None = None
        self._parts = parts
        self._notes = notes
        self._window = memory.window([save.block_id for save in saves])
        self._layer_count = len(memory.layer_names)
        self._layer_bytes = memory.layer_bytes
        self._patience = patience
        self._change = threading.Condition()
        self._ready: list[int] = []
        self._step_over = False
        self._deadline: Deadline | None = None
        self._spoilt: set[str] = set()
        self._dropped = False

    @property
    def late(self) -> bool:
        """True if the job's time, which begins at the end of the step, is over."""
        return self._deadline is not None and self._deadline.over

    @property
    def nothing(self) -> Saved:
        """The result of a job that never ran."""
        return Saved(0, frozenset(save.key for save in self.saves))

    def concerns(self, request_ids: set[str]) -> bool:
        """True if the job reads blocks of one of the requests."""
        return any(save.request_id in request_ids for save in self.saves)

    def layer_ready(self, layer: int) -> None:
        """Record that the engine has computed a layer; called by the engine's thread.

        A layer that is computed twice in a step was not ready the first time: then nothing is
        saved.
        """
        self._window.capture(layer)
        with self._change:
            self._dropped = self._dropped or layer in self._ready
            self._ready.append(layer)
            self._change.notify_all()

    def step_over(self, spoilt: set[str]) -> None:
        """End the step: missing layers will not come any more.

        Args:
            spoilt: requests whose blocks were computed behind a failed load.
        """
        with self._change:
            self._step_over = True
            self._deadline = self._patience.begin()
            self._spoilt = spoilt
            self._change.notify_all()

    def drop(self) -> None:
        """Stop as soon as possible, and save nothing."""
        with self._change:
            self._dropped = True
            self._change.notify_all()

    def run(self, pool: Pool) -> Saved:
        """Write, and seal the blocks that are complete at the end of the step."""
        size = self._layer_bytes * self._layer_count
        items = [(part, size, self._layer_bytes) for part in self._parts]
        if self._dropped or self.late:
            return self.nothing
        opened = pool.open_puts(items, notes=self._notes, deadline_s=_PUT_DEADLINE_S)
        puts = {index: put for index, put in enumerate(opened) if put is not None}
        offered, sealed = set(puts), set[int]()
        try:
            if self._write_all(pool, puts):
                self._forget_spoilt(pool, puts)
                done = pool.seal_puts(list(puts.values()))
                sealed = {index for index, ok in zip(puts, done, strict=True) if ok}
        finally:
            pool.abort_puts([put for put in opened if put is not None])
        return Saved(len(sealed), frozenset(self.saves[i].key for i in offered - sealed))

    def _write_all(self, pool: Pool, puts: dict[int, OpenPut]) -> bool:
        """Write layers as they come; True if all came. Failed puts are removed from ``puts``."""
        written = 0
        while written < self._layer_count and puts:
            layers = self._layers_after(written)
            if not layers or self._dropped or self.late:
                return False
            self._write(pool, puts, layers)
            written += len(layers)
        with self._change:
            self._change.wait_for(lambda: self._step_over or self._dropped)
            return not self._dropped

    def _layers_after(self, written: int) -> list[int]:
        """Wait for layers beyond the written ones; empty if no more layers come."""
        with self._change:
            self._change.wait_for(
                lambda: len(self._ready) > written or self._step_over or self._dropped
            )
            return self._ready[written:]

    def _write(self, pool: Pool, puts: dict[int, OpenPut], layers: Sequence[int]) -> None:
        step = max(BATCH_BYTES // self._layer_bytes, 1)
        places = [(index, layer) for layer in layers for index in puts]
        for start in range(0, len(places), step):
            batch = [(i, layer) for i, layer in places[start : start + step] if i in puts]
            view = self._window.view
            done = pool.write_ranges([(puts[i], layer, view(layer, i)) for i, layer in batch])
            for (index, _), ok in zip(batch, done, strict=True):
                if not ok:
                    puts.pop(index, None)

    def _forget_spoilt(self, pool: Pool, puts: dict[int, OpenPut]) -> None:
        spoilt = [i for i in puts if self.saves[i].request_id in self._spoilt]
        pool.abort_puts([puts.pop(index) for index in spoilt])

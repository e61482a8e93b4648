"""Loads blocks from the pool into L1 pages, layer by layer, behind the computation.

Runs in the tiers' worker threads; on a GPU each thread copies in a CUDA stream of its own. Layer l
of all blocks arrives before layer l + 1, and an event per layer lets the engine compute behind the
load; small loads bring several layers, or all, in one read. A GPU reads memory that is mapped here
itself (compute/tiers/host_memory.py). An unreadable block shortens the load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from tierkv.compute.model.pages import L1Pages, LayerWindow
from tierkv.compute.tiers.finder import Absorb, Source
from tierkv.compute.tiers.host_memory import DirectRead, DirectReader
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.dmp.pool_node import PoolNode, RangeRead
from tierkv.kvcore.block import Location, Tier
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import LayoutError, ThrottledError, TransportError
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.layout import FRAME_ALIGNMENT, KvCodec


@contextmanager
def copies_beside(device: torch.device) -> Iterator[None]:
    """Queue this thread's GPU work on a new stream; ``wait_for_copies`` completes the writes.

    The stream begins behind the work queued on the default stream now: kernels of that work may
    still read the pages about to be written.
    """
    if device.type != "cuda":
        yield
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield


def wait_for_copies(device: torch.device) -> None:
    """Wait until the work queued on this thread's stream is done; meanwhile further threads run."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


_HOLD_TTL_S = 30.0
_TRIES = 3
"""How often a load tries to promote blocks that find no room in a node's memory."""
_GIVEN_UP_CHECK_S = 0.05
"""Interval at which a load that waits for room looks whether it is still wanted."""
Held = list[tuple[PoolNode, list[Location]]]
"""Copies to release after a load."""
_Targets = Mapping[int, Sequence[memoryview]]
"""By layer, the destination of each block's range."""


@dataclass(slots=True, eq=False)
class LoadJob:
    """One load in progress; the loader writes the job, the engine watches the events.

    Attributes:
        pages: destinations of the blocks, in order.
        sources: per block, copies to try, the best first.
        layer_ready: set when the layer is in the pages (or never will be).
        good: leading blocks complete as far as loaded; final once ``ended`` is set.
        tiers: tier of each leading block's copy.
        codec: how the blocks' ranges are stored.
        ahead: nobody waits for the blocks yet.
        ended: set when no thread writes into the pages any more.
        given_up: the load is no longer wanted; the loader stops before the next layer.
    """

    pages: tuple[int, ...]
    sources: list[tuple[Source, ...]]
    layer_ready: list[threading.Event]
    good: int
    tiers: list[Tier]
    codec: KvCodec
    ahead: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False
    lost_nodes: set[NodeId] = field(default_factory=set)
    sizes: list[int] = field(default_factory=list)
    """Bytes of a range of each block, once the loader knows."""


def make_job(
    pages: Sequence[int],
    sources: Sequence[tuple[Source, ...]],
    layers: int,
    *,
    codec: KvCodec,
    ahead: bool = False,
) -> LoadJob:
    """Prepare a load of one block per page."""
    events = [threading.Event() for _ in range(layers)]
    tiers = [copies[0].tier for copies in sources]
    return LoadJob(tuple(pages), list(sources), events, len(pages), tiers, codec, ahead)


class _Turns:
    """Lets one load at a time bring blocks into a node's memory, and wait for room there.

    A promoted block is held only after its promotion. Promotions of several loads at once could
    evict each other's blocks before that, and none of the loads would get all of its blocks.

    Attributes:
        promoting: held by a load from its first promotion until its blocks are held.
    """

    def __init__(self) -> None:
        self.promoting = threading.Lock()
        self._holding: set[int] = set()
        self._changed = threading.Condition()

    def holds(self, job: LoadJob) -> None:
        """Count a load as a holder of blocks, until ``ended``."""
        with self._changed:
            self._holding.add(id(job))

    def ended(self, job: LoadJob) -> None:
        """Say that a load has released its blocks."""
        with self._changed:
            self._holding.discard(id(job))
            self._changed.notify_all()

    def wait_for_others(self, job: LoadJob) -> None:
        """Wait until the loads that hold blocks now have ended, or this load is given up."""
        with self._changed:
            others = set(self._holding)
            while others & self._holding and not job.given_up:
                self._changed.wait(_GIVEN_UP_CHECK_S)


class Loader:
    """Executes load jobs. Thread-safe: jobs share the figures and take turns at promotions."""

    def __init__(
        self,
        pages: L1Pages,
        *,
        absorb: Absorb,
        clock: Clock,
        figures: LoadFigures,
        direct: DirectReader | None = None,
    ) -> None:
        self._pages = pages
        self._absorb = absorb
        self._clock = clock
        self._figures = figures
        self._direct = direct
        self._turns = _Turns()

    def run(self, job: LoadJob, *, arrived: Callable[[], None]) -> None:
        """Load all layers, calling ``arrived`` after each; always ends with every event set."""
        held: Held = []
        try:
            self._prepare(job, held)
            with copies_beside(self._pages.kv.device):
                self._read_layers(job, arrived)
        except BaseException:
            job.good = 0  # Before the events: the engine reads it as soon as an event is set.
            raise
        finally:
            for ready in job.layer_ready:
                ready.set()
            self._release(held)
            self._turns.ended(job)

    def _read_layers(self, job: LoadJob, arrived: Callable[[], None]) -> None:
        """Read layer after layer; several small layers at once, because calls are costly."""
        layers = len(job.layer_ready)
        together = self._figures.layers_together(sum(job.sizes[: job.good]))
        direct = self._direct_reader(job)
        if direct is not None:
            together = max(together, direct.layers_together(job.sizes[0], layers))
        for first in range(0, layers, together):
            some = range(first, min(first + together, layers))
            if job.given_up:
                job.good = 0
            if job.good:
                job.good = self._read_some(job, some)
            for layer in some:
                job.layer_ready[layer].set()
            if job.good:
                arrived()

    def _prepare(self, job: LoadJob, held: Held) -> None:
        """Promote resting copies, hold the best copies against eviction, drop lost copies."""
        wanted = list(job.sources)
        pending = list(range(len(wanted)))
        while pending and not any(_is_at_rest(job.sources[b][0]) for b in pending):
            pending = [b for b in self._hold(job, pending, held) if job.sources[b]]
        if pending:
            self._release(held)  # Who waits for a turn holds nothing: the room may be needed.
            self._bring_in_turn(job, wanted, held)
        self._turns.holds(job)
        job.sources = [self._readable(copies, job.codec) for copies in job.sources]
        job.good = next((i for i, copies in enumerate(job.sources) if not copies), job.good)
        for block, copies in enumerate(job.sources[: job.good]):
            job.tiers[block] = copies[0].tier
            job.sizes.append(_place(copies[0]).length // len(job.layer_ready))

    def _bring_in_turn(
        self, job: LoadJob, wanted: Sequence[tuple[Source, ...]], held: Held
    ) -> None:
        """Hold all blocks while no other load promotes; wait for other loads if room is short."""
        with self._turns.promoting:
            missing = list(range(len(wanted)))
            for _ in range(_TRIES):
                for block in missing:
                    job.sources[block] = wanted[block]
                self._promote_and_hold(job, missing, held)
                missing = [
                    b for b in missing if not job.sources[b] and any(map(_is_at_rest, wanted[b]))
                ]
                if not missing or job.given_up:
                    break
                self._turns.wait_for_others(job)
            self._turns.holds(job)

    def _promote_and_hold(self, job: LoadJob, blocks: Iterable[int], held: Held) -> None:
        pending = list(blocks)
        while pending:
            self._promote(job, pending)
            pending = self._hold(job, [b for b in pending if job.sources[b]], held)

    def _release(self, held: Held) -> None:
        for node, locations in held:
            with self._absorb():
                node.release(locations)
        held.clear()

    def _readable(self, copies: tuple[Source, ...], codec: KvCodec) -> tuple[Source, ...]:
        """Leave out copies that rest, or that can't be KV of this layout, whatever their key says.

        Keys of different layouts differ (kvcore/block.py); this check is for a writer with a
        wrong key. Copies of an entropy-coded block are read into room for one size, the size of the
        best copy.
        """
        readable: list[Source] = []
        for source in copies:
            if source.location is None:
                continue
            with self._absorb() as attempt:
                self._check_size(source.location, codec)
            length = source.location.length
            if attempt.ok and (codec.has_fixed_size or length == _length(readable, length)):
                readable.append(source)
        return tuple(readable)

    def _check_size(self, location: Location, codec: KvCodec) -> None:
        layout = self._pages.codecs.layout_of(codec)
        expected, length = layout.stored_bytes, location.length
        if codec.has_fixed_size:
            fits = length == expected
        else:
            fits = 0 < length <= expected and length % (layout.layers * FRAME_ALIGNMENT) == 0
        if not fits:
            bound = "of" if codec.has_fixed_size else "of up to"
            raise LayoutError(
                f"{location.node} has a block of {length} bytes, not {bound} {expected}"
            )

    def _promote(self, job: LoadJob, blocks: Sequence[int]) -> None:
        """Have nodes read blocks into memory if the best copy rests (tier L4)."""
        resting = [b for b in blocks if job.sources[b] and _is_at_rest(job.sources[b][0])]
        for some in _by_node(job, resting).values():
            keys = [job.sources[b][0].key for b in some]
            node = job.sources[some[0]][0].node
            found: list[Location | None] = [None] * len(some)
            began = self._clock.now()
            with self._absorb() as attempt:
                found = node.promote([key for key in keys if key is not None])
            if isinstance(attempt.error, TransportError | ThrottledError):
                job.lost_nodes.add(node.node_id)
            size = sum(at.length for at in found if at is not None)
            self._figures.promoted(size, self._clock.now() - began)
            for block, location in zip(some, found, strict=True):
                first, *others = job.sources[block]
                here = [] if location is None else [replace(first, location=location)]
                job.sources[block] = (*here, *others)
        again = [b for b in resting if job.sources[b] and _is_at_rest(job.sources[b][0])]
        if again:
            self._promote(job, again)

    def _hold(self, job: LoadJob, blocks: Sequence[int], held: Held) -> list[int]:
        """Hold the best copies of blocks; return blocks whose best copy was gone and is now
        removed.
        """
        gone: list[int] = []
        for some in _by_node(job, blocks).values():
            node = job.sources[some[0]][0].node
            locations = [_place(job.sources[b][0]) for b in some]
            valid = [False] * len(some)
            with self._absorb() as attempt:
                valid = node.hold(locations, ttl_s=_HOLD_TTL_S)
            if isinstance(attempt.error, TransportError | ThrottledError):
                job.lost_nodes.add(node.node_id)
            for block, ok in zip(some, valid, strict=True):
                if not ok:
                    job.sources[block] = job.sources[block][1:]
                    gone.append(block)
            held.append((node, [at for at, ok in zip(locations, valid, strict=True) if ok]))
        return gone

    def _read_some(self, job: LoadJob, layers: range) -> int:
        """Read layers of all blocks, one call per node; return how many leading blocks are good."""
        direct = self._direct_reader(job)
        if direct is not None and self._read_directly(direct, job, layers):
            return job.good
        good = job.good
        pages, sizes = job.pages[:good], job.sizes[:good]
        windows = [self._pages.window(layer, pages, job.codec, sizes) for layer in layers]
        targets = dict(zip(layers, (window.ranges for window in windows), strict=True))
        for blocks in _by_node(job, range(good)).values():
            if not self._read_together(job, blocks, targets):
                good = min(good, self._read_singly(job, blocks, targets))
        for window in windows:
            good = self._commit(window, good, job.codec)
        return good

    def _direct_reader(self, job: LoadJob) -> DirectReader | None:
        """Return the reader for the best copies of all blocks; None if a copy has to be staged."""
        if self._direct is None or not job.good:
            return None
        nodes = {copies[0].node for copies in job.sources[: job.good]}
        served = all(self._direct.serves(node, job.codec) for node in nodes)
        return self._direct if served else None

    def _read_directly(self, direct: DirectReader, job: LoadJob, layers: range) -> bool:
        """Read layers of all blocks in place; False if any block has to be read again, staged."""
        for blocks in _by_node(job, range(job.good)).values():
            source = job.sources[blocks[0]][0]
            read = DirectRead(
                source.node,
                [_place(job.sources[block][0]) for block in blocks],
                [job.pages[block] for block in blocks],
                layers,
                job.codec,
            )
            done, began = False, self._clock.now()
            with self._absorb():
                done = direct.read(read)
            if not done:
                return False
            if source.key is None:  # Else the promotion was measured instead.
                size = sum(job.sizes[block] for block in blocks) * len(layers)
                seconds = self._clock.now() - began
                self._figures.read(source.tier, size, seconds, layers=len(layers))
        return True

    def _commit(self, window: LayerWindow, count: int, codec: KvCodec) -> int:
        """Move the read bytes into the pages; return the number of good leading blocks."""
        began = self._clock.now()
        with self._absorb():
            window.commit(count)
            wait_for_copies(self._pages.kv.device)
        if window.is_staged:
            size = sum(len(one) for one in window.ranges[: window.done])
            self._figures.decoded(codec, size, self._clock.now() - began)
        return window.done

    def _read_together(self, job: LoadJob, blocks: Sequence[int], targets: _Targets) -> bool:
        source = job.sources[blocks[0]][0]
        if source.node.node_id in job.lost_nodes:
            return False
        reads = [
            RangeRead(_place(job.sources[block][0]), layer, ranges[block], job.ahead)
            for layer, ranges in targets.items()
            for block in blocks
        ]
        began = self._clock.now()
        with self._absorb() as attempt:
            source.node.read_ranges(reads)
        if isinstance(attempt.error, TransportError | ThrottledError):
            job.lost_nodes.add(source.node.node_id)
        if source.key is None:  # Else the promotion was measured instead.
            size = sum(len(read.destination) for read in reads)
            seconds = self._clock.now() - began
            if attempt.ok:
                self._figures.read(source.tier, size, seconds, layers=len(targets))
            elif not isinstance(attempt.error, ThrottledError):
                self._figures.lost(source.tier, size, seconds)
        return attempt.ok

    def _read_singly(self, job: LoadJob, blocks: Sequence[int], targets: _Targets) -> int:
        """Find the first block that no copy can give; the preceding blocks are good."""
        for block in blocks:
            if not self._read_one(job, block, targets):
                return block
        return len(job.pages)

    def _read_one(self, job: LoadJob, block: int, targets: _Targets) -> bool:
        for source in job.sources[block]:
            if source.node.node_id in job.lost_nodes:
                continue
            place = _place(source)
            with self._absorb() as attempt:
                source.node.read_ranges(
                    [
                        RangeRead(place, layer, ranges[block], job.ahead)
                        for layer, ranges in targets.items()
                    ]
                )
            if attempt.ok:
                job.tiers[block] = source.tier
                return True
            if isinstance(attempt.error, TransportError | ThrottledError):
                job.lost_nodes.add(source.node.node_id)
        return False


def _by_node(job: LoadJob, blocks: Iterable[int]) -> dict[tuple[NodeId, Tier], list[int]]:
    """Group blocks by the place of the best copy, to read each group in one call."""
    groups: dict[tuple[NodeId, Tier], list[int]] = {}
    for block in blocks:
        best = job.sources[block][0]
        groups.setdefault((best.node.node_id, best.tier), []).append(block)
    return groups


def _is_at_rest(source: Source) -> bool:
    return source.location is None


def _length(copies: Sequence[Source], default: int) -> int:
    return _place(copies[0]).length if copies else default


def _place(source: Source) -> Location:
    assert source.location is not None, "a resting copy is promoted before it is read"
    return source.location

"""Lets the GPU read this host's pool memory itself: verified in place, without a copy on the host.

Called by compute/tiers/loader.py for blocks of pool nodes whose segment is mapped into this
process. An extent of a segment is registered with CUDA when a block in the extent is first loaded,
so memory that the pool does not use is neither allocated nor pinned. Without a GPU nothing is
registered; if CUDA refuses an extent, the loader copies its blocks through memory of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch

from tierkv.compute.model.pages import DeviceWindow, L1Pages
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore.block import Location
from tierkv.kvcore.errors import BlockNotFoundError
from tierkv.kvcore.layout import KvCodec

_log = logging.getLogger(__name__)
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for all GPUs of the process."""

Register = Callable[[int, int], int]
Unregister = Callable[[int], int]


@runtime_checkable
class Mapped(Protocol):
    """A pool node whose memory is mapped into this process; dmp/transport/shm.py says more."""

    def extent(self, location: Location) -> memoryview: ...

    def run(self, location: Location, ranges: range) -> memoryview: ...

    def verify(self, locations: Sequence[Location], ranges: range) -> None: ...


class HostMemory:
    """Extents that are registered with CUDA, by pool node. Thread-safe.

    A node's extents stay registered until the node is gone and no load reads from the node.
    """

    def __init__(self, register: Register, unregister: Unregister) -> None:
        self._register = register
        self._unregister = unregister
        self._extents: dict[PoolNode, dict[int, int]] = {}  # Size by address; refused: 0.
        self._readers: Counter[PoolNode] = Counter()
        self._changed = threading.Condition()

    @property
    def pinned_bytes(self) -> int:
        """Size of all registered extents."""
        with self._changed:
            return sum(size for extents in self._extents.values() for size in extents.values())

    def keep(self, nodes: Collection[PoolNode]) -> None:
        """Let go of the memory of all other nodes; call this before closing a node.

        Blocks until no load reads from these nodes, and while pages are unpinned.
        """
        with self._changed:
            gone = {node: ours for node, ours in self._extents.items() if node not in nodes}
            for node in gone:
                del self._extents[node]
            for node in nodes:
                if isinstance(node, Mapped):
                    self._extents.setdefault(node, {})
            self._changed.wait_for(lambda: not any(self._readers[node] for node in gone))
        for extents in gone.values():
            for address in (address for address, size in extents.items() if size):
                self._unregister(address)

    @contextmanager
    def reading(self, node: PoolNode) -> Iterator[bool]:
        """Keep a node's extents registered meanwhile; False if the node is not kept."""
        with self._changed:
            kept = node in self._extents
            self._readers[node] += kept
        try:
            yield kept
        finally:
            with self._changed:
                self._readers[node] -= kept
                self._readers += Counter()  # Drops zeros, and with them nodes that are gone.
                self._changed.notify_all()

    def pin(self, node: PoolNode, extent: memoryview) -> bool:
        """Register an extent, unless it is registered; call this inside ``reading`` only.

        Returns:
            False if CUDA refuses the extent.
        """
        address = int(np.frombuffer(extent, np.uint8).ctypes.data)
        with self._changed:
            extents = self._extents.get(node)
            if extents is None:
                return False
            if address not in extents:
                code = self._register(address, extent.nbytes)
                extents[address] = 0 if code else extent.nbytes
                if code:
                    _log.warning("CUDA pins no %d bytes of the pool: error %d", len(extent), code)
            return extents[address] > 0


def host_memory() -> HostMemory | None:
    """Return the registration with this machine's CUDA; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return HostMemory(
        lambda address, size: int(cudart.cudaHostRegister(address, size, _PORTABLE)),
        lambda address: int(cudart.cudaHostUnregister(address)),
    )


@dataclass(frozen=True, slots=True)
class DirectRead:
    """Layers of several blocks of one node, and their pages."""

    node: PoolNode
    locations: Sequence[Location]
    pages: Sequence[int]
    layers: range
    codec: KvCodec


_RUN_BYTES: Final = 2 << 20
"""Smaller copies cost calls: 2.1 GB came in 0.22 s with copies of 2 and of 4 MiB, and in 0.29 s
with 1 MiB (H200; layers of 256 KiB)."""
_LEAST_STEPS: Final = 4
"""A load has at least this many steps, so that computing can begin before the load ends."""
_STAGED_BYTES: Final = 128 << 20
"""GPU memory for blocks on their way into pages."""
VERIFIERS: Final = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads that compute checksums, for all loads together; 2 and 8 were as fast."""


class DirectReader:
    """Reads blocks from mapped pool memory into pages, and verifies the blocks meanwhile."""

    def __init__(self, pages: L1Pages, memory: HostMemory, verifiers: Executor) -> None:
        """Start no thread.

        Args:
            pages: destination of all reads.
            memory: registers the memory to read from.
            verifiers: ``VERIFIERS`` threads that compute checksums.
        """
        self._pages = pages
        self._memory = memory
        self._verifiers = verifiers

    def serves(self, node: PoolNode, codec: KvCodec) -> bool:
        """Return whether blocks of a node may be read directly."""
        return codec.has_fixed_size and isinstance(node, Mapped)

    def layers_together(self, layer_bytes: int, layers: int) -> int:
        """Return how many layers of a block one copy should bring."""
        return max(1, min(-(-_RUN_BYTES // layer_bytes), layers // _LEAST_STEPS))

    def read(self, read: DirectRead) -> bool:
        """Bring blocks into their pages; the caller waits for the stream before using the pages.

        Returns:
            False if the device can't read the memory of all blocks; pages then hold garbage.

        Raises:
            CacheError: a block can't be read or has a wrong checksum; pages then hold garbage.
        """
        node = read.node
        assert isinstance(node, Mapped), "asked before"
        with self._memory.reading(node) as kept:
            if not kept or not all(
                self._memory.pin(node, node.extent(place)) for place in read.locations
            ):
                return False
            step = -(-len(read.locations) // (2 * VERIFIERS))
            checks = [
                self._verifiers.submit(node.verify, read.locations[at : at + step], read.layers)
                for at in range(0, len(read.locations), step)
            ]
            try:
                self._copy(node, read)
            finally:
                wait(checks)
                _wait_for_stream(self._pages.kv.device)
                for check in checks:  # A bad block is quarantined, so its copy fails too.
                    check.result()
            # No slot was reused before its copy had ended.
            node.verify(read.locations, read.layers[:0])
        return True

    def _copy(self, node: Mapped, read: DirectRead) -> None:
        layer_bytes = self._pages.codecs.layout_of(read.codec).stored_layer_bytes
        run_bytes = layer_bytes * len(read.layers)
        count = max(1, _STAGED_BYTES // run_bytes)
        for at in range(0, len(read.locations), count):
            numbers = read.pages[at : at + count]
            window = DeviceWindow(self._pages, read.layers, numbers, read.codec)
            for index, place in enumerate(read.locations[at : at + count]):
                run = node.run(place, read.layers)
                if len(run) != run_bytes:
                    raise BlockNotFoundError("a range is not as long as a layer of a page")
                window.fill(index, run)
            window.commit()


def _wait_for_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

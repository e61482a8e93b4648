"""This process's side of RDMA: the devices, opened once, and the memory registered with them.

Shared by the VerbsPoolNodes of a process, because registration of memory is slow (every page is
pinned) and holds for all peers. Thread-safe.

GPU memory is registered as a dmabuf, the form in which Linux shares one device's memory with
another device. This module calls the CUDA driver directly, because only compute/ may import torch;
a process with GPU memory has a CUDA context already.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.dmp.transport.verbs.device import Access, Device, RdmaPort, Region, discover
from tierkv.dmp.transport.verbs.rails import (
    NumaPlace,
    device_place,
    distance,
    memory_place,
    pci_place,
)
from tierkv.kvcore.errors import TransportError

_DRIVER: Final = "libcuda.so.1"
_DMA_BUF_FD: Final = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD."""


@contextlib.contextmanager
def exported_dmabuf(address: int, size: int) -> Iterator[int]:
    """Yield a file descriptor for a range of GPU memory; registrations outlive the descriptor.

    Raises:
        TransportError: no CUDA driver exists, or the driver does not export the range.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise TransportError(f"no GPU memory: {error}") from error
    fd = ctypes.c_int(-1)
    status = driver.cuMemGetHandleForAddressRange(
        ctypes.byref(fd),
        ctypes.c_uint64(address),
        ctypes.c_size_t(size),
        ctypes.c_int(_DMA_BUF_FD),
        ctypes.c_ulonglong(0),
    )
    if status != 0:
        raise TransportError(f"the GPU exports no dmabuf of its memory (CUDA error {status})")
    try:
        yield fd.value
    finally:
        os.close(fd.value)


_IDLE_BOUNCES: Final = 8
"""Number of bounce buffers kept for later calls; only a larger number of concurrent threads needs
more."""


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """Memory that all our devices may read and write.

    Attributes:
        start: address of the first byte.
        size: number of bytes.
        place: place in the machine.
        regions: the registration with each device of the fabric, in the order of the devices.
        owner: keeps the memory alive.
    """

    start: int
    size: int
    place: NumaPlace
    regions: tuple[Region, ...]
    owner: object

    def holds(self, address: int, size: int) -> bool:
        """Return True if a range lies inside."""
        return self.start <= address and address + size <= self.start + self.size

    def local_end(self, device: int, address: int) -> tuple[int, int]:
        """Return a device's address for an address inside, and the device's key."""
        region = self.regions[device]
        return region.base + address - self.start, region.lkey

    def close(self) -> None:
        """Deregister the memory; no work request may use it any more."""
        for region in self.regions:
            region.close()


class Bounce:
    """Registered memory of our own, through which unregistered memory is moved.

    Attributes:
        view: bytes of the buffer.
        memory: registration of the buffer.
    """

    def __init__(self, fabric: Fabric, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self.view = memoryview(self._map)
        self.view[:: mmap.PAGESIZE] = bytes(len(self.view[:: mmap.PAGESIZE]))  # Gets pages.
        try:
            self.memory = fabric.register_own(self.view)
        except TransportError:
            self.view.release()
            self._map.close()
            raise

    def close(self) -> None:
        """Deregister and unmap."""
        self.memory.close()
        with contextlib.suppress(BufferError):  # Views still in use keep the mapping.
            self.view.release()
            self._map.close()


class Fabric:
    """The RDMA ports of this machine that this process uses.

    Attributes:
        ports: in the order of ``devices``.
        devices: the opened devices.
    """

    def __init__(self, ports: Sequence[RdmaPort]) -> None:
        self.ports = tuple(ports)
        self.devices: tuple[Device, ...] = ()
        opened: list[Device] = []
        try:
            for port in ports:
                opened.append(Device(port))
        except TransportError:
            for device in opened:
                device.close()
            raise
        self.devices = tuple(opened)
        self.places = tuple(device_place(port.device) for port in ports)
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._memories: list[LocalMemory] = []
        self._bounces: list[Bounce] = []

    def register(self, memory: memoryview) -> None:
        """Register a caller's memory for good; an already registered range costs nothing.

        Raises:
            TransportError: a device refused.
        """
        address, size = address_of(memory), memory.nbytes
        with self._lock:
            if size and self._find(address, size) is None:
                self._keep(self.register_own(memory))

    def register_gpu(self, address: int, size: int, *, pci_address: str) -> None:
        """Register memory of a GPU for good, so bytes reach the GPU without a copy on the host.

        Rails are chosen by their distance to the GPU. Never run so far: requires a device whose
        driver maps dmabufs (mlx5 does, Soft-RoCE does not).

        Args:
            address: device address; page-aligned, as is ``size``.
            size: bytes.
            pci_address: PCI address of the GPU, for example ``0000:3b:00.0``.

        Raises:
            TransportError: the GPU does not export the memory, or a device can't reach it.
        """
        with self._lock, exported_dmabuf(address, size) as fd:
            if self._find(address, size) is None:
                regions = _on_all(self.devices, lambda d: d.register_dmabuf(fd, size))
                self._keep(LocalMemory(address, size, pci_place(pci_address), regions, None))

    def register_own(self, memory: memoryview) -> LocalMemory:
        """Register memory whose owner will deregister it."""
        address, size = address_of(memory), memory.nbytes
        regions = _on_all(self.devices, lambda d: d.register(address, size, Access.LOCAL))
        return LocalMemory(address, size, memory_place(address), regions, memory)

    def find(self, address: int, size: int) -> LocalMemory | None:
        """Return the registered memory that contains a range."""
        with self._lock:
            return self._find(address, size)

    @contextlib.contextmanager
    def bounce(self, size: int) -> Iterator[Bounce]:
        """Lend registered memory of our own.

        Raises:
            TransportError: no memory could be registered.
        """
        bounce = self._idle_bounce(size) or Bounce(self, size)
        try:
            yield bounce
        finally:
            with self._lock:
                keep = len(self._bounces) < _IDLE_BOUNCES
                if keep:
                    self._bounces.append(bounce)
            if not keep:
                bounce.close()

    def _idle_bounce(self, size: int) -> Bounce | None:
        with self._lock:
            for at, bounce in enumerate(self._bounces):
                if len(bounce.view) == size:
                    return self._bounces.pop(at)
        return None

    def distances(self, place: NumaPlace) -> list[int]:
        """Return the distance of each device from a place."""
        return [distance(device, place) for device in self.places]

    def close(self) -> None:
        """Deregister all memory and close the devices; close queue pairs before."""
        with self._lock:
            memories, self._memories, self._starts = self._memories, [], []
            bounces, self._bounces = self._bounces, []
        for memory in memories:
            memory.close()
        for bounce in bounces:
            bounce.close()
        for device in self.devices:
            device.close()

    def _keep(self, entry: LocalMemory) -> None:
        at = bisect.bisect(self._starts, entry.start)
        self._starts.insert(at, entry.start)
        self._memories.insert(at, entry)

    def _find(self, address: int, size: int) -> LocalMemory | None:
        # Registered ranges may overlap, so the nearest start may belong to a shorter range.
        for at in range(bisect.bisect(self._starts, address) - 1, -1, -1):
            if self._memories[at].holds(address, size):
                return self._memories[at]
        return None


def _on_all(devices: Sequence[Device], register: Callable[[Device], Region]) -> tuple[Region, ...]:
    """Register memory with every device, or with none."""
    regions: list[Region] = []
    try:
        for device in devices:
            regions.append(register(device))
    except TransportError:
        for region in regions:
            region.close()
        raise
    return tuple(regions)


@functools.cache
def local_fabric(names: tuple[str, ...] = ()) -> Fabric | str:
    """Return this process's fabric, opened at the first call, or why RDMA is unavailable.

    The fabric and its devices live as long as the process.

    Args:
        names: devices to use; empty means all.
    """
    found = discover(names)
    if not found.ports:
        return found.reason
    try:
        return Fabric(found.ports)
    except TransportError as error:
        return f"no RDMA: {error.message}"


def address_of(view: memoryview) -> int:
    """Return the address of a buffer's first byte; also works for read-only buffers."""
    if view.nbytes == 0:
        return 0
    data: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return data

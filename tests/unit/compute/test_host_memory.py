from __future__ import annotations

import threading

import numpy as np

from tests.fix_pool import MemoryPoolNode
from tierkv.compute.tiers.host_memory import HostMemory
from tierkv.kvcore.block import Location


class MappedNode(MemoryPoolNode):
    """A node with two extents of its own, as ShmPoolNode has."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.extents = [memoryview(bytearray(size)) for size in sizes]

    def extent(self, location: Location) -> memoryview:
        return self.extents[location.slot]

    def run(self, location: Location, ranges: range) -> memoryview:
        return self.extents[location.slot]

    def verify(self, locations, ranges: range) -> None:
        return None


class Driver:
    """Remembers what it was asked; refuses sizes in ``refuses``."""

    def __init__(self, *refuses: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self._refuses = refuses
        self._sizes: dict[int, int] = {}

    def register(self, address: int, size: int) -> int:
        self.calls.append(("register", size))
        self._sizes[address] = size
        return 712 if size in self._refuses else 0

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", self._sizes[address]))
        return 0


def test_an_extent_is_pinned_once_when_it_is_read_and_let_go_with_its_node() -> None:
    driver = Driver()
    memory = HostMemory(driver.register, driver.unregister)
    near, far = MappedNode(4096, 8192), MemoryPoolNode()
    memory.keep([near, far])
    assert driver.calls == []
    with memory.reading(near) as kept:
        assert kept and memory.pin(near, near.extents[0]) and memory.pin(near, near.extents[0])
        assert memory.pin(near, near.extents[1])
    assert driver.calls == [("register", 4096), ("register", 8192)]
    assert memory.pinned_bytes == 4096 + 8192
    memory.keep([far])
    assert driver.calls[2:] == [("unregister", 4096), ("unregister", 8192)]
    with memory.reading(near) as kept:
        assert not kept and not memory.pin(near, near.extents[0])
    assert len(driver.calls) == 4 and memory.pinned_bytes == 0


def test_what_the_driver_refuses_is_not_asked_again() -> None:
    driver = Driver(4096)
    memory = HostMemory(driver.register, driver.unregister)
    node = MappedNode(4096)
    memory.keep([node])
    for _ in range(3):
        with memory.reading(node):
            assert not memory.pin(node, node.extents[0])
    memory.keep([])
    assert driver.calls == [("register", 4096)]


def test_memory_stays_pinned_until_the_last_reader_has_left() -> None:
    driver = Driver()
    memory = HostMemory(driver.register, driver.unregister)
    node = MappedNode(4096)
    memory.keep([node])
    letting_go = threading.Thread(target=memory.keep, args=([],))
    with memory.reading(node) as kept:
        assert kept and memory.pin(node, node.extents[0])
        letting_go.start()
        while True:  # Until the thread has taken the node out; then it waits for this reader.
            with memory.reading(node) as kept:
                if not kept:
                    break
        assert driver.calls == [("register", 4096)]
    letting_go.join()
    assert driver.calls[1:] == [("unregister", 4096)]
    assert np.frombuffer(node.extents[0], np.uint8).nbytes == 4096

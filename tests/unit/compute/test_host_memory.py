from __future__ import annotations

from tests.fix_pool import MemoryPoolNode
from tierkv.compute.tiers.host_memory import HostMemory


class MappedNode(MemoryPoolNode):
    """A node with memory of its own, as ShmPoolNode has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.memory = bytearray(size)

    def mapped(self) -> memoryview:
        return memoryview(self.memory)


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


def test_segments_are_pinned_once_and_let_go_with_their_node() -> None:
    driver = Driver()
    memory = HostMemory(driver.register, driver.unregister)
    near, other, far = MappedNode(4096), MappedNode(8192), MemoryPoolNode()
    memory.keep([near, far])
    memory.keep([near, other, far])
    assert driver.calls == [("register", 4096), ("register", 8192)]
    memory.keep([other])
    assert driver.calls[2:] == [("unregister", 4096)]
    assert list(memory.pinned.values()) == [8192]


def test_what_the_driver_refuses_is_not_asked_again() -> None:
    driver = Driver(4096)
    memory = HostMemory(driver.register, driver.unregister)
    node = MappedNode(4096)
    for _ in range(3):
        memory.keep([node])
    memory.keep([])
    assert driver.calls == [("register", 4096)] and not memory.pinned

"""Pins this host's pool memory for the GPU: blocks then reach the GPU without a bounce buffer.

Called by compute/node.py whenever the pool nodes change. A segment mapped here is registered once
with CUDA and unregistered when its node goes; without a GPU nothing happens. This project's tests
never ran the CUDA calls themselves: a refusal is logged and copies merely stay slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch

from tierkv.dmp.pool_node import PoolNode

_log = logging.getLogger(__name__)
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for all GPUs of the process."""

Register = Callable[[int, int], int]
Unregister = Callable[[int], int]


@runtime_checkable
class Mapped(Protocol):
    """A pool node whose memory is mapped into this process."""

    def mapped(self) -> memoryview: ...


class HostMemory:
    """Registered segments.

    Attributes:
        pinned: size by address of the registered segments.
    """

    def __init__(self, register: Register, unregister: Unregister) -> None:
        self.pinned: dict[int, int] = {}
        self._refused: set[int] = set()
        self._register = register
        self._unregister = unregister

    def keep(self, nodes: Sequence[PoolNode]) -> None:
        """Have exactly the mapped memory of these nodes registered; blocks while pages are pinned.

        Memory of a removed node is unregistered here; call this before closing the node.
        """
        wanted = dict(_place(node.mapped()) for node in nodes if isinstance(node, Mapped))
        for address in self.pinned.keys() - wanted.keys():
            del self.pinned[address]
            self._unregister(address)
        for address, size in wanted.items():
            if address not in self.pinned and address not in self._refused:
                self._pin(address, size)

    def _pin(self, address: int, size: int) -> None:
        code = self._register(address, size)
        if code:
            self._refused.add(address)
            _log.warning("CUDA does not pin %d bytes of the pool (error %d)", size, code)
        else:
            self.pinned[address] = size


def host_memory() -> HostMemory | None:
    """Return the registration with this machine's CUDA; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return HostMemory(
        lambda address, size: int(cudart.cudaHostRegister(address, size, _PORTABLE)),
        lambda address: int(cudart.cudaHostUnregister(address)),
    )


def _place(memory: memoryview) -> tuple[int, int]:
    return int(np.frombuffer(memory, np.uint8).ctypes.data), memory.nbytes

"""The location of a page's bytes in one of SGLang's host pools.

Created by integrations/sglang/hicache.py for each registered pool; used by page_store.py. A page's
pieces are windows into the pool's own tensors. The addresses come from SGLang and are checked
against the tensors, so no memory outside the tensors is ever read or written.

``prefix_hit`` tells how much of a prefix can be restored. SGLang asks for leading pages. Models
with further pools (state of Mamba layers, sliding windows, indexers) need pages of these pools too:
all pages, or only the last ones. ``TransferBook`` counts transfers from several threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tierkv.kvcore import limits


@dataclass(frozen=True, slots=True)
class SidePool:
    """A host pool beside the keys and values.

    Attributes:
        name: SGLang's name of the pool.
        there: presence of each page of the prefix.
        trailing: number of pages needed at the end of a prefix; None: all pages.
    """

    name: str
    there: Sequence[bool]
    trailing: int | None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The restorable prefixes.

    Attributes:
        pages: longest restorable prefix, in pages.
        by_pool: longest prefix of each pool alone; pools without any pages are missing.
        lengths: all restorable prefixes, in pages.
    """

    pages: int
    by_pool: dict[str, int]
    lengths: list[int]


def leading(there: Sequence[bool]) -> int:
    """Count the true values at the beginning."""
    return next((i for i, is_there in enumerate(there) if not is_there), len(there))


def prefix_hit(kv_name: str, kv: Sequence[bool], sides: Sequence[SidePool]) -> PrefixHit:
    """Intersect the prefixes that each pool allows."""
    pages = leading(kv)
    by_pool = {kv_name: pages} if pages else {}
    lengths = list(range(1, pages + 1))
    for side in sides:
        allowed = _allowed(side, pages)
        if allowed:
            by_pool[side.name] = max(allowed)
        lengths = [length for length in lengths if length in allowed]
    return PrefixHit(lengths[-1] if lengths else 0, by_pool, lengths)


def _allowed(side: SidePool, pages: int) -> set[int]:
    """Return the lengths up to ``pages`` that one pool allows."""
    if side.trailing is None:
        return set(range(1, min(leading(side.there), pages) + 1))
    window = max(side.trailing, 1)
    return {n for n in range(1, pages + 1) if all(side.there[max(0, n - window) : n])}


_MOST: Final = 4_096
"""Limit of kept transfers, for servers without metrics."""


def _book() -> deque[tuple[int, float]]:
    return deque(maxlen=_MOST)


@dataclass(slots=True)
class TransferBook:
    """Transfers since the last ``take``: pages, and gigabytes per second, for SGLang's metrics."""

    reads: deque[tuple[int, float]] = field(default_factory=_book)
    writes: deque[tuple[int, float]] = field(default_factory=_book)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, is_read: bool, pages: int, size_bytes: int, seconds: float) -> None:
        """Record a transfer, unless no page was moved."""
        if pages:
            rate = size_bytes / 1e9 / max(seconds, 1e-9)
            with self._lock:
                (self.reads if is_read else self.writes).append((pages, rate))

    def take(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return and forget all reads and writes."""
        with self._lock:
            taken = list(self.reads), list(self.writes)
            self.reads.clear()
            self.writes.clear()
        return taken


@dataclass(frozen=True, slots=True)
class Arena:
    """The memory of a host tensor.

    Attributes:
        number: position among the tensors of the pool, in SGLang's order.
        start: address of the memory.
        memory: bytes of the tensor; keeps the tensor alive.
    """

    number: int
    start: int
    memory: memoryview

    def window(self, address: int, size: int) -> memoryview | None:
        """Return a range of the bytes; None if the range leaves the memory."""
        offset = address - self.start
        if offset < 0 or size <= 0 or offset + size > self.memory.nbytes:
            return None
        return self.memory[offset : offset + size]


class HostPages:
    """The pages of one host pool.

    If all pieces of a page are equally long, the pieces are moved one by one, directly between pool
    and host memory. Otherwise SGLang makes a flat copy of each page. Both ways give the same bytes:
    pieces are sorted by the pool's tensors and by address within a tensor, which is the order of a
    flat page. The addresses of tensors differ between processes and have no effect.

    Attributes:
        page_tokens: indices of one page.
        page_bytes: bytes of one page.
        pieces: windows of one page; 1 if pages are copied.
        copied: True if pages are copied.
    """

    def __init__(self, host_pool: Any) -> None:
        """Inspect a host pool.

        Raises:
            ValueError: the host pool has no movable bytes, or a page exceeds the pool's limit.
        """
        self._host = host_pool
        self.page_tokens = int(getattr(host_pool, "page_size", 1) or 1)
        self._arenas = _arenas(host_pool)
        self._starts = [arena.start for arena in self._arenas]
        sizes = self._piece_sizes()
        if sizes and len(set(sizes)) == 1 and len(sizes) <= limits.MAX_LAYERS:
            self.pieces, self.page_bytes = len(sizes), sum(sizes)
        else:
            self.pieces, self.page_bytes = 1, len(page_memory(self._flat_page()))
        self.copied = not sizes or len(sizes) != self.pieces
        if not 0 < self.page_bytes <= limits.MAX_SLOT_BYTES:
            raise ValueError(f"a page has {self.page_bytes} bytes")

    @property
    def memory(self) -> list[memoryview]:
        """All memory that pieces lie in."""
        return [] if self.copied else [arena.memory for arena in self._arenas]

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return self.page_bytes // self.pieces

    def windows(self, host_indices: Any, pages: int) -> list[list[memoryview]]:
        """Return the pieces of pages, in place.

        Args:
            host_indices: tensor of the tokens of all pages, page by page.
            pages: number of pages.

        Raises:
            ValueError: the indices do not fit the pages, or the memory is not the host pool's.
        """
        if host_indices.numel() != pages * self.page_tokens:
            raise ValueError(
                f"{host_indices.numel()} indices for {pages} pages of {self.page_tokens} tokens"
            )
        addresses, sizes = self._places(host_indices)
        if len(addresses) != pages * self.pieces:
            raise ValueError(f"{len(addresses)} pieces for {pages} pages of {self.pieces}")
        found: list[list[memoryview]] = []
        for start in range(0, len(addresses), self.pieces):
            places = sorted(addresses[start : start + self.pieces], key=self._place)
            if any(size != self.piece_bytes for size in sizes[start : start + self.pieces]):
                raise ValueError("pieces of another size than before")
            found.append([self._window(address) for address in places])
        return found

    def copy_out(self, host_indices: Any, pages: int) -> list[memoryview]:
        """Return flat copies of pages."""
        firsts = self._firsts(host_indices, pages)
        return [page_memory(self._host.get_data_page(index, flat=True)) for index in firsts]

    def blank(self, pages: int) -> list[Any]:
        """Return empty flat pages as tensors; ``page_memory`` gives the bytes."""
        return [self._flat_page() for _ in range(pages)]

    def copy_in(self, host_indices: Any, flat: Sequence[Any | None]) -> None:
        """Copy flat pages into the host pool; None leaves a page unchanged."""
        firsts = self._firsts(host_indices, len(flat))
        for index, page in zip(firsts, flat, strict=True):
            if page is not None:
                self._host.set_from_flat_data_page(index, page)

    def _flat_page(self) -> Any:
        return self._host.get_dummy_flat_data_page()

    def _firsts(self, host_indices: Any, pages: int) -> list[int]:
        if host_indices is None or host_indices.numel() != pages * self.page_tokens:
            raise ValueError(f"not {pages} pages of {self.page_tokens} indices")
        return [int(i) for i in host_indices[:: self.page_tokens].tolist()]

    def _piece_sizes(self) -> list[int]:
        """Return the sizes of a page's pieces; empty if SGLang gives no addresses."""
        import torch  # A dependency of SGLang; every SGLang process has torch.

        if not self._arenas:
            return []
        try:
            first = torch.arange(self.page_tokens, dtype=torch.int64)
            _, sizes = self._places(first)
        except (NotImplementedError, ValueError, TypeError, AttributeError):
            return []  # The host pool has flat pages only.
        return sizes

    def _places(self, host_indices: Any) -> tuple[list[int], list[int]]:
        addresses, sizes = self._host.get_page_buffer_meta(host_indices)
        if isinstance(sizes, int):
            sizes = [sizes] * len(addresses)
        return [int(a) for a in addresses], [int(s) for s in sizes]

    def _arena(self, address: int) -> Arena | None:
        """Return the tensor that may contain an address."""
        at = bisect_right(self._starts, address) - 1
        return self._arenas[at] if at >= 0 else None

    def _place(self, address: int) -> tuple[int, int]:
        arena = self._arena(address)
        return (-1 if arena is None else arena.number, address)

    def _window(self, address: int) -> memoryview:
        arena = self._arena(address)
        window = None if arena is None else arena.window(address, self.piece_bytes)
        if window is None:
            raise ValueError("SGLang told an address outside of its host pool")
        return window


def page_memory(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, in place; else raise ValueError."""
    import torch  # As above.

    if not tensor.is_contiguous():
        raise ValueError("the page is not contiguous")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _arenas(host_pool: Any) -> list[Arena]:
    """Return the host tensors of a pool, sorted by address."""
    tensors = getattr(host_pool, "get_hybrid_pool_buffer", lambda: None)()
    if tensors is None:
        tensors = [getattr(host_pool, "kv_buffer", None)]
    found = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    arenas = [
        Arena(number, t.data_ptr(), page_memory(t))
        for number, t in enumerate(found)
        if t.is_contiguous()
    ]
    return sorted(arenas, key=lambda arena: arena.start)

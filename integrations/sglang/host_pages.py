"""The location of a page's bytes in one of SGLang's host pools.

Created by integrations/sglang/hicache.py for each registered pool; used by page_store.py. A page's
pieces are windows into the pool's own tensors. The addresses come from SGLang and are checked
against the tensors, so no memory outside the tensors is ever read or written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.kvcore import limits


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

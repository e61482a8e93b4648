"""Where the bytes of a page lie in one of SGLang's host pools.

Made by integrations/sglang/hicache.py for each pool that SGLang registers; used by page_store.py.
A page's pieces are windows into the pool's own tensors, found by the addresses that SGLang tells
and checked against these tensors, so nothing outside of them is ever read or written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.kvcore import limits


@dataclass(frozen=True, slots=True)
class Arena:
    """A host tensor's memory.

    Attributes:
        number: its place among the tensors of its pool, as SGLang has them.
        start: its address.
        memory: its bytes; keeps the tensor alive.
    """

    number: int
    start: int
    memory: memoryview

    def window(self, address: int, size: int) -> memoryview | None:
        """Return some of its bytes; None if they are not all in it."""
        offset = address - self.start
        if offset < 0 or size <= 0 or offset + size > self.memory.nbytes:
            return None
        return self.memory[offset : offset + size]


class HostPages:
    """The pages of one host pool.

    Where all pieces of a page are equally long they are moved one by one, straight between pool and
    host memory. Of other pools SGLang makes a flat copy of each page. Both give the same bytes:
    pieces are taken in the order of the pool's tensors and of the addresses within each, which is
    that of a flat page. Where tensors lie is different in each process and says nothing.

    Attributes:
        page_tokens: indices of one page.
        page_bytes: bytes of one page.
        pieces: windows of one page; 1 where pages are copied.
        copied: whether they are.
    """

    def __init__(self, host_pool: Any) -> None:
        """Look at a pool.

        Raises:
            ValueError: it holds no bytes that could be moved, or a page is too large for the pool.
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
        """Return the pieces of some pages, in place.

        Args:
            host_indices: tensor of the tokens of all pages, page by page.
            pages: how many there are.

        Raises:
            ValueError: there are not so many, or their memory is not the pool's.
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
        """Return flat copies of some pages."""
        firsts = self._firsts(host_indices, pages)
        return [page_memory(self._host.get_data_page(index, flat=True)) for index in firsts]

    def blank(self, pages: int) -> list[Any]:
        """Return flat pages to be filled: tensors, whose bytes ``page_memory`` gives."""
        return [self._flat_page() for _ in range(pages)]

    def copy_in(self, host_indices: Any, flat: Sequence[Any | None]) -> None:
        """Put flat pages where they belong; None leaves a page as it is."""
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
        """Return the sizes of a page's pieces; nothing where SGLang tells no addresses."""
        import torch  # SGLang's; an engine without it is none of ours.

        if not self._arenas:
            return []
        try:
            first = torch.arange(self.page_tokens, dtype=torch.int64)
            _, sizes = self._places(first)
        except (NotImplementedError, ValueError, TypeError, AttributeError):
            return []  # Such a pool has flat pages only.
        return sizes

    def _places(self, host_indices: Any) -> tuple[list[int], list[int]]:
        addresses, sizes = self._host.get_page_buffer_meta(host_indices)
        if isinstance(sizes, int):
            sizes = [sizes] * len(addresses)
        return [int(a) for a in addresses], [int(s) for s in sizes]

    def _arena(self, address: int) -> Arena | None:
        """Return the tensor that an address may lie in."""
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
    """Return a contiguous CPU tensor's bytes, in place; ValueError if it isn't one."""
    import torch  # As above.

    if not tensor.is_contiguous():
        raise ValueError("the page is not contiguous")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _arenas(host_pool: Any) -> list[Arena]:
    """Return the host tensors of a pool, by address."""
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

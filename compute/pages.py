"""L1: the pages of KV a compute node owns, as one tensor.

The engine reads and writes it through attention; loader and publisher threads see one layer of one
page as raw bytes, equal to one range of a pool slot. Page 0 stays zero and pads page tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore.layout import BlockLayout, KvDtype

NULL_PAGE = 0
"""Never allocated, always zero: masked keys and values must still be finite numbers."""

TORCH_DTYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}


class LayerWindow:
    """Writable bytes of some pages in one layer; ``commit`` makes them count.

    On the CPU the ranges are the page memory itself and ``commit`` does nothing; on CUDA they are
    pinned host memory and ``commit`` copies them to the device.

    Attributes:
        ranges: one memoryview of ``layer_bytes`` per page, in order.
    """

    def __init__(
        self, ranges: list[memoryview], copies: tuple[tuple[Tensor, Tensor], ...] = ()
    ) -> None:
        self.ranges = ranges
        self._copies = copies

    def commit(self) -> None:
        """Copy staged bytes to the device, if they are staged at all."""
        for target, staged in self._copies:
            target.copy_(staged)


class L1Pages:
    """The tensor ``[layers][num_pages][2][block_tokens][kv_heads][head_dim]``.

    Attributes:
        layout: layout of one page.
        num_pages: pages including the null page.
        kv: the tensor; layer l of page p is one contiguous range of ``layout.layer_bytes``.
    """

    def __init__(self, layout: BlockLayout, num_pages: int, *, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        shape = (layout.layers, num_pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.kv = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        self._bytes = None if device.type == "cuda" else _as_bytes(self.kv)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.layout.payload_bytes

    def token_rows(self, layer: int) -> Tensor:
        """View a layer as ``[num_pages * 2 * block_tokens, kv_heads, head_dim]`` for writing."""
        return self.kv[layer].view(-1, self.layout.kv_heads, self.layout.head_dim)

    def half_pages(self, layer: int) -> Tensor:
        """View a layer as ``[num_pages * 2, block_tokens * kv_heads * head_dim]`` for gathering."""
        return self.kv[layer].view(self.num_pages * 2, -1)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages, so that what they held before can't leak through a mask as NaN."""
        self.kv[:, torch.as_tensor(pages, device=self.kv.device)] = 0

    def read_range(self, layer: int, page: int) -> memoryview:
        """Return one layer of one page as bytes; a view on the CPU, a copy from CUDA."""
        if self._bytes is None:
            return _as_bytes(self.kv[layer, page].cpu())
        return self._slice(layer, page)

    def window(self, layer: int, pages: Sequence[int]) -> LayerWindow:
        """Open one layer of some pages for writing bytes."""
        if self._bytes is not None:
            return LayerWindow([self._slice(layer, page) for page in pages])
        staging = torch.empty((len(pages), *self.kv.shape[2:]), dtype=self.kv.dtype).pin_memory()
        raw, size = _as_bytes(staging), self.layout.layer_bytes
        ranges = [raw[i * size : (i + 1) * size] for i in range(len(pages))]
        copies = tuple((self.kv[layer, page], staging[i]) for i, page in enumerate(pages))
        return LayerWindow(ranges, copies)

    def _slice(self, layer: int, page: int) -> memoryview:
        assert self._bytes is not None
        size = self.layout.layer_bytes
        start = (layer * self.num_pages + page) * size
        return self._bytes[start : start + size]


def _as_bytes(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor as writable bytes without copying."""
    flat = tensor.view(torch.uint8).view(-1).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers before 3.12 too.

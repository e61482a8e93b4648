"""L1: the pages of KV a compute node owns, as one tensor.

The engine reads and writes it through attention; loader and publisher threads see one layer of one
page as the bytes of one range of a pool slot: raw, or as the layout's codec makes them. Page 0
stays zero and pads page tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compute.codec.layer_codec import TORCH_DTYPES, LayerCodec, make_codec
from kvcore.layout import BlockLayout, KvCodec

NULL_PAGE = 0
"""Never allocated, always zero: masked keys and values must still be finite numbers."""


class LayerWindow:
    """Writable bytes of some pages in one layer; ``commit`` makes them count.

    Raw ranges on the CPU are the page memory itself and ``commit`` does nothing. Encoded ones, and
    all on CUDA (pinned there), are staged on the host; ``commit`` moves them to where the pages are
    and decodes them there.

    Attributes:
        ranges: one memoryview of ``stored_layer_bytes`` per page, in order.
    """

    def __init__(
        self, ranges: list[memoryview], *, commit: Callable[[int], None] | None = None
    ) -> None:
        self.ranges = ranges
        self._commit = commit

    @property
    def is_staged(self) -> bool:
        """Whether ``commit`` has anything to do."""
        return self._commit is not None

    def commit(self, count: int) -> None:
        """Put the first ``count`` ranges into their pages, if they are not there already."""
        if self._commit is not None and count:
            self._commit(count)


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
        self._codec: LayerCodec = make_codec(layout)
        in_place = device.type != "cuda" and layout.codec is KvCodec.NONE
        self._bytes = _as_bytes(self.kv) if in_place else None

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

    def read_ranges(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        """Return one layer of some pages as ranges; views of raw CPU memory, otherwise copies."""
        if self._bytes is not None:
            return [self._slice(layer, page) for page in pages]
        layers = self.kv[layer].index_select(0, self._index(pages))
        return _rows(self._codec.encode(layers).cpu())

    def window(self, layer: int, pages: Sequence[int]) -> LayerWindow:
        """Open one layer of some pages for writing bytes."""
        if self._bytes is not None:
            return LayerWindow([self._slice(layer, page) for page in pages])
        shape = (len(pages), self.layout.stored_layer_bytes)
        staging = torch.empty(shape, dtype=torch.uint8, pin_memory=self.kv.is_cuda)

        def commit(count: int) -> None:
            layers = self._codec.decode(staging[:count].to(self.kv.device))
            self.kv[layer].index_copy_(0, self._index(pages[:count]), layers)

        return LayerWindow(_rows(staging), commit=commit)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.as_tensor(pages, dtype=torch.int64, device=self.kv.device)

    def _slice(self, layer: int, page: int) -> memoryview:
        assert self._bytes is not None
        size = self.layout.layer_bytes
        start = (layer * self.num_pages + page) * size
        return self._bytes[start : start + size]


def _rows(stored: Tensor) -> list[memoryview]:
    """View each row of a uint8 CPU tensor as bytes."""
    raw, size = _as_bytes(stored), stored.shape[1]
    return [raw[i * size : (i + 1) * size] for i in range(len(stored))]


def _as_bytes(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor as writable bytes without copying."""
    flat = tensor.view(torch.uint8).view(-1).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers before 3.12 too.

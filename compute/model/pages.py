"""L1: the pages of KV a compute node owns, as one tensor.

The engine reads and writes it through attention; loader and publisher threads see one layer of one
page as the bytes of one range of a pool slot: raw, or as a codec makes them, which each request may
have its own of. Page 0 stays zero and pads page tables.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tierkv.compute.codec.calibration import Calibration
from tierkv.compute.codec.codecs import Codecs
from tierkv.compute.codec.frame import CodecLevel, coarsest_of
from tierkv.compute.codec.layer_codec import TORCH_DTYPES
from tierkv.kvcore.layout import BlockLayout, KvCodec

NULL_PAGE = 0
"""Never allocated, always zero: masked keys and values must still be finite numbers."""


class LayerWindow:
    """Writable bytes of some pages in one layer; ``commit`` makes them count.

    Raw ranges on the CPU are the page memory itself and ``commit`` does nothing. Encoded ones, and
    all on CUDA (pinned there), are staged on the host; ``commit`` moves them to where the pages are
    and decodes them there.

    Attributes:
        ranges: one memoryview per page, in order, as long as its range.
        done: how many leading ranges are in their pages.
    """

    def __init__(
        self, ranges: list[memoryview], *, commit: Callable[[int], None] | None = None
    ) -> None:
        self.ranges = ranges
        self.done = 0
        self._commit = commit

    @property
    def is_staged(self) -> bool:
        """Whether ``commit`` has anything to do."""
        return self._commit is not None

    def commit(self, count: int) -> None:
        """Put the first ``count`` ranges into their pages, if they are not there already.

        Raises:
            CacheError: a range can't be decoded; those before it are ``done``.
        """
        if self._commit is not None and count:
            self._commit(count)
        self.done = count


class FrameWindow(LayerWindow):
    """Frames of an entropy-coded layer: checked and decoded one by one."""

    def __init__(
        self, ranges: list[memoryview], *, decode: Callable[[int, memoryview], None]
    ) -> None:
        super().__init__(ranges)
        self._decode = decode

    @property
    def is_staged(self) -> bool:
        return True

    def commit(self, count: int) -> None:
        for index in range(count):
            self._decode(index, self.ranges[index])
            self.done = index + 1


class L1Pages:
    """The tensor ``[layers][num_pages][2][block_tokens][kv_heads][head_dim]``.

    Attributes:
        layout: layout of one page; its codec is for requests that name none.
        codecs: every codec that blocks of these pages can pass through.
        num_pages: pages including the null page.
        kv: the tensor; layer l of page p is one contiguous range of ``layout.layer_bytes``.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_pages: int,
        *,
        device: torch.device,
        calibration: Calibration | None = None,
        touched: bool = True,
    ) -> None:
        """Reserve the pages, all zeros.

        Args:
            layout: of a page.
            num_pages: pages including the null page.
            device: whose memory.
            calibration: tables of entropy-coded KV.
            touched: take all memory now; else the system gives a CPU's as pages are written.
        """
        self.layout = layout
        self.codecs = Codecs(layout, calibration, device=device)
        self.num_pages = num_pages
        shape = (layout.layers, num_pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        dtype = TORCH_DTYPES[layout.dtype]
        lazy = not touched and device.type == "cpu"
        self.kv = _mapped(shape, dtype) if lazy else torch.zeros(shape, dtype=dtype, device=device)
        self._bytes = _as_bytes(self.kv) if device.type != "cuda" else None

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

    def copy_part(self, source: int, target: int, tokens: int) -> None:
        """Make the first tokens of a page those of another one, and the rest zero."""
        self.kv[:, target, :, :tokens] = self.kv[:, source, :, :tokens]
        self.kv[:, target, :, tokens:] = 0

    def read_ranges(
        self, layer: int, pages: Sequence[int], codec: KvCodec | None = None
    ) -> list[memoryview]:
        """Return one layer of some pages as ranges; views of raw CPU memory, otherwise copies.

        Args:
            layer: which layer.
            pages: which pages.
            codec: one of fixed size; None is the layout's.
        """
        codec = codec or self.layout.codec
        if self._in_place(codec):
            return [self._slice(layer, page) for page in pages]
        layers = self.kv[layer].index_select(0, self._index(pages))
        return _rows(self.codecs.fixed(codec).encode(layers).cpu())

    def read_frames(self, page: int, level: CodecLevel) -> memoryview:
        """Return a page entropy-coded: its layers as equally long ranges in one piece, a copy."""
        return memoryview(self.codecs.entropy.encode(self.kv[:, page], level).data).cast("B")

    def window(
        self,
        layer: int,
        pages: Sequence[int],
        codec: KvCodec | None = None,
        sizes: Sequence[int] = (),
    ) -> LayerWindow:
        """Open one layer of some pages for writing bytes.

        Args:
            layer: which layer.
            pages: which pages.
            codec: what the bytes will be; None is the layout's.
            sizes: bytes of each page's range, where the codec's size is not fixed.
        """
        codec = codec or self.layout.codec
        if not codec.has_fixed_size:
            return self._frame_window(layer, pages, sizes, coarsest_of(codec))
        if self._in_place(codec):
            return LayerWindow([self._slice(layer, page) for page in pages])
        shape = (len(pages), self.codecs.layout_of(codec).stored_layer_bytes)
        staging = torch.empty(shape, dtype=torch.uint8, pin_memory=self.kv.is_cuda)

        def commit(count: int) -> None:
            layers = self.codecs.fixed(codec).decode(
                staging[:count].to(self.kv.device, non_blocking=True)
            )
            self.kv[layer].index_copy_(0, self._index(pages[:count]), layers)

        return LayerWindow(_rows(staging), commit=commit)

    def _frame_window(
        self, layer: int, pages: Sequence[int], sizes: Sequence[int], coarsest: CodecLevel
    ) -> LayerWindow:
        ends = list(accumulate(sizes))
        staging = memoryview(bytearray(ends[-1]))
        ranges = [staging[end - size : end] for end, size in zip(ends, sizes, strict=True)]

        def decode(index: int, frame: memoryview) -> None:
            self.codecs.entropy.decode(layer, frame, self.kv[layer, pages[index]], coarsest)

        return FrameWindow(ranges, decode=decode)

    def _in_place(self, codec: KvCodec) -> bool:
        return codec is KvCodec.NONE and self._bytes is not None

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


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in memory of the system's own, which it has as zeros until it is written."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

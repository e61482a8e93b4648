"""L1: the pages of KV of a compute node, as one tensor.

The engine reads and writes the tensor through attention. Loader and publisher threads see one layer
of one page as the bytes of one range of a pool slot, raw or encoded by a codec; each request may
have a different codec. Page 0 stays zero and pads page tables.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tierkv.compute.codec.entropy import Calibration, CodecLevel, EntropyCodec, coarsest_of
from tierkv.compute.codec.layer_codec import TORCH_DTYPES, LayerCodec, make_codec
from tierkv.kvcore.layout import BlockLayout, KvCodec


class Codecs:
    """Every codec of one node, for blocks of one shape; a request's namespace decides which to use.

    Codecs are created on first use. Without calibrated tables the codecs based on tables are
    missing: requests for these codecs neither publish nor load, and the answers stay exact.

    Thread-safe: two threads may create the same codec twice, which does no harm.

    Attributes:
        layout: the node's layout; its codec is the default.
    """

    def __init__(
        self, layout: BlockLayout, calibration: Calibration | None, *, device: torch.device
    ) -> None:
        self.layout = layout
        self._calibration = calibration
        self._device = device
        self._fixed: dict[KvCodec, LayerCodec] = {}
        self._entropy: EntropyCodec | None = None

    def has(self, codec: KvCodec) -> bool:
        """Whether this node can store KV under the codec."""
        return codec.has_fixed_size or self._calibration is not None

    def layout_of(self, codec: KvCodec) -> BlockLayout:
        """Return the layout with the given codec, for its sizes."""
        return self.layout if codec is self.layout.codec else replace(self.layout, codec=codec)

    def fixed(self, codec: KvCodec) -> LayerCodec:
        """Return a codec of fixed size."""
        if codec not in self._fixed:
            self._fixed[codec] = make_codec(self.layout_of(codec))
        return self._fixed[codec]

    @property
    def entropy(self) -> EntropyCodec:
        """The codec of all entropy levels; ``has`` must hold."""
        assert self._calibration is not None, "asked for a codec that this node does not have"
        if self._entropy is None:
            self._entropy = EntropyCodec(self.layout, self._calibration, device=str(self._device))
        return self._entropy


NULL_PAGE = 0
"""Never allocated, always zero: masked keys and values must still be finite numbers."""


class LayerWindow:
    """Writable bytes of several pages in one layer; ``commit`` stores the bytes in the pages.

    Raw ranges on the CPU are the page memory itself and ``commit`` copies nothing. Encoded ranges,
    and all ranges on CUDA (in pinned memory), are staged on the host; ``commit`` moves the bytes to
    the device of the pages and decodes there.

    Attributes:
        ranges: one memoryview per page, in order, with the length of the range.
        done: number of leading ranges already in the pages.
    """

    def __init__(
        self, ranges: list[memoryview], *, commit: Callable[[int], None] | None = None
    ) -> None:
        self.ranges = ranges
        self.done = 0
        self._commit = commit

    @property
    def is_staged(self) -> bool:
        """Whether ``commit`` has to copy or decode."""
        return self._commit is not None

    def commit(self, count: int) -> None:
        """Put the first ``count`` ranges into their pages; raw ranges on the CPU are there already.

        Raises:
            CacheError: a range can't be decoded; ``done`` counts the ranges before the bad range.
        """
        if self._commit is not None and count:
            self._commit(count)
        self.done = count


class FrameWindow(LayerWindow):
    """Frames of an entropy-coded layer, checked and decoded one at a time."""

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


class DeviceWindow:
    """Several layers of several pages, filled from memory that the device itself can read.

    Unlike with ``LayerWindow`` no copy is made on the host. Pages are written by ``commit`` only.
    """

    def __init__(self, pages: L1Pages, layers: range, numbers: Sequence[int], codec: KvCodec):
        layer_bytes = pages.codecs.layout_of(codec).stored_layer_bytes
        shape = (len(numbers), len(layers), layer_bytes)
        self._staging = torch.empty(shape, dtype=torch.uint8, device=pages.kv.device)
        self._pages = pages
        self._layers = layers
        self._numbers = numbers
        self._codec = codec

    def fill(self, index: int, stored: memoryview) -> None:
        """Queue the copy of one page's layers, which lie behind each other.

        Args:
            index: the page, by its place among the window's pages.
            stored: must stay unchanged until the stream has made the copy.
        """
        source = torch.frombuffer(stored, dtype=torch.uint8).view(self._staging.shape[1:])
        self._staging[index].copy_(source, non_blocking=True)

    def commit(self) -> None:
        """Queue the decoding of all layers into the pages."""
        values = self._pages.codecs.fixed(self._codec).decode(self._staging.flatten(0, 1))
        by_layer = values.view(*self._staging.shape[:2], *values.shape[1:]).transpose(0, 1)
        at = torch.as_tensor(self._numbers, dtype=torch.int64, device=values.device)
        self._pages.kv[self._layers.start : self._layers.stop].index_copy_(1, at, by_layer)


class L1Pages:
    """The tensor ``[layers][num_pages][2][block_tokens][kv_heads][head_dim]``.

    Attributes:
        layout: layout of one page; its codec is the default for requests without a codec.
        codecs: every codec for blocks of these pages.
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
            layout: layout of one page.
            num_pages: pages including the null page.
            device: device of the memory.
            calibration: tables of entropy-coded KV.
            touched: allocate all memory now. False on a CPU: the system allocates memory when a
                page is first written.
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
        """Zero pages, to keep earlier contents from leaking through a mask as NaN."""
        self.kv[:, torch.as_tensor(pages, device=self.kv.device)] = 0

    def copy_part(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens from ``source`` to ``target``; zero the rest of the
        page.
        """
        self.kv[:, target, :, :tokens] = self.kv[:, source, :, :tokens]
        self.kv[:, target, :, tokens:] = 0

    def read_ranges(
        self, layer: int, pages: Sequence[int], codec: KvCodec | None = None
    ) -> list[memoryview]:
        """Return one layer of the pages as ranges: views of raw CPU memory, otherwise copies.

        Args:
            layer: index of the layer.
            pages: page numbers.
            codec: a codec of fixed size; None means the layout's codec.
        """
        codec = codec or self.layout.codec
        if self._in_place(codec):
            return [self._slice(layer, page) for page in pages]
        layers = self.kv[layer].index_select(0, self._index(pages))
        return _rows(_to_host(self.codecs.fixed(codec).encode(layers)))

    def read_frames(self, page: int, level: CodecLevel) -> memoryview:
        """Return a copy of a page in entropy-coded form: its layers as ranges of equal length."""
        return memoryview(self.codecs.entropy.encode(self.kv[:, page], level).data).cast("B")

    def window(
        self,
        layer: int,
        pages: Sequence[int],
        codec: KvCodec | None = None,
        sizes: Sequence[int] = (),
    ) -> LayerWindow:
        """Open one layer of the pages for writing bytes.

        Args:
            layer: index of the layer.
            pages: page numbers.
            codec: codec of the bytes; None means the layout's codec.
            sizes: bytes of each page's range, if the codec's size is not fixed.
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


def _to_host(stored: Tensor) -> Tensor:
    """Copy to the CPU; from CUDA through pinned memory, 40 times as fast as into new memory."""
    if not stored.is_cuda:
        return stored.cpu()
    copied = torch.empty(stored.shape, dtype=stored.dtype, pin_memory=True)
    copied.copy_(stored, non_blocking=True)
    torch.cuda.current_stream(stored.device).synchronize()
    return copied


def _rows(stored: Tensor) -> list[memoryview]:
    """View each row of a uint8 CPU tensor as bytes."""
    raw, size = _as_bytes(stored), stored.shape[1]
    return [raw[i * size : (i + 1) * size] for i in range(len(stored))]


def _as_bytes(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor as writable bytes without copying."""
    flat = tensor.view(torch.uint8).view(-1).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers before 3.12 too.


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in anonymous mapped memory; the system allocates a page on the first write."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

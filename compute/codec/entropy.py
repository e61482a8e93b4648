"""Entropy-coded KV: values quantised with calibrated tables and packed by zstandard.

A value is stored as ``round((x - mean) / step)``, with an error of at most half a step. The few
values without a code in [-127, 127], and values that are not finite, are appended unencoded
(escapes). Symbols are zig-zag coded (small magnitudes are small bytes) in token-major order,
``[k|v][tokens][heads][dim]``. Source: CacheGen, arXiv 2310.07240, without its deltas between
tokens: on measured KV the deltas cost more than they save. Huffman coding inside zstandard is
within 0.1 bit of arithmetic coding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from tierkv.compute.codec.calibration import STEP_LEVELS, Calibration
from tierkv.compute.codec.frame import CodecLevel, FrameHead, read_head
from tierkv.compute.codec.layer_codec import TORCH_DTYPES
from tierkv.kvcore.errors import ChecksumError, LayoutError
from tierkv.kvcore.layout import FRAME_HEAD_BYTES, BlockLayout, framed_bytes

_LARGEST = 127
_ESCAPE = 255
"""The zig-zag code of -128, which no value in range has."""

_ZSTD_LEVEL = 1
"""Higher levels are slower and, measured on KV, not smaller."""

_COARSE_HASH_LOG = 8
"""Coarse symbols repeat by chance everywhere: searching for fewer repeats is faster and packs
tighter."""

Bytes = NDArray[np.uint8]


def packer_for(level: CodecLevel) -> zstandard.ZstdCompressor:
    """Return a compressor for the symbols of a level; use it in one thread only."""
    if level is not CodecLevel.COARSE:
        return zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _ZSTD_LEVEL, hash_log=_COARSE_HASH_LOG
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


class EntropyCodec:
    """Encodes one block to frames and decodes one frame at a time; safe for any number of threads.

    1. ``encode`` returns ranges of equal length, one per layer, of at most
       ``layout.stored_layer_bytes``.
    2. Equal values at equal levels give equal bytes.
    3. ``decode`` of encoded bytes is within half a step; non-finite values come back unchanged.
       ``decode`` of any other bytes raises a cache error or returns arbitrary values.
    """

    def __init__(self, layout: BlockLayout, calibration: Calibration, *, device: str) -> None:
        self._shape = (2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self._numbers = prod(self._shape)
        self._raw_bytes = layout.layer_bytes
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._number = calibration.number
        self._mean = calibration.mean[:, :, None].to(device)
        self._steps = calibration.steps[:, :, :, None, None, None].to(device)

    def encode(self, layers: Tensor, level: CodecLevel) -> Bytes:
        """Encode one block, ``[layers, 2, block_tokens, kv_heads, head_dim]``.

        Returns:
            ``[layers, range_bytes]``.
        """
        steps = self._steps[STEP_LEVELS.index(level)]
        codes = layers.to(torch.float32, copy=True).sub_(self._mean).div_(steps).round_()
        outside = (codes.abs() <= _LARGEST).logical_not_()  # Also True for non-finite values.
        crowded = outside.flatten(1).sum(1).tolist()
        if any(crowded):
            codes.masked_fill_(outside, -128.0)
        symbols = codes.to(torch.int8)
        packed = ((symbols << 1) ^ (symbols >> 7)).view(torch.uint8).cpu().numpy()
        packer = packer_for(level)
        frames = [
            self._frame(packer, packed[i], layers[i], outside[i] if count else None, level)
            for i, count in enumerate(crowded)
        ]
        return _ranges(frames)

    def _frame(
        self,
        packer: zstandard.ZstdCompressor,
        symbols: Bytes,
        layer: Tensor,
        outside: Tensor | None,
        level: CodecLevel,
    ) -> tuple[FrameHead, bytes]:
        values = b"" if outside is None else _bytes_of(layer[outside])
        payload = packer.compress(symbols.tobytes() + values if values else symbols.data)
        if len(payload) >= self._raw_bytes:
            raw = _bytes_of(layer)
            return FrameHead(CodecLevel.RAW, self._number, len(raw)), raw
        escapes = 0 if outside is None else int(outside.sum())
        return FrameHead(level, self._number, len(payload), escapes), payload

    def decode(
        self, layer: int, frame: memoryview, out: Tensor, coarsest: CodecLevel = CodecLevel.COARSE
    ) -> None:
        """Decode one frame straight into a page.

        Args:
            layer: the layer of the frame.
            frame: a whole range.
            out: view of a page, with the shape and dtype of the layout; garbage after an error.
            coarsest: coarsest level that is allowed.

        Raises:
            LayoutError: the range is not a frame of this layout and calibration, or is too coarse.
            ChecksumError: the packed bytes are broken.
        """
        head = read_head(frame, calibration=self._number, numbers=self._numbers, coarsest=coarsest)
        payload = frame[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + head.payload_bytes]
        if head.level is CodecLevel.RAW:
            if len(payload) != self._raw_bytes:
                raise LayoutError(f"a raw frame of {len(payload)} bytes, not {self._raw_bytes}")
            out.copy_(self._values(payload).view(self._shape))
            return
        unpacked = self._unpack(payload, head.escapes)
        zigzag = unpacked[: self._numbers]
        symbols = ((zigzag >> 1) ^ -(zigzag & 1)).view(np.int8)
        # Computed in float32 and rounded once; also faster, because CPUs have little 16-bit
        # arithmetic.
        numbers = torch.from_numpy(symbols).to(out.device).float().view(self._shape)
        steps = self._steps[STEP_LEVELS.index(head.level), layer]
        out.copy_(torch.addcmul(self._mean[layer], numbers, steps))
        if head.escapes:
            self._put_escapes(zigzag, unpacked[self._numbers :], out)

    def _unpack(self, payload: memoryview, escapes: int) -> Bytes:
        expected = self._numbers + escapes * self._dtype.itemsize
        try:
            # Checked first: unpacking reserves whatever size the frame claims.
            if zstandard.get_frame_parameters(payload).content_size != expected:
                raise LayoutError(f"a frame does not unpack to {expected} bytes")
            unpacked = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ChecksumError(f"a frame can't be unpacked: {error}") from error
        return np.frombuffer(unpacked, dtype=np.uint8)

    def _put_escapes(self, zigzag: Bytes, values: Bytes, out: Tensor) -> None:
        places = np.flatnonzero(zigzag == _ESCAPE)
        if len(places) * self._dtype.itemsize != len(values):
            raise LayoutError(f"a frame has {len(values)} bytes for {len(places)} escapes")
        at = torch.from_numpy(places).to(out.device)
        out.view(-1)[at] = self._values(values.tobytes()).to(out.device)

    def _values(self, raw: bytes | memoryview) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=self._dtype)


def _bytes_of(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _ranges(frames: Sequence[tuple[FrameHead, bytes]]) -> Bytes:
    """Lay frames out as ranges of equal length, padded with zeros."""
    size = framed_bytes(max(head.payload_bytes for head, _ in frames))
    ranges = np.zeros((len(frames), size), dtype=np.uint8)
    for row, (head, payload) in zip(ranges, frames, strict=True):
        whole = head.pack() + payload
        row[: len(whole)] = np.frombuffer(whole, dtype=np.uint8)
    return ranges

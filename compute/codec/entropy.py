"""Entropy-coded KV: values quantised with calibrated tables and packed by zstandard.

A value is stored as ``round((x - mean) / step)``, with an error of at most half a step. The few
values without a code in [-127, 127], and values that are not finite, are appended unencoded
(escapes). Symbols are zig-zag coded (small magnitudes are small bytes) in token-major order,
``[k|v][tokens][heads][dim]``. Source: CacheGen, arXiv 2310.07240, without its deltas between
tokens: on measured KV the deltas cost more than they save. Huffman coding inside zstandard is
within 0.1 bit of arithmetic coding.

The tables (means and quantisation steps) are measured once per model by ``tierkv calibrate``,
stored next to the model's weights and read when a node starts. Writer and reader must have equal
tables, so each frame carries their number. A frame holds a layer of a block, so layers still move
alone. Every fault in the head of a frame is a LayoutError, which means "miss".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from math import prod
from pathlib import Path

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tierkv.compute.codec.layer_codec import TORCH_DTYPES
from tierkv.kvcore.errors import ChecksumError, ConfigError, LayoutError
from tierkv.kvcore.layout import FRAME_HEAD_BYTES, BlockLayout, KvCodec, framed_bytes

_MAGIC = b"KQ"
_VERSION = 1
_HEAD = struct.Struct("<2sBBIII")
assert _HEAD.size == FRAME_HEAD_BYTES


class CodecLevel(IntEnum):
    """Coarseness of the values of a frame; the enum value is the byte in the frame's head."""

    FINE = 0
    MEDIUM = 1
    COARSE = 2
    RAW = 255
    """Unencoded values: coding would have made the range longer."""


LEVELS = {
    KvCodec.ENTROPY_FINE: CodecLevel.FINE,
    KvCodec.ENTROPY_MEDIUM: CodecLevel.MEDIUM,
    KvCodec.ENTROPY_COARSE: CodecLevel.COARSE,
}
"""The level of each codec with a single level; ``adaptive`` has two (compute/tiers/block_puts.py).
"""


def coarsest_of(codec: KvCodec) -> CodecLevel:
    """Return the coarsest level that a reader with the codec accepts."""
    return LEVELS.get(codec, CodecLevel.COARSE)


@dataclass(frozen=True, slots=True)
class FrameHead:
    """Contents of a frame's head.

    Attributes:
        level: coarseness of the values.
        calibration: number of the tables behind the frame (Calibration.number).
        payload_bytes: bytes after the head; the rest of the range is zeros.
        escapes: count of values without a code, which are stored unencoded.
    """

    level: CodecLevel
    calibration: int
    payload_bytes: int
    escapes: int = 0

    def pack(self) -> bytes:
        """Return the head's bytes."""
        return _HEAD.pack(
            _MAGIC, _VERSION, self.level, self.calibration, self.payload_bytes, self.escapes
        )


def read_head(
    frame: memoryview, *, calibration: int, numbers: int, coarsest: CodecLevel = CodecLevel.COARSE
) -> FrameHead:
    """Read and check a frame's head.

    Args:
        frame: the whole range.
        calibration: number of this node's tables; other tables can't decode here.
        numbers: count of values that the frame must hold, which bounds the escapes.
        coarsest: coarsest level that the reader's codec allows.

    Raises:
        LayoutError: the range is not a frame, uses other tables, is too coarse, or has impossible
            lengths.
    """
    if len(frame) < FRAME_HEAD_BYTES:
        raise LayoutError(f"a range of {len(frame)} bytes is too short for a frame")
    magic, version, level, tables, payload, escapes = _HEAD.unpack_from(frame)
    if magic != _MAGIC or version != _VERSION or level not in set(CodecLevel):
        raise LayoutError("a range is no entropy-coded frame of this version")
    if tables != calibration:
        raise LayoutError(
            f"a frame was made with calibration {tables:08x}, this node has {calibration:08x}"
        )
    if coarsest < level != CodecLevel.RAW:
        raise LayoutError(f"a frame of level {level} is coarser than {coarsest.name}")
    if payload > len(frame) - FRAME_HEAD_BYTES or escapes > numbers:
        raise LayoutError(f"a frame of {len(frame)} bytes can't hold {payload} and {escapes}")
    return FrameHead(CodecLevel(level), tables, payload, escapes)


STEP_LEVELS = (CodecLevel.FINE, CodecLevel.MEDIUM, CodecLevel.COARSE)
"""Order of the first axis of ``steps``."""

_FORMAT = "tierkv-kv-calibration-1"


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Means and steps of one model.

    Attributes:
        mean: ``[layers, 2, kv_heads, head_dim]`` float32, exact in bfloat16, the stored dtype.
        steps: ``[3, layers, 2]`` float32, positive; one per level, layer and k or v.
        number: identifies the tables in frames; equal for equal tables.
    """

    mean: Tensor
    steps: Tensor
    number: int


def make_calibration(mean: Tensor, steps: Tensor) -> Calibration:
    """Round the means, check the steps and number the tables."""
    mean = mean.to(torch.bfloat16).float().contiguous()
    steps = steps.float().contiguous()
    if mean.ndim != 4 or steps.shape != (len(STEP_LEVELS), *mean.shape[:2]):
        raise ValueError(f"tables of shapes {tuple(mean.shape)} and {tuple(steps.shape)}")
    if not (mean.isfinite().all() and steps.isfinite().all() and (steps > 0).all()):
        raise ValueError("means must be finite, steps finite and positive")
    digest = blake2b(digest_size=4, person=b"tierkv-calibr")
    for table in (mean, steps):
        digest.update(str(tuple(table.shape)).encode() + table.numpy().tobytes())
    return Calibration(mean, steps, int.from_bytes(digest.digest(), "little"))


def save_calibration(calibration: Calibration, file: Path, *, revision: str) -> None:
    """Write the tables of the model with the given revision.

    Raises:
        OSError: the file can't be written.
    """
    about = {"format": _FORMAT, "model_revision": revision}
    tables = {"mean": calibration.mean.to(torch.bfloat16), "steps": calibration.steps}
    file.write_bytes(save(tables, metadata={"tierkv": json.dumps(about)}))


def load_calibration(file: Path, layout: BlockLayout, *, revision: str) -> Calibration:
    """Read the tables and check the model's layout and revision.

    Raises:
        ConfigError: the file is missing, unreadable, or belongs to another model; the hint says how
            to make the tables.
    """
    if not file.is_file():
        raise _refused(file, "there are no tables")
    try:
        with safe_open(file, framework="pt") as tensors:
            about = json.loads((tensors.metadata() or {}).get("tierkv", "{}"))
            calibration = make_calibration(tensors.get_tensor("mean"), tensors.get_tensor("steps"))
    except (SafetensorError, OSError, ValueError) as error:
        raise _refused(file, f"it can't be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise _refused(file, "it is no calibration of this version")
    shape = (layout.layers, 2, layout.kv_heads, layout.head_dim)
    if about.get("model_revision") != revision or tuple(calibration.mean.shape) != shape:
        raise _refused(file, "it was made for another model")
    return calibration


def _refused(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"entropy-coded KV needs {file}: {reason}",
        hint="Run `tierkv calibrate --model FOLDER`.",
    )


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

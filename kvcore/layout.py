"""Memory layout of one block's KV: the same in L1 transfer buffers, pool slots and on disk.

Payload is layer-major, ``[layer][k|v][block_tokens][kv_heads][head_dim]``, so each layer of a
block is a contiguous range, moved, checksummed and loaded alone. Keys are stored after
rope (exact-prefix reuse never moves keys). Below L1 a codec may shrink each range. The layout fixes
the encoded size, so slots are reserved before encoding; for entropy-coded ranges the layout only
gives an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b

from tierkv.kvcore import limits

FRAME_HEAD_BYTES = 16
"""Bytes of the header before the payload of an entropy-coded range (compute/codec/entropy.py)."""

FRAME_ALIGNMENT = 64
"""Entropy-coded ranges are padded to a multiple of this."""


class KvDtype(StrEnum):
    """Element type of stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is KvDtype.FLOAT32 else 2


class KvCodec(StrEnum):
    """How a layer's range is encoded below L1 (compute/codec/)."""

    NONE = "none"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    ENTROPY_FINE = "entropy-fine"
    ENTROPY_MEDIUM = "entropy-medium"
    ENTROPY_COARSE = "entropy-coarse"
    ADAPTIVE = "adaptive"
    """Each block at the finest and at the coarsest level; the reader picks by the time it has."""

    @property
    def is_lossy(self) -> bool:
        """Whether decoded values may differ from the encoded ones."""
        return self is not KvCodec.NONE

    @property
    def has_fixed_size(self) -> bool:
        """Whether all blocks of a layout have the same size, whatever their values."""
        return self in (KvCodec.NONE, KvCodec.FP8, KvCodec.INT8, KvCodec.INT4)


def framed_bytes(payload_bytes: int) -> int:
    """Return the size of an entropy-coded range: head, payload and padding.

    All ranges of one block have the size of the block's largest layer.
    """
    return -(-(FRAME_HEAD_BYTES + payload_bytes) // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape of one block's KV for one model shard.

    Attributes:
        layers: decoder layers in this shard.
        kv_heads: key/value heads per layer (after GQA grouping).
        head_dim: channels per head.
        dtype: element type.
        block_tokens: tokens per block; a page in L1 holds exactly one block.
        codec: encoding of ranges in the pool, on disk and in the archive; L1 pages are never
            encoded.
        order: name and version of another engine's byte order within a layer, for example
            ``vllm-hnd-1``; empty for ours. The number of bytes is the same in any order.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype
    block_tokens: int = 64
    codec: KvCodec = KvCodec.NONE
    order: str = ""

    def __post_init__(self) -> None:
        if len(self.order) > limits.MAX_LAYOUT_ORDER_CHARS:
            raise ValueError(
                f"BlockLayout.order has more than {limits.MAX_LAYOUT_ORDER_CHARS} characters"
            )
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"BlockLayout.{name} must be positive, got {getattr(self, name)}")
        if self.layers > limits.MAX_LAYERS:
            raise ValueError(f"{self.layers} layers exceed the limit of {limits.MAX_LAYERS}")
        size = max(self.payload_bytes, self.stored_bytes)  # Codecs make only tiny heads larger.
        if size > limits.MAX_SLOT_BYTES:
            raise ValueError(
                f"a block of {size} bytes exceeds {limits.MAX_SLOT_BYTES}; "
                "choose fewer block_tokens"
            )

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in L1, ``[k|v][block_tokens][kv_heads][head_dim]``."""
        return self.token_layer_bytes * self.block_tokens

    @property
    def payload_bytes(self) -> int:
        """Bytes of a whole block in L1."""
        return self.layer_bytes * self.layers

    @property
    def stored_layer_bytes(self) -> int:
        """Bytes of one layer's range below L1; an upper bound if the codec's size is not fixed."""
        values = 2 * self.block_tokens * self.kv_heads * self.head_dim
        # int8, int4: two bfloat16 per channel of the keys and per token and head of the values.
        ranges = 4 * self.kv_heads * (self.head_dim + self.block_tokens)
        match self.codec:
            case KvCodec.NONE:
                return self.layer_bytes
            case KvCodec.FP8:
                return 8 * self.kv_heads + values  # One float32 per head of keys and of values.
            case KvCodec.INT8:
                return ranges + values
            case KvCodec.INT4:
                return ranges + values // 2
            case _:  # Incompressible ranges are stored unencoded behind the same head.
                return framed_bytes(self.layer_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of a whole block below L1; an upper bound if the codec's size is not fixed."""
        return self.stored_layer_bytes * self.layers

    def layer_offset(self, layer: int) -> int:
        """Return where a layer's range begins; it ends at ``layer_offset(layer + 1)``."""
        if not 0 <= layer <= self.layers:
            raise ValueError(f"layer {layer} is outside [0, {self.layers}]")
        return layer * self.layer_bytes

    @lru_cache(maxsize=256)  # noqa: B019 - a layout is a small value, and few are in use.
    def fingerprint(self) -> bytes:
        """Return 16 bytes that change whenever the meaning of the stored bytes changes."""
        text = (
            f"tierkv-layout-1|{self.layers}|{self.kv_heads}|{self.head_dim}|{self.dtype}"
            f"|{self.block_tokens}|k-after-rope"
        )
        if self.codec is not KvCodec.NONE:
            text += f"|{self.codec}-1"
        if self.order:
            text += f"|order={self.order}"
        return blake2b(text.encode(), digest_size=16).digest()

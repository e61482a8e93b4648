"""One layer of some blocks to bytes and back, behind one Protocol.

Used by L1 pages (compute/model/pages.py): the publisher encodes what it writes to the pool, loader
threads decode what they read. All work is whole-tensor torch: it lets other threads run, and it is
done where the tensors are, so that only encoded bytes cross a GPU's bus.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tierkv.compute.codec.float8 import Float8Codec
from tierkv.compute.codec.integers import IntegerCodec
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype

TORCH_DTYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}


class LayerCodec(Protocol):
    """A codec for blocks of one layout.

    1. ``encode`` gives exactly ``layout.stored_layer_bytes`` per block, whatever the values are.
    2. Equal values give equal bytes, and a block's bytes do not depend on its neighbours in a call.
    3. ``decode`` of what ``encode`` gave keeps the codec's error bound; of any other bytes of that
       size it gives some numbers, never an error. A range with values that are not finite is not
       finite after decoding either, so that broken KV never looks sound.
    """

    def encode(self, layers: Tensor) -> Tensor:
        """``[blocks, 2, block_tokens, kv_heads, head_dim]`` to uint8 ``[blocks, stored bytes]``."""

    def decode(self, stored: Tensor) -> Tensor:
        """uint8 ``[blocks, stored bytes]`` to the tensor of the layout's shape and dtype."""


class RawCodec:
    """``none``: the bytes as they are, bit for bit."""

    def __init__(self, layout: BlockLayout) -> None:
        self._shape = (2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self._dtype = TORCH_DTYPES[layout.dtype]

    def encode(self, layers: Tensor) -> Tensor:
        """View values as bytes."""
        return layers.contiguous().view(torch.uint8).view(len(layers), -1)

    def decode(self, stored: Tensor) -> Tensor:
        """View bytes as values."""
        return stored.contiguous().view(self._dtype).view(len(stored), *self._shape)


def make_codec(layout: BlockLayout) -> LayerCodec:
    """Return the codec that the layout names.

    Raises:
        ValueError: its size is not fixed.
    """
    dtype = TORCH_DTYPES[layout.dtype]
    match layout.codec:
        case KvCodec.NONE:
            return RawCodec(layout)
        case KvCodec.FP8:
            return Float8Codec(layout, dtype)
        case KvCodec.INT8:
            return IntegerCodec(layout, dtype, bits=8)
        case KvCodec.INT4:
            return IntegerCodec(layout, dtype, bits=4)
        case _:
            raise ValueError(f"{layout.codec} has no fixed size; see compute/codec/entropy.py")

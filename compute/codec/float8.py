"""Codec ``fp8``: e4m3 numbers with one float32 scale per head of keys and of values.

Three bits of mantissa: a value is off by at most 1/16 of itself, or by 2**-10 of the scale where
it is tiny. Stored are scales ``[k|v][kv_heads]``, then codes
``[k|v][block_tokens][kv_heads][head_dim]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv.kvcore.layout import BlockLayout

LARGEST = 448.0
"""The largest e4m3 number; beyond it the format has only NaN."""

_HALF_SHIFT = 256.0
"""float16's exponent is biased by 15, e4m3's by 7."""

_HALF_MASK = 0xBF80 - (1 << 16)
"""Sign, and the seven bits of exponent and mantissa, as int16."""


class Float8Codec:
    """Scales each head's largest magnitude of a block to the largest e4m3 number."""

    def __init__(self, layout: BlockLayout, dtype: torch.dtype) -> None:
        self._shape = (2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self._scales = (2, 1, layout.kv_heads, 1)
        self._head_bytes = 8 * layout.kv_heads
        self._dtype = dtype

    def encode(self, layers: Tensor) -> Tensor:
        """Encode; a head of zeros has scale 1.

        ``[blocks, 2, block_tokens, kv_heads, head_dim]`` to uint8 ``[blocks, stored bytes]``.
        """
        values = layers.float()
        largest = values.abs().amax(dim=(2, 4), keepdim=True)
        scales = torch.where(largest == 0, 1.0, largest / LARGEST)
        # A quotient may round past the largest number, which would become NaN.
        codes = (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        heads = scales.reshape(len(layers), -1).view(torch.uint8)
        return torch.cat([heads, codes.view(torch.uint8).flatten(1)], dim=1)

    def decode(self, stored: Tensor) -> Tensor:
        """Decode; faster than torch's own cast, which is not vectorised on a CPU.

        uint8 ``[blocks, stored bytes]`` to ``[blocks, 2, block_tokens, kv_heads, head_dim]``.
        """
        heads = stored[:, : self._head_bytes].clone().view(torch.float32) * _HALF_SHIFT
        codes = stored[:, self._head_bytes :].contiguous().view(torch.int8).to(torch.int16)
        # Exponent and mantissa move into those of a float16, 256 times smaller; the sign is there.
        values = (codes << 7).bitwise_and_(_HALF_MASK).view(torch.float16).float()
        values = values.view(len(stored), *self._shape)
        return values.mul_(heads.view(len(stored), *self._scales)).to(self._dtype)

"""Codecs of fixed size between one layer of blocks and bytes: raw, fp8, int8 and int4.

Used by L1 pages (compute/model/pages.py): the publisher encodes data for the pool, loader threads
decode data from the pool. All work is whole-tensor torch, so other threads can run meanwhile. The
work happens on the device of the tensors, so only encoded bytes cross a GPU's bus.
"""

from __future__ import annotations

from math import inf, prod
from typing import Protocol

import torch
from torch import Tensor

from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype


class IntegerCodec:
    """Codecs ``int8`` and ``int4``: asymmetric codes, keys per channel, values per token and head.

    A key channel keeps its offset over all tokens, so its range within a block is narrow; values
    have no channels of this kind. A number is stored as ``lowest + code * step`` of its group, with
    an error of at most half a step. Stored are bfloat16 lowest and step of keys
    ``[kv_heads][head_dim]`` and of values ``[block_tokens][kv_heads]``, then codes
    ``[k|v][block_tokens][kv_heads][head_dim]``; with 4 bits the codes of the key and the value at
    the same place share a byte.

    Ref: KIVI, arXiv 2402.02750 (there with a full-precision tail, here blocks are always full).
    """

    def __init__(self, layout: BlockLayout, dtype: torch.dtype, *, bits: int) -> None:
        self._bits = bits
        self._dtype = dtype
        self._shape = (layout.block_tokens, layout.kv_heads, layout.head_dim)
        self._per_channel = (1, layout.kv_heads, layout.head_dim)
        self._per_token = (layout.block_tokens, layout.kv_heads, 1)
        self._channels, self._tokens = prod(self._per_channel), prod(self._per_token)
        self._head_bytes = 4 * (self._channels + self._tokens)

    def encode(self, layers: Tensor) -> Tensor:
        """Encode keys by channel and values by token.

        ``[blocks, 2, block_tokens, kv_heads, head_dim]`` to uint8 ``[blocks, stored bytes]``.
        """
        keys, key_lowest, key_step = self._quantise(layers[:, 0].float(), dim=1)
        values, value_lowest, value_step = self._quantise(layers[:, 1].float(), dim=3)
        parts = [key_lowest, key_step, value_lowest, value_step]
        head = torch.cat([part.flatten(1) for part in parts], dim=1).view(torch.uint8)
        codes = [keys | values << 4] if self._bits == 4 else [keys, values]
        return torch.cat([head, *(code.flatten(1) for code in codes)], dim=1)

    def _quantise(self, numbers: Tensor, *, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return uint8 codes, and lowest and step as bfloat16, of groups along ``dim``."""
        levels = (1 << self._bits) - 1
        low, high = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
        # Rounded outwards, so that the stored range still covers every number of the group.
        lowest = -_rounded_up(-low)
        step = _rounded_up((high - lowest.float()) / levels)
        divisor = step.float()
        divisor = torch.where(divisor == 0, 1.0, divisor)
        codes = ((numbers - lowest.float()) / divisor).round_().clamp_(0, levels)
        return codes.nan_to_num_(0.0).to(torch.uint8), lowest, step

    def decode(self, stored: Tensor) -> Tensor:
        """Decode into the layout's dtype, computed in float32.

        uint8 ``[blocks, stored bytes]`` to ``[blocks, 2, block_tokens, kv_heads, head_dim]``.
        """
        head = stored[:, : self._head_bytes].clone().view(torch.bfloat16).float()
        keys, values = self._codes(stored[:, self._head_bytes :])
        shape = (len(stored), 2, *self._shape)
        layers = torch.empty(shape, dtype=self._dtype, device=stored.device)
        layers[:, 0] = self._numbers(keys, head[:, : 2 * self._channels], self._per_channel)
        layers[:, 1] = self._numbers(values, head[:, 2 * self._channels :], self._per_token)
        return layers

    def _numbers(self, codes: Tensor, ranges: Tensor, group: tuple[int, int, int]) -> Tensor:
        """Undo ``_quantise``; ``ranges`` holds all lowest, then all steps, of each block."""
        count = len(codes)
        lowest, step = ranges.reshape(count, 2, *group).unbind(1)
        return codes.float().view(count, *self._shape).mul_(step).add_(lowest)

    def _codes(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        if self._bits == 4:
            return packed & 15, packed >> 4
        size = prod(self._shape)
        return packed[:, :size].contiguous(), packed[:, size:].contiguous()


def _rounded_up(numbers: Tensor) -> Tensor:
    """Return the smallest bfloat16 that is not below each float32 number."""
    nearest = numbers.to(torch.bfloat16)
    above = torch.nextafter(nearest, torch.full_like(nearest, inf))
    return torch.where(nearest.float() < numbers, above, nearest)


LARGEST = 448.0
"""The largest e4m3 number; beyond it the format has only NaN."""

_HALF_SHIFT = 256.0
"""float16's exponent is biased by 15, e4m3's by 7."""

_HALF_MASK = 0xBF80 - (1 << 16)
"""Sign, and the seven bits of exponent and mantissa, as int16."""


class Float8Codec:
    """Codec ``fp8``: e4m3 numbers with one float32 scale per head of keys and of values.

    The largest magnitude of a head in a block is scaled to the largest e4m3 number. With three bits
    of mantissa the error of a value is at most 1/16 of the value, or 2**-10 of the scale for tiny
    values. Stored are scales ``[k|v][kv_heads]``, then codes
    ``[k|v][block_tokens][kv_heads][head_dim]``.
    """

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
        # Exponent and mantissa move to their place in a float16, which makes the number 256 times
        # smaller; the sign is in place already.
        values = (codes << 7).bitwise_and_(_HALF_MASK).view(torch.float16).float()
        values = values.view(len(stored), *self._shape)
        return values.mul_(heads.view(len(stored), *self._scales)).to(self._dtype)


TORCH_DTYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}


class LayerCodec(Protocol):
    """A codec for blocks of one layout.

    1. ``encode`` returns exactly ``layout.stored_layer_bytes`` per block, whatever the values are.
    2. Equal values give equal bytes, and a block's bytes do not depend on other blocks in the call.
    3. ``decode`` of encoded bytes keeps the codec's error bound; ``decode`` of any other bytes of
       the right size returns arbitrary numbers, never an error. A range with non-finite values is
       not finite after decoding either, so broken KV never looks sound.
    """

    def encode(self, layers: Tensor) -> Tensor:
        """``[blocks, 2, block_tokens, kv_heads, head_dim]`` to uint8 ``[blocks, stored bytes]``."""

    def decode(self, stored: Tensor) -> Tensor:
        """uint8 ``[blocks, stored bytes]`` to the tensor of the layout's shape and dtype."""


class RawCodec:
    """``none``: the bytes unchanged, bit for bit."""

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
    """Return the codec of the layout.

    Raises:
        ValueError: the codec's size is not fixed.
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

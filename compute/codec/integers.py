"""Codecs ``int8`` and ``int4``: keys quantised per channel, values per token and head.

A key channel keeps its offset over all tokens, so its range within a block is narrow; values have
no such channels. A number is stored as ``lowest + code * step`` of its group: off by half a step at
most. Stored are bfloat16 lowest and step of keys ``[kv_heads][head_dim]`` and of values
``[block_tokens][kv_heads]``, then codes ``[k|v][block_tokens][kv_heads][head_dim]``; with 4 bits
the codes of a key and of the value at the same place share a byte.
Source: KIVI, arXiv 2402.02750 (there with a full-precision tail, here blocks are always full).
"""

from __future__ import annotations

from math import inf, prod

import torch
from torch import Tensor

from tierkv.kvcore.layout import BlockLayout


class IntegerCodec:
    """Asymmetric codes of 8 or 4 bits."""

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

"""A matrix that inputs are multiplied with, stored the way the processor multiplies fastest.

Used for every weight matrix of a decoder. On x86 CPUs large float32 matrices are kept in oneDNN's
blocked order, which is read at the speed of memory; elsewhere, and small ones, as they came.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor
from torch.nn.functional import linear

_LEAST_PACKED = 1 << 19
"""Elements from which packing pays: its call costs about 25 us more than a plain one."""
_PACKED_FOR_TOKENS = 8
"""Tokens the blocked order is chosen for. It serves any number: measured within 10 % of the order
chosen for 1, 64 and 512."""


class Projection:
    """``x -> x W^T + b``.

    Attributes:
        shape: ``(outputs, inputs)``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = tuple(weight.shape)
        self._bias = bias
        self._packed = is_packed(self.shape, weight.dtype, weight.device)
        self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[tokens, outputs]`` for ``[tokens, inputs]``."""
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return product
        return linear(x, self._weight, self._bias)

    @property
    def parameters(self) -> int:
        """Count the weights, bias included."""
        bias = 0 if self._bias is None else self._bias.numel()
        return self.shape[0] * self.shape[1] + bias


def is_packed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a matrix is copied into another order instead of kept as it is."""
    return (
        dtype is torch.float32
        and device.type == "cpu"
        and shape[0] * shape[1] >= _LEAST_PACKED
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_TOKENS)
    return packed

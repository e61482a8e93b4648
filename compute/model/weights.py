"""Decoder weights: shapes, source (safetensors files or a seed), and storage order of matrices.

Projections with the same input are stored as one matrix (q|k|v and gate|up), so a layer is four
matrix products. On x86 CPUs large float32 matrices are kept in oneDNN's blocked order, which is
read at memory bandwidth. Pickles are never opened: only safetensors.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from tierkv.compute.model.architecture import Architecture
from tierkv.kvcore.errors import ModelFolderError

_LEAST_PACKED = 1 << 19
"""Fewest elements for which packing pays: a packed call costs about 25 us more than a plain call.
"""
_PACKED_FOR_TOKENS = 8
"""Batch size that the blocked order is chosen for. The order serves any number of tokens: measured
within 10 % of the order chosen for 1, 64 and 512."""


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
    """Whether a matrix is copied into oneDNN's blocked order."""
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


Source = Callable[[str, tuple[int, ...]], Tensor]
"""Returns the tensor with a given Hugging Face name, in the expected shape."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; optional tensors are None where the architecture has none."""

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder; ``tied`` means that ``head`` uses the values of ``embedding``."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Projection
    tied: bool

    def parameters(self) -> int:
        """Count the weights; tied weights count once."""
        parts: list[Tensor | Projection | None] = [self.embedding, self.final_norm]
        parts += [] if self.tied else [self.head]
        for layer in self.layers:
            parts += [getattr(layer, name) for name in layer.__slots__]
        return sum(_count(part) for part in parts)


def _count(part: Tensor | Projection | None) -> int:
    if isinstance(part, Projection):
        return part.parameters
    return 0 if part is None else part.numel()


def assemble(arch: Architecture, source: Source) -> Weights:
    """Ask ``source`` for every tensor of the architecture and join the fused projections."""
    embedding = source("model.embed_tokens.weight", (arch.vocab_tokens, arch.hidden))
    layers = tuple(_layer(arch, source, f"model.layers.{i}.") for i in range(arch.layers))
    final_norm = source("model.norm.weight", (arch.hidden,))
    head = embedding if arch.tied else source("lm_head.weight", (arch.vocab_tokens, arch.hidden))
    return Weights(embedding, layers, final_norm, Projection(head), arch.tied)


def _layer(arch: Architecture, source: Source, prefix: str) -> LayerWeights:
    hidden, q_rows, kv_rows = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim

    def norm(name: str, width: int) -> Tensor:
        return source(f"{prefix}{name}.weight", (width,))

    def joined(names: Sequence[tuple[str, int]], columns: int, *, biased: bool) -> Projection:
        weights = [source(f"{prefix}{name}.weight", (rows, columns)) for name, rows in names]
        if not biased:
            return Projection(torch.cat(weights))
        biases = [source(f"{prefix}{name}.bias", (rows,)) for name, rows in names]
        return Projection(torch.cat(weights), torch.cat(biases))

    qkv = [(f"self_attn.{n}_proj", r) for n, r in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))]
    gate_up = [("mlp.gate_proj", arch.inner), ("mlp.up_proj", arch.inner)]
    return LayerWeights(
        input_norm=norm("input_layernorm", hidden),
        qkv=joined(qkv, hidden, biased=arch.qkv_bias),
        q_norm=norm("self_attn.q_norm", arch.head_dim) if arch.qk_norm else None,
        k_norm=norm("self_attn.k_norm", arch.head_dim) if arch.qk_norm else None,
        out=joined([("self_attn.o_proj", hidden)], q_rows, biased=arch.out_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=joined(gate_up, hidden, biased=arch.mlp_bias),
        down=joined([("mlp.down_proj", hidden)], arch.inner, biased=arch.mlp_bias),
    )


def load_weights(
    arch: Architecture,
    files: Mapping[str, Path],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """Read all tensors from safetensors files.

    Args:
        arch: the expected architecture.
        files: the file of each tensor name.
        dtype: dtype of the returned weights.
        device: device of the returned weights.

    Raises:
        ModelFolderError: a file can't be read, or a tensor is missing or has the wrong shape.
    """
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def source(name: str, shape: tuple[int, ...]) -> Tensor:
            if name not in files:
                raise ModelFolderError(f"the safetensors files have no tensor {name!r}")
            if files[name] not in opened:
                opened[files[name]] = stack.enter_context(_open(files[name]))
            tensor: Tensor = opened[files[name]].get_tensor(name)
            if tuple(tensor.shape) != shape:
                raise ModelFolderError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, config.json says {shape}"
                )
            return tensor.to(device=device, dtype=dtype)

        return assemble(arch, source)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{file.name} can't be read as safetensors: {error}") from error


def random_weights(
    arch: Architecture, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Draw weights from a seed: norms are one, all else is normal with a stable scale."""
    generator = torch.Generator().manual_seed(seed)

    def source(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5)
        return tensor.to(device=device, dtype=dtype)

    return assemble(arch, source)

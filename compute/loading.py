"""From a ComputeConfig to a model in memory with its pages.

Called once when a node starts, and by nothing else. Sizes are checked here, so that what can't
fit is refused with the number that would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from compute.architecture import Architecture, parse_architecture
from compute.blend.gate import check_model
from compute.codec.calibration import Calibration, load_calibration
from compute.codec.layer_codec import TORCH_DTYPES
from compute.config import ComputeConfig, RandomModelSpec
from compute.cuda_decode import attach_decode_graphs
from compute.memory_check import check_memory
from compute.model import Decoder
from compute.pages import L1Pages
from compute.weights import Weights, load_weights, random_weights
from kvcore.errors import ConfigError, ModelFolderError
from kvcore.layout import BlockLayout, KvDtype
from kvcore.node import ModelInfo
from storage.model_folder import CALIBRATION_NAME, inspect_model_folder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, and how the cluster sees it."""

    decoder: Decoder
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class _Found:
    """A model before its weights are in memory."""

    arch: Architecture
    revision: str
    eos_token_ids: tuple[int, ...]
    weights: Callable[[KvDtype, torch.device], Weights]


def load_model(config: ComputeConfig) -> LoadedModel:
    """Read or draw the weights and reserve the L1 pages.

    Raises:
        ModelFolderError: the folder can't be served.
        ConfigError: an unknown device or dtype, or too little memory for weights and L1.
    """
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    if config.random_model is not None:
        found = _draw(config.random_model)
    else:
        assert config.model_folder is not None
        found = _read(config.model_folder)
    layout, num_pages = _plan_pages(config, found.arch, dtype)
    check_memory(found.arch, layout, num_pages, device)
    weights = found.weights(dtype, device)
    calibration = _calibration(config, layout, found.revision)
    pages = _reserve(layout, num_pages, device, calibration)
    decoder = Decoder(found.arch, weights, pages)
    if device.type == "cuda":
        attach_decode_graphs(decoder)
    info = ModelInfo(
        name=config.model_name,
        folder=config.tokenizer_folder or config.model_folder or "",
        revision=found.revision,
        layout=layout,
        # A request longer than all pages together could never run.
        context_tokens=min(found.arch.context_tokens, (num_pages - 1) * config.block_tokens),
        eos_token_ids=found.eos_token_ids,
        architecture=found.arch.name,
        parameters=weights.parameters(),
        blend_refusal=check_model(decoder),
    )
    return LoadedModel(decoder, info)


def _draw(spec: RandomModelSpec) -> _Found:
    arch = parse_architecture(spec.config)
    text = json.dumps([dict(spec.config), spec.seed], sort_keys=True)
    revision = blake2b(text.encode(), digest_size=16).hexdigest()

    def weights(dtype: KvDtype, device: torch.device) -> Weights:
        return random_weights(arch, seed=spec.seed, dtype=TORCH_DTYPES[dtype], device=device)

    return _Found(arch, revision, _eos_ids(spec.config), weights)


def _read(folder: str) -> _Found:
    model = inspect_model_folder(folder)
    arch = parse_architecture(model.config)

    def weights(dtype: KvDtype, device: torch.device) -> Weights:
        try:
            return load_weights(arch, model.tensors, dtype=TORCH_DTYPES[dtype], device=device)
        except torch.OutOfMemoryError as error:
            raise ModelFolderError(
                f"{folder} does not fit into {device} memory: {model.weights_bytes} bytes of "
                "weights",
                detail=str(error),
            ) from error

    return _Found(arch, model.revision, model.eos_token_ids, weights)


def _eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list | tuple) else (int(eos),)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device", hint="use device=cpu")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> KvDtype:
    if name == "auto":
        return KvDtype.BFLOAT16 if device.type == "cuda" else KvDtype.FLOAT32
    try:
        return KvDtype(name)
    except ValueError:
        choices = ", ".join(["auto", *KvDtype])
        raise ConfigError(f"dtype must be one of {choices}, got {name!r}") from None


def _plan_pages(
    config: ComputeConfig, arch: Architecture, dtype: KvDtype
) -> tuple[BlockLayout, int]:
    try:
        layout = BlockLayout(
            arch.layers,
            arch.kv_heads,
            arch.head_dim,
            dtype,
            config.block_tokens,
            config.kv_codec,
        )
    except ValueError as error:
        raise ModelFolderError(str(error)) from error
    count = config.l1_pages or config.l1_bytes // layout.payload_bytes
    if count < 2:
        raise ConfigError(
            f"compute.l1_capacity of {config.l1_bytes} bytes holds {count} pages of "
            f"{layout.payload_bytes} bytes",
            hint=f"give at least {2 * layout.payload_bytes} bytes, better 64 times as much",
        )
    return layout, count


def _calibration(config: ComputeConfig, layout: BlockLayout, revision: str) -> Calibration | None:
    """Read the tables of codecs that need them; without any, a namespace can't have those.

    Raises:
        ConfigError: they can't be used and the node's own codec, or its setting, asks for them.
    """
    if config.kv_calibration:
        return load_calibration(Path(config.kv_calibration), layout, revision=revision)
    if config.model_folder is None and config.kv_codec.has_fixed_size:
        return None
    file = Path(config.model_folder or "") / CALIBRATION_NAME
    if config.kv_codec.has_fixed_size and not file.is_file():
        return None
    return load_calibration(file, layout, revision=revision)


def _reserve(
    layout: BlockLayout,
    num_pages: int,
    device: torch.device,
    calibration: Calibration | None,
) -> L1Pages:
    try:
        return L1Pages(layout, num_pages, device=device, calibration=calibration)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"could not reserve {num_pages * layout.payload_bytes} bytes of {device} memory for L1",
            detail=str(error),
            hint="lower compute.l1_capacity",
        ) from error

"""Turns a ComputeConfig into a model in memory with its pages.

Called once when a node starts, and only then. Sizes are checked here: a model or L1 that can't fit
is refused with the number of bytes needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tierkv.compute.blend.gate import check_model
from tierkv.compute.codec.entropy import Calibration, load_calibration
from tierkv.compute.codec.layer_codec import TORCH_DTYPES
from tierkv.compute.config import ComputeConfig, RandomModelSpec
from tierkv.compute.model.architecture import Architecture, parse_architecture
from tierkv.compute.model.cuda_decode import attach_decode_graphs
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.model.weights import Weights, is_packed, load_weights, random_weights
from tierkv.compute.model_plan import (
    PagePlan,
    check_device,
    check_memory,
    choose_dtype,
    free_host_bytes,
    plan_pages,
)
from tierkv.kvcore.errors import ConfigError, ModelFolderError
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import OPTIONAL_FIELDS
from tierkv.storage.modelfiles.model_folder import CALIBRATION_NAME, inspect_model_folder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, and its description for the cluster."""

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
    dtype = choose_dtype(config.dtype, on_cpu=device.type == "cpu")
    if config.random_model is not None:
        found = _draw(config.random_model)
    else:
        assert config.model_folder is not None
        found = _read(config.model_folder)
    plan = plan_pages(config, found.arch, dtype)
    layout = plan.layout
    _check_memory(found.arch, plan, device)
    weights = found.weights(dtype, device)
    calibration = _calibration(config, layout, found.revision)
    pages = _reserve(config, plan, device, calibration)
    decoder = Decoder(found.arch, weights, pages)
    if device.type == "cuda":
        # cuDNN makes a plan per shape, some tens of milliseconds each, and contexts keep growing.
        torch.backends.cuda.enable_cudnn_sdp(False)
        attach_decode_graphs(decoder)
    info = ModelInfo(
        name=config.model_name,
        folder=config.tokenizer_folder or config.model_folder or "",
        revision=found.revision,
        layout=layout,
        # A request longer than all pages together could never run.
        context_tokens=min(found.arch.context_tokens, (plan.pages - 1) * config.block_tokens),
        eos_token_ids=found.eos_token_ids,
        architecture=found.arch.name,
        parameters=weights.parameters(),
        blend_refusal=check_model(decoder),
        sampling_fields=OPTIONAL_FIELDS,
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
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device", hint="Use device=cpu.")
    return torch.device(name)


def _check_memory(arch: Architecture, plan: PagePlan, device: torch.device) -> None:
    """Refuse a model that does not fit on the device.

    An output head in another storage order is a copy of the embedding.
    """
    head = (arch.vocab_tokens, arch.hidden)
    check_memory(
        arch,
        plan.layout,
        plan.pages,
        device=str(device),
        free=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes(),
        copies_head=is_packed(head, TORCH_DTYPES[plan.layout.dtype], device),
    )


def _calibration(config: ComputeConfig, layout: BlockLayout, revision: str) -> Calibration | None:
    """Read the tables for entropy codecs; without tables, namespaces can't use these codecs.

    Raises:
        ConfigError: the tables can't be used, but the node's codec or ``kv_calibration`` needs
            tables.
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
    config: ComputeConfig, plan: PagePlan, device: torch.device, calibration: Calibration | None
) -> L1Pages:
    try:
        return L1Pages(
            plan.layout,
            plan.pages,
            device=device,
            calibration=calibration,
            touched=config.touch_l1,
        )
    except (RuntimeError, MemoryError, OSError) as error:
        size = plan.pages * plan.layout.payload_bytes
        raise ConfigError(
            f"could not reserve {size} bytes of {device} memory for L1",
            detail=str(error),
            hint="Lower compute.l1_capacity.",
        ) from error

"""What a node's model will take, as far as that is known before torch is there.

Called by compute/loading.py, and by processes that load a model later than they start
(``tierkv sql``): what can't be served is refused at the start, not in the middle of a statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.compute.config import ComputeConfig
from tierkv.compute.memory_check import check_memory, free_host_bytes
from tierkv.compute.model.architecture import Architecture, parse_architecture
from tierkv.kvcore.errors import ConfigError, ModelFolderError
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.storage.modelfiles.model_folder import read_model_config

_CUDA_DEVICES: Final = (Path("/dev"), "nvidia[0-9]*")


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The layout of a model's blocks, and how many pages of them L1 gets."""

    layout: BlockLayout
    pages: int


def check_config(config: ComputeConfig) -> None:
    """Refuse a model or a setting that can't work; quick, and imports no torch.

    What only torch or the weights can tell is found when the model is loaded.

    Raises:
        ModelFolderError: the folder can't be served.
        ConfigError: an unknown device or dtype, or too little memory for weights and L1.
    """
    check_device(config.device)
    raw = config.random_model.config if config.random_model is not None else None
    arch = parse_architecture(raw or read_model_config(config.model_folder or ""))
    on_cpu = config.device == "cpu" or not (config.device == "cuda" or _may_have_cuda())
    plan = plan_pages(config, arch, choose_dtype(config.dtype, on_cpu=on_cpu))
    if on_cpu:
        check_memory(arch, plan.layout, plan.pages, device="cpu", free=free_host_bytes())


def check_device(name: str) -> None:
    """Refuse a name that is no device's.

    Raises:
        ConfigError: with the names there are.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")


def choose_dtype(name: str, *, on_cpu: bool) -> KvDtype:
    """Return the type a model computes with.

    Raises:
        ConfigError: an unknown name.
    """
    if name == "auto":
        return KvDtype.FLOAT32 if on_cpu else KvDtype.BFLOAT16
    try:
        return KvDtype(name)
    except ValueError:
        choices = ", ".join(["auto", *KvDtype])
        raise ConfigError(f"dtype must be one of {choices}, got {name!r}") from None


def plan_pages(config: ComputeConfig, arch: Architecture, dtype: KvDtype) -> PagePlan:
    """Lay out blocks and count the pages that L1 has room for.

    Raises:
        ModelFolderError: sizes that no block can have.
        ConfigError: L1 would hold less than two pages.
    """
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
    return PagePlan(layout, count)


def _may_have_cuda() -> bool:
    folder, pattern = _CUDA_DEVICES
    return any(folder.glob(pattern))

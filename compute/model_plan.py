"""The needs of a node's model, as far as known before torch is loaded: pages and memory.

Called by compute/loading.py, and by processes that start before they load a model (``tierkv sql``):
a model that cannot be served is refused at the start, not in the middle of a statement. Memory is
checked here because the operating system would grant more memory than available and kill the
process later; the error message gives the bytes needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.compute.config import ComputeConfig
from tierkv.compute.model.architecture import Architecture, parse_architecture
from tierkv.kvcore.errors import ConfigError, ModelFolderError
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.storage.modelfiles.model_folder import read_model_config

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_memory(
    arch: Architecture,
    layout: BlockLayout,
    num_pages: int,
    *,
    device: str,
    free: int | None,
    copies_head: bool = False,
) -> None:
    """Refuse a model if its weights and pages need more than the free memory.

    Args:
        arch: architecture of the model.
        layout: layout of the model's blocks; includes the dtype.
        num_pages: pages of L1.
        device: name of the device, for the message.
        free: free bytes of the device; None if unknown.
        copies_head: whether an output head tied to the embedding is stored as a separate copy.

    Raises:
        ConfigError: with the needed bytes and the free bytes.
    """
    weights = weights_bytes(arch, layout, copies_head=copies_head)
    pages = num_pages * layout.payload_bytes
    if free is None or weights + pages <= free:
        return
    raise ConfigError(
        f"{weights + pages} bytes of {device} memory are needed, {weights} for weights and {pages} "
        f"for {num_pages} pages of L1, but {free} are free",
        hint="Lower compute.l1_capacity." if weights < free else "Serve a smaller model.",
    )


def weights_bytes(arch: Architecture, layout: BlockLayout, *, copies_head: bool = False) -> int:
    """Return the size of a model's weights in its dtype."""
    head = arch.vocab_tokens * arch.hidden
    heads = 1 if arch.tied and not copies_head else 2
    parameters = heads * head + arch.layers * _layer_parameters(arch) + arch.hidden
    return parameters * layout.dtype.itemsize


def _layer_parameters(arch: Architecture) -> int:
    """Count the parameters that compute/model/weights.py reads for a layer."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    qkv = queries + 2 * keys
    norms = 2 * arch.hidden + (2 * arch.head_dim if arch.qk_norm else 0)
    matrices = arch.hidden * (qkv + queries + 3 * arch.inner)
    biases = (
        arch.qkv_bias * qkv
        + arch.out_bias * arch.hidden
        + arch.mlp_bias * (2 * arch.inner + arch.hidden)
    )
    return norms + matrices + biases


def free_host_bytes() -> int | None:
    """Return the memory that this process can have; None if the system does not say."""
    limits = [_available_bytes(), _group_limit_bytes()]
    return min((limit for limit in limits if limit is not None), default=None)


def _available_bytes() -> int | None:
    """Read the memory that Linux could give without swapping, file caches included."""
    if not _MEMINFO.exists():
        return None
    rows = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(row[1]) << 10 for row in rows if row[0] == "MemAvailable:"), None)


def _group_limit_bytes() -> int | None:
    """Read the limit of a container."""
    limit = _GROUP_LIMIT.read_text().strip() if _GROUP_LIMIT.exists() else "max"
    return int(limit) if limit.isdigit() else None


_CUDA_DEVICES: Final = (Path("/dev"), "nvidia[0-9]*")


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The layout of a model's blocks, and the number of L1 pages."""

    layout: BlockLayout
    pages: int


def check_config(config: ComputeConfig) -> None:
    """Refuse a model or a setting that can't work; quick, and imports no torch.

    Faults that only torch or the weights can reveal are found when the model is loaded.

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
    """Refuse an unknown device name.

    Raises:
        ConfigError: with the known names.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")


def choose_dtype(name: str, *, on_cpu: bool) -> KvDtype:
    """Return the dtype of a model's weights and computation.

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
        ModelFolderError: the model's sizes are not valid for a block.
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
            hint=f"Give at least {2 * layout.payload_bytes} bytes, better 64 times as much.",
        )
    return PagePlan(layout, count)


def _may_have_cuda() -> bool:
    folder, pattern = _CUDA_DEVICES
    return any(folder.glob(pattern))

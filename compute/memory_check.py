"""Whether a model and its L1 pages fit into memory; asked before anything is read or reserved.

Called by compute/loading.py. The operating system would grant more than it has and kill the
process later, in the middle of somebody's answer; here the refusal says what was needed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from compute.architecture import Architecture
from compute.codec.layer_codec import TORCH_DTYPES
from compute.projection import is_packed
from compute.weights import assemble
from kvcore.errors import ConfigError
from kvcore.layout import BlockLayout

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_memory(
    arch: Architecture, layout: BlockLayout, num_pages: int, device: torch.device
) -> None:
    """Refuse a model whose weights and pages are larger than what is free.

    Raises:
        ConfigError: with the bytes that are needed and the bytes that are free.
    """
    free = free_bytes(device)
    weights, pages = weights_bytes(arch, layout, device), num_pages * layout.payload_bytes
    if free is None or weights + pages <= free:
        return
    raise ConfigError(
        f"{weights + pages} bytes of {device} memory are needed, {weights} for weights and {pages} "
        f"for {num_pages} pages of L1, but {free} are free",
        hint="lower compute.l1_capacity" if weights < free else "serve a smaller model",
    )


def weights_bytes(arch: Architecture, layout: BlockLayout, device: torch.device) -> int:
    """Return the size of a model's weights in the type it computes with; reserves nothing."""
    dtype = TORCH_DTYPES[layout.dtype]
    head = (arch.vocab_tokens, arch.hidden)
    # An output head in another order than the embedding is a copy of it.
    copied = arch.tied and is_packed(head, dtype, device)

    def shape_only(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    parameters = assemble(arch, shape_only).parameters() + copied * arch.vocab_tokens * arch.hidden
    return parameters * layout.dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory of a device can be had; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_available_bytes(), _group_limit_bytes()]
    return min((limit for limit in limits if limit is not None), default=None)


def _available_bytes() -> int | None:
    """Read what Linux could give without swapping, file caches included."""
    if not _MEMINFO.exists():
        return None
    rows = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(row[1]) << 10 for row in rows if row[0] == "MemAvailable:"), None)


def _group_limit_bytes() -> int | None:
    """Read the limit of a container."""
    limit = _GROUP_LIMIT.read_text().strip() if _GROUP_LIMIT.exists() else "max"
    return int(limit) if limit.isdigit() else None

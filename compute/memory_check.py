"""Whether a model and its L1 pages fit into memory; asked before anything is read or reserved.

Called by compute/model_plan.py and compute/loading.py; imports no torch. The operating system would
grant more than it has and kill the process later, in the middle of somebody's answer; here the
refusal says what was needed.
"""

from __future__ import annotations

from pathlib import Path

from tierkv.compute.model.architecture import Architecture
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.layout import BlockLayout

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
    """Refuse a model whose weights and pages are larger than what is free.

    Args:
        arch: of the model.
        layout: of its blocks; says in which type it computes.
        num_pages: pages of L1.
        device: whose memory it is, for the message.
        free: bytes of it that can be had; None where that can't be told.
        copies_head: whether an output head that is the embedding is a copy of it.

    Raises:
        ConfigError: with the bytes that are needed and the bytes that are free.
    """
    weights = weights_bytes(arch, layout, copies_head=copies_head)
    pages = num_pages * layout.payload_bytes
    if free is None or weights + pages <= free:
        return
    raise ConfigError(
        f"{weights + pages} bytes of {device} memory are needed, {weights} for weights and {pages} "
        f"for {num_pages} pages of L1, but {free} are free",
        hint="lower compute.l1_capacity" if weights < free else "serve a smaller model",
    )


def weights_bytes(arch: Architecture, layout: BlockLayout, *, copies_head: bool = False) -> int:
    """Return the size of a model's weights in the type it computes with."""
    head = arch.vocab_tokens * arch.hidden
    heads = 1 if arch.tied and not copies_head else 2
    parameters = heads * head + arch.layers * _layer_parameters(arch) + arch.hidden
    return parameters * layout.dtype.itemsize


def _layer_parameters(arch: Architecture) -> int:
    """Count what compute/model/weights.py reads for a layer."""
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
    """Return how much memory this process can have; None where the system does not say."""
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

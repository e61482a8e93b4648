"""Tier L4 of a pool node: from the settings to the store below the node's memory.

Called where a DMP node is composed (tierkv/commands/serve.py, tierkv/embedded.py). Without
``dmp.disk_path`` there is no tier L4, and evicted blocks are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import NodeId
from tierkv.settings import DmpSettings
from tierkv.storage.disk.segment_folder import MIN_FILES, choose_segment_bytes
from tierkv.storage.disk.segment_format import PAGE


def disk_tier(
    settings: DmpSettings, node: NodeId, *, extent_bytes: int
) -> Callable[[], LowerTier] | None:
    """Return the function that opens the node's disk pool; None without a disk pool.

    Each node has a separate folder below ``dmp.disk_path``, so several nodes of one machine can
    share the setting.

    Args:
        settings: folder and size of the disk pool.
        node: the node with the disk pool.
        extent_bytes: extent size of the node's memory, the limit of a block's size. Each block must
            fit a file, because a refused block would be offered again and again.

    Raises:
        ConfigError: an archive without a disk pool above it, or too small a disk pool.
    """
    if not settings.disk_path:
        if settings.archive_url:
            raise ConfigError(
                "dmp.archive_url is set, but an archive lies below a disk pool",
                hint="set dmp.disk_path to a folder on a local disk",
            )
        return None
    capacity = int(settings.disk_capacity)
    least = MIN_FILES * (extent_bytes + 2 * PAGE)
    if capacity < least:
        raise ConfigError(
            f"dmp.disk_capacity {capacity} is too small: {MIN_FILES} files that hold the largest "
            f"block take {least} bytes",
            hint="raise dmp.disk_capacity, or leave dmp.disk_path empty",
        )
    folder = Path(settings.disk_path).expanduser() / node

    def open_store() -> LowerTier:
        from tierkv.storage.l4 import L4Store  # Only nodes with a disk pool load this module.

        return L4Store.open(
            folder,
            capacity_bytes=capacity,
            segment_bytes=max(choose_segment_bytes(capacity), extent_bytes + 2 * PAGE),
            archive_url=settings.archive_url,
            archive_options=settings.archive_options,
        )

    return open_store

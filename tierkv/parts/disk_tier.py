"""Tier L4 of a pool node: from the settings to the store that the node opens below its memory.

Called where a DMP node is composed (tierkv/commands/serve.py, tierkv/embedded.py). Without
``dmp.disk_path`` there is no such tier, and blocks that memory has no room for are forgotten.
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
    """Return what opens the node's disk pool, None when it has none.

    Each node has a folder of its own below ``dmp.disk_path``, so that several nodes of one machine
    can share the setting.

    Args:
        settings: where the disk pool lies, and its size.
        node: whose it is.
        extent_bytes: of the node's memory: no block is larger, and each must fit a file, because
            one that is refused would be offered again and again.

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
        from tierkv.storage.l4 import L4Store  # Only nodes with a disk pool load it.

        return L4Store.open(
            folder,
            capacity_bytes=capacity,
            segment_bytes=max(choose_segment_bytes(capacity), extent_bytes + 2 * PAGE),
            archive_url=settings.archive_url,
            archive_options=settings.archive_options,
        )

    return open_store

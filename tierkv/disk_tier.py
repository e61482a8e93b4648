"""Tier L4 of a pool node: from the settings to the store that the node opens below its memory.

Called where a DMP node is composed (tierkv/serve.py, tierkv/embedded.py). Without ``dmp.disk_path``
there is no such tier, and blocks that memory has no room for are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dmp.lower_tier import LowerTier
from kvcore.errors import ConfigError
from kvcore.ids import NodeId
from tierkv.settings import DmpSettings


def disk_tier(settings: DmpSettings, node: NodeId) -> Callable[[], LowerTier] | None:
    """Return what opens the node's disk pool, None when it has none.

    Each node has a folder of its own below ``dmp.disk_path``, so that several nodes of one machine
    can share the setting.

    Raises:
        ConfigError: an archive without a disk pool above it.
    """
    if not settings.disk_path:
        if settings.archive_url:
            raise ConfigError(
                "dmp.archive_url is set, but an archive lies below a disk pool",
                hint="set dmp.disk_path to a folder on a local disk",
            )
        return None
    folder = Path(settings.disk_path).expanduser() / node

    def open_store() -> LowerTier:
        from storage.l4 import L4Store  # Only nodes with a disk pool load it.

        return L4Store.open(
            folder,
            capacity_bytes=int(settings.disk_capacity),
            archive_url=settings.archive_url,
        )

    return open_store

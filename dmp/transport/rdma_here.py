"""Whether this machine can do RDMA, told in words; nothing is opened or imported.

Called when a path is chosen and by ``tierkv doctor``. The devices themselves are the business of
dmp/transport/verbs_device.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/sys/class/infiniband")


def rdma_devices(folder: Path = DEVICES) -> list[str]:
    """Return the names of the RDMA devices the kernel knows."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def why_no_rdma(folder: Path = DEVICES) -> str:
    """Return why RDMA can't be used here; empty if it can."""
    devices = rdma_devices(folder)
    if not devices:
        return "no RDMA device here"
    if importlib.util.find_spec("pyverbs") is None:
        return f"{', '.join(devices)} here, but no pyverbs"
    return ""

"""Names of a cluster's files: in ``cluster.run_dir`` while it runs, and its pool's memory.

Apart from tierkv/commands/up.py, so that a command that only looks for them imports nothing else.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Final

STATE_FILE: Final = "cluster.json"
CONFIG_FILE: Final = "cluster.toml"


def segment_prefix(run_dir: Path) -> str:
    """Begin the names of a cluster's segments: its run directory tells it apart from others."""
    cluster = blake2b(str(run_dir.expanduser().resolve()).encode(), digest_size=4).hexdigest()
    return f"tierkv-{cluster}-"

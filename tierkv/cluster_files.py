"""Names of the files that ``tierkv up`` leaves in ``cluster.run_dir`` while a cluster runs.

Apart from tierkv/up.py, so that a command that only looks for them imports nothing else.
"""

from __future__ import annotations

from typing import Final

STATE_FILE: Final = "cluster.json"
CONFIG_FILE: Final = "cluster.toml"

"""Where the model to serve lies and what it is called.

The small model that comes with TierKV is the default, so that everything works without a download.
"""

from __future__ import annotations

from pathlib import Path

import compute
from tierkv.settings import ComputeSettings

SHIPPED_NAME = "tierkv-demo"


def model_folder(settings: ComputeSettings) -> Path:
    """Return the configured model folder, or the shipped one."""
    if settings.model:
        return Path(settings.model).expanduser()
    return Path(compute.__file__).parent / "demo_model" / "weights"


def model_name(settings: ComputeSettings) -> str:
    """Return the name requests call the model by."""
    if settings.model_name:
        return settings.model_name
    return model_folder(settings).resolve().name if settings.model else SHIPPED_NAME

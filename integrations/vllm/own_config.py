"""vLLM's whole configuration, for a tier that is told only a part of it.

The tier's part names the model and sizes. What changes the model's KV beside its weights (overrides
of its configuration, quantisation while it is loaded) is not in it, and engines that differ in that
must not share. Called by integrations/vllm/tier.py once.
"""

from __future__ import annotations

import gc
from typing import Any, Final

_CLASS: Final = "VllmConfig"


def find_config(engine_id: str) -> Any | None:
    """Find the configuration of the engine with that id in this process; None if it is not here.

    vLLM hands it to nobody below its connector, but every engine's has an id of its own. Looks at
    every object once: about 0.1 s.
    """
    for thing in gc.get_objects():
        if type(thing).__name__ == _CLASS:
            transfer = getattr(thing, "kv_transfer_config", None)
            if transfer is not None and getattr(transfer, "engine_id", None) == engine_id:
                return thing
    return None

"""vLLM itself, imported before warnings are errors: it and what it imports warn as they load."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.engine.arg_utils  # noqa: F401

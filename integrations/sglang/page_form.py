"""The form of SGLang's pages, derived from SGLang's configuration and host pool.

Called by integrations/sglang/hicache.py once, when SGLang registers the host pool. Duck-typed, so
importing this module does not need SGLang: the configuration is ``HiCacheStorageConfig``, the model
is SGLang's own record of the arguments.
"""

from __future__ import annotations

from typing import Any, Final

from tierkv.integrations.identity import EngineIdentity, revision_of

MAMBA: Final = "mamba"
"""The pool of Mamba states, which are divided between ranks even if keys and values are not."""

_MODEL_FACTS: Final = {
    "quantization": "quantization",
    "kv dtype": "kv_cache_dtype",
    "compute dtype": "dtype",
    "model overrides": "json_model_override_args",
    "scales of the cache": "quantization_param_path",
    "modelopt": "modelopt_quant",
    "quantised while served": "quantize_and_serve",
    "configuration": "decrypted_config_file",
    "weight loader": "custom_weight_loader",
}
_MADE_UP: Final = "dummy"
"""The load format of random weights, which the folder therefore does not determine."""


def identity_of(
    storage: Any,
    host_pool: Any,
    *,
    version: str,
    model: str,
    revision: str | None,
    weights: str,
    arguments: Any,
) -> EngineIdentity:
    """Return the identity of an engine with opaque pages.

    All processes of one engine have equal facts; ``part_of`` distinguishes the processes.

    Args:
        storage: SGLang's configuration of storage.
        host_pool: the host pool of keys and values.
        version: SGLang's version. The byte order of a page and the hashes are internal to SGLang
            and may change with any version.
        model: folder or name.
        revision: the commit of a model without a local folder, if given.
        weights: the operator's name of the weights; weights may be replaced at runtime, which the
            folder does not show.
        arguments: SGLang's record of the model's arguments; None if missing.
    """
    replicated = bool(storage.is_mla_model)
    facts = {
        "sglang": version,
        "host pool": type(host_pool).__name__,
        "page layout": str(getattr(host_pool, "layout", "")),
        "page size": str(getattr(host_pool, "page_size", "")),
        "dtype": str(getattr(host_pool, "dtype", "")),
        "format": str(getattr(host_pool, "storage_format_tag", None) or ""),
        "weight version": weights,
        "pp": str(storage.pp_size),
        "cp": str(storage.attn_cp_size),
        "dcp": str(storage.dcp_size),
    }
    for name, field in _MODEL_FACTS.items():
        facts[name] = str(getattr(arguments, field, None) or "")
    made_up = getattr(arguments, "load_format", None) == _MADE_UP
    return EngineIdentity(
        engine="sglang",
        version=version,
        model=model,
        revision="" if made_up else revision_of(model, told=revision),
        layout=None,
        ranks=1 if replicated else int(storage.tp_size),
        rank=0 if replicated else int(storage.tp_rank),
        facts=tuple(facts.items()),
    )


def part_of(storage: Any, component: str, host_pool: Any, form: str) -> tuple[str, ...]:
    """Describe the part of each page in this process.

    Args:
        storage: SGLang's configuration of storage.
        component: name of the host pool.
        host_pool: the host pool.
        form: number and size of the pieces of a page.
    """
    shared = bool(storage.is_mla_model) and component != MAMBA
    layers = getattr(host_pool, "start_layer", ""), getattr(host_pool, "end_layer", "")
    return (
        "tp any" if shared else f"tp {storage.tp_rank} of {storage.tp_size}",
        f"pp {storage.pp_rank} of {storage.pp_size}",
        f"cp {storage.attn_cp_rank} of {storage.attn_cp_size}",
        f"dcp {storage.dcp_rank} of {storage.dcp_size}",
        f"layers {layers[0]} to {layers[1]}",
        form,
    )

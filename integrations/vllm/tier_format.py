"""What vLLM's offloaded chunks consist of, read off its own configuration of offloading.

Called by integrations/vllm/tier.py once, when the tier is made. Duck-typed, so that it needs no
vLLM: the configuration is ``vllm.v1.kv_offload.config.OffloadingConfig``.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from tierkv.integrations.identity import EngineIdentity, revision_of
from tierkv.integrations.vllm.model_facts import kv_facts


def identity_of(
    config: Any, *, version: str, chunk_bytes: int, revision: str | None, whole: Any = None
) -> EngineIdentity:
    """Describe an engine whose chunks are only bytes to us.

    A chunk holds the parts of all ranks of a group, so one engine has one identity. Engines of
    other ranks share only the canonical format, whose bytes vLLM itself says to be the same.

    Args:
        config: vLLM's configuration of offloading.
        version: vLLM's; its first two numbers are part of the format, because the order of a
            chunk's bytes is vLLM's own affair and may change with them.
        chunk_bytes: from one chunk to the next in CPU memory.
        revision: the commit of a model that is no local folder, if the user told it.
        whole: the engine's whole configuration; None where it was not found.
    """
    parallel = config.parallel
    any_ranks = bool(config.canonical_layout and parallel.is_parallelism_agnostic)
    shape = f"tp {parallel.tp_size}, pp {parallel.pp_size}"
    shape += f", pcp {parallel.pcp_size}, dcp {parallel.dcp_size}, world {parallel.world_size}"
    order = "canonical" if config.canonical_layout else "direct"
    facts = {
        "vllm": ".".join(version.split(".")[:2]),
        "chunk bytes": str(chunk_bytes),
        "block size": str(config.cache.tokens_per_hash),
        "blocks per chunk": str(config.cache.blocks_per_chunk),
        "kv dtype": config.model.dtype,
        "kv layout": str(config.kv_cache_layout),
        "order": f"{order}, one copy" if config.replicated_layout else order,
        "ranks": "any" if any_ranks else shape,
        "layers": _groups(config.groups),
    }
    known = revision_of(config.model.name, told=revision or _told(whole))
    if whole is not None:
        facts |= dict(kv_facts(whole.model_config))
        if whole.load_config.load_format == "dummy":  # Made-up weights are nobody else's.
            known = ""
    return EngineIdentity(
        engine="vllm",
        version=version,
        model=config.model.name,
        revision=known,
        layout=None,
        ranks=1 if any_ranks else parallel.tp_size,
        facts=tuple(facts.items()),
    )


def _told(whole: Any) -> str | None:
    return None if whole is None else whole.model_config.revision


def _groups(groups: Any) -> str:
    """Say what layers the cache groups have, with a digest of their names."""
    names = blake2b(digest_size=4)
    for group in groups:
        for part in (str(group.group_id), *group.layer_names):
            names.update(len(part).to_bytes(4, "little") + part.encode())
    counts = "+".join(f"{len(group.layer_names)}x{group.tokens_per_block}" for group in groups)
    return f"{counts} {names.hexdigest()}"

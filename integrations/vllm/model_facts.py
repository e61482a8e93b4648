"""Facts about vLLM's KV from its configuration and memory: shareable or not, and the identity.

Called by integrations/vllm/connector.py. Duck-typed, so this module does not import vLLM. An
unsupported configuration gives a reason in words; the engine then runs without the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from tierkv.integrations.identity import EngineIdentity, revision_of
from tierkv.integrations.vllm.kv_memory import KvMemory
from tierkv.kvcore import limits
from tierkv.kvcore.layout import BlockLayout, KvDtype

_PLAIN_SPECS: Final = ("FullAttentionSpec",)
_AUTO: Final = ("auto", "")


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker's facts about its own memory.

    Attributes:
        layout: layout of the worker's part of a block; None if unsupported.
        reason: why unsupported.
    """

    layout: BlockLayout | None
    reason: str = ""


def why_unsupported(config: Any, kv_cache_config: Any) -> str | None:
    """Return why an engine's KV can't be shared; None if it can.

    Args:
        config: vLLM's configuration.
        kv_cache_config: vLLM's plan of KV memory.
    """
    parallel, cache = config.parallel_config, config.cache_config
    if config.load_config.load_format == "dummy":
        return "weights are made up (load_format dummy), so nobody else has the same"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"a hybrid model ({len(groups)} groups of KV) is not supported yet"
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in _PLAIN_SPECS:
        return f"KV of the kind {kind} is not supported yet, only plain attention's"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "attention over a window is not supported yet"
    if spec.head_size != spec.head_size_v:
        return f"keys of {spec.head_size} and values of {spec.head_size_v} channels"
    if cache.cache_dtype not in _AUTO and _kv_dtype(cache.cache_dtype) is None:
        return f"KV of the type {cache.cache_dtype} is not supported yet"
    if _kv_dtype(spec.dtype) is None:
        return f"KV of the type {spec.dtype} is not supported yet"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported yet"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "context parallelism is not supported yet"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "context parallelism is not supported yet"
    if getattr(parallel, "use_ubatching", False):
        return "steps in microbatches (DBO) are not supported yet: layers end more than once"
    if config.speculative_config is not None and len(groups[0].layer_names) > _layers(config):
        return "a draft model with KV of its own is not supported yet"
    return None


def worker_facts(
    config: Any, kv_cache_config: Any, memory: KvMemory, *, version: str, processor: str
) -> WorkerFacts:
    """Describe a worker's part of a block, from the worker's tensors.

    Args:
        config: vLLM's configuration.
        kv_cache_config: vLLM's plan of KV memory.
        memory: the KV memory.
        version: vLLM's version.
        processor: capabilities of this machine's CPU; used if vLLM computes on the CPU.
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    dtype = _kv_dtype(spec.dtype)
    if dtype is None:
        return WorkerFacts(None, f"KV of the type {spec.dtype}")
    try:
        layout = BlockLayout(
            layers=len(memory.layer_names),
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            dtype=dtype,
            block_tokens=spec.block_size,
            order=order_name(config, memory, version=version, processor=processor),
        )
    except ValueError as error:
        return WorkerFacts(None, str(error))
    if layout.layer_bytes != memory.layer_bytes:
        return WorkerFacts(
            None,
            f"a layer of a block has {memory.layer_bytes} bytes, not {layout.layer_bytes}: keys "
            "and values lie in a way that is not understood",
        )
    return WorkerFacts(layout)


def order_name(config: Any, memory: KvMemory, *, version: str, processor: str) -> str:
    """Return the name of a layer's byte order: dimensions, release and attention backend.

    Backends pack keys and values differently (on a CPU also by instruction set), and may change the
    packing with any release. A name over the length limit ends with a digest of the full name.
    """
    context = config.compilation_config.static_forward_context
    layers = [context[name] for name in memory.layer_names if name in context]
    backends = {_backend(layer) for layer in layers}
    isas = {str(getattr(layer, "isa", "") or "") for layer in layers}
    release = ".".join(version.split(".")[:2])
    packed = sorted(isas - {""})
    if packed:
        packed.append(processor)
    parts = ["vllm", release, memory.order, *sorted(backends), *packed]
    name = "-".join(parts).lower()
    if len(name) <= limits.MAX_LAYOUT_ORDER_CHARS:
        return name
    digest = blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{name[: limits.MAX_LAYOUT_ORDER_CHARS - len(digest) - 1]}-{digest}"


def engine_identity(
    config: Any, layout: BlockLayout | None, *, version: str, rank: int, revision: str | None
) -> EngineIdentity:
    """Describe an engine: model, and one rank's part of a block."""
    model = config.model_config
    return EngineIdentity(
        engine="vllm",
        version=version,
        model=model.model,
        revision=revision_of(model.model, told=revision or model.revision),
        layout=layout,
        ranks=config.parallel_config.tensor_parallel_size,
        rank=rank,
        facts=(*kv_facts(model), *_computed_in(model, layout)),
        architecture=next(iter(_architectures(model)), ""),
        context_tokens=model.max_model_len,
    )


def kv_facts(model: Any) -> tuple[tuple[str, str], ...]:
    """Return the settings that change the KV of equal weights, by name; often empty.

    Args:
        model: vLLM's configuration of the model.
    """
    facts = {
        "weights quantised": model.quantization,
        "quantisation": getattr(model, "quantization_config", None),
        "overrides": model.hf_overrides,
        "classes": getattr(model, "model_class_overrides", None),
    }
    elsewhere = getattr(model, "hf_config_path", None)
    if elsewhere and elsewhere != model.model:  # The folder's digest does not cover this file.
        facts["configuration"] = elsewhere
    config = getattr(model, "hf_config", None)
    rope = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    if "longrope" in str(rope):  # vLLM rotates keys by other angles if longer prompts are allowed.
        facts["longest prompt"] = model.max_model_len
    return tuple((name, str(value)) for name, value in facts.items() if value)


def _computed_in(model: Any, layout: BlockLayout | None) -> tuple[tuple[str, str], ...]:
    """Return the dtype of KV computation, if KV is stored in another one (``kv_cache_dtype``)."""
    dtype = _kv_dtype(getattr(model, "dtype", None))
    if layout is None or dtype is None or dtype == layout.dtype:
        return ()
    return (("computed in", str(dtype)),)


def same_layout(facts: Iterable[WorkerFacts]) -> WorkerFacts:
    """Return the common facts of all workers, or the reason of the first difference."""
    seen = list(facts)
    for fact in seen:
        if fact.layout is None:
            return fact
    if len({fact.layout for fact in seen}) != 1:
        return WorkerFacts(None, "workers have KV of different layouts")
    return seen[0]


def _kv_dtype(dtype: Any) -> KvDtype | None:
    try:
        return KvDtype(str(dtype).removeprefix("torch."))
    except ValueError:
        return None


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else type(layer).__name__


def _layers(config: Any) -> int:
    return int(config.model_config.get_num_layers(config.parallel_config))


def _architectures(model: Any) -> list[str]:
    return list(getattr(model.hf_config, "architectures", None) or [])

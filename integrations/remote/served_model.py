"""The engine's model as the cluster sees it: a ModelInfo from the engine's reports and the folder.

Called by the keeper before each life of the node, in a thread because files are read. The layout of
the engine's blocks is derived from the model's config.json and the engine's answers, because the
engine's memory can't be seen from here. Code inside an engine reads the layout off the engine's
tensors, and both results must be equal. Where an engine with TierKV's classes is in the cluster
(NodeRole.ENGINE), the node takes over the engine's report instead of this guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tierkv.integrations.identity import FACTS_MARK
from tierkv.integrations.remote.door import EngineDoor, EngineKind, EngineLook, RemoteConfig
from tierkv.integrations.remote.text_tokens import END, text_folder
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo
from tierkv.storage.modelfiles.model_folder import ModelFolder, inspect_model_folder

_EMBED_REFUSAL: Final = "the engine generates text and does not return hidden states"
_GRAMMAR_REFUSAL: Final = "TierKV holds answers of another engine to JSON schemas only"
_BLEND_REFUSAL: Final = "another engine computes it"
_UNTOLD_CONTEXT: Final = 1 << 17
"""Tokens of context if the engine reports no limit; the engine itself refuses longer prompts."""

_BYTES_PER_TOKEN: Final = 16
"""Assumed bytes per token, an upper estimate: the front counts bytes, the engine decides."""

VLLM_ORDER: Final = "vllm-untold"
"""For a vLLM without TierKV's classes: the order depends on release, backend and CPU."""

_OPAQUE_TOKENS: Final = 64
_ORDERS: Final = {EngineKind.VLLM: VLLM_ORDER, EngineKind.SGLANG: "sglang-untold"}


def served_model(
    config: RemoteConfig, door: EngineDoor, look: EngineLook, seen: Iterable[ModelInfo] = ()
) -> ModelInfo:
    """Describe the model of an engine.

    Args:
        config: the node's settings.
        door: the engine.
        look: the engine's description of itself.
        seen: models of engines that keep KV in the pool. A model with the same weights has the
            engine's true layout.

    Raises:
        ConfigError: the folder of the model's tokenizer is not known here.
        ModelFolderError: the folder can't be used.
    """
    if door.speaks_text:
        return _text_model(config, door, look)
    folder = inspect_model_folder(_folder(config, look))
    revision, layout = _kv_identity(config, look, folder, seen)
    context = look.context_tokens or folder.context_tokens or _UNTOLD_CONTEXT
    return ModelInfo(
        name=_name(config, look),
        folder=str(folder.path),
        revision=revision,
        layout=layout,
        context_tokens=min(context, limits.MAX_CONTEXT_TOKENS),
        eos_token_ids=folder.eos_token_ids,
        architecture=_architecture(folder.config),
        parameters=0,
        blend_refusal=_BLEND_REFUSAL,
        score_refusal=door.score_refusal,
        embed_refusal=_EMBED_REFUSAL,
        grammar_refusal=_GRAMMAR_REFUSAL,
        sampling_fields=door.sampling_fields,
    )


def _text_model(config: RemoteConfig, door: EngineDoor, look: EngineLook) -> ModelInfo:
    revision = blake2b(look.served.encode(), digest_size=16, person=b"tierkv-textmodel")
    context = _BYTES_PER_TOKEN * (look.context_tokens or _UNTOLD_CONTEXT)
    return ModelInfo(
        name=_name(config, look),
        folder=str(text_folder()),
        revision=revision.hexdigest(),
        layout=opaque_layout(config.kind),
        context_tokens=min(context, limits.MAX_CONTEXT_TOKENS),
        eos_token_ids=(END,),
        architecture="",
        parameters=0,
        blend_refusal=_BLEND_REFUSAL,
        score_refusal=door.score_refusal,
        embed_refusal=_EMBED_REFUSAL,
        grammar_refusal=_GRAMMAR_REFUSAL,
        sampling_fields=door.sampling_fields,
    )


def _folder(config: RemoteConfig, look: EngineLook) -> Path:
    folder = Path(config.model_folder or look.folder).expanduser()
    if config.model_folder and not folder.is_dir():
        raise ConfigError(
            f"the model folder {config.model_folder!r} does not exist on this machine",
            hint="Give the files of the engine's model with --model FOLDER.",
        )
    if not folder.is_dir():
        raise ConfigError(
            f"the engine serves {look.served!r} from {look.folder or 'an unknown folder'!r}, which "
            "does not exist on this machine",
            hint="Give the model's files, at least tokenizer and weights, with --model FOLDER.",
        )
    return folder


def _kv_identity(
    config: RemoteConfig, look: EngineLook, folder: ModelFolder, seen: Iterable[ModelInfo]
) -> tuple[str, BlockLayout]:
    """Return revision and layout: from an engine in ``seen`` with equal weights, else guessed."""
    for model in seen:
        weights = model.revision.partition(FACTS_MARK)[0]
        if weights == folder.revision and look.block_tokens in (0, model.layout.block_tokens):
            return model.revision, model.layout
    guessed = config_layout(
        folder.config,
        block_tokens=look.block_tokens or opaque_layout(config.kind).block_tokens,
        dtype=config.dtype or look.dtype,
        order=_ORDERS[config.kind],
    )
    return folder.revision, guessed or opaque_layout(config.kind, look.block_tokens)


def _name(config: RemoteConfig, look: EngineLook) -> str:
    """Return a model name that the cluster allows: a path becomes its last part."""
    name = config.model_name or look.served
    if re.fullmatch(limits.NAME_PATTERN, name):
        return name
    cleaned = re.sub(r"[^A-Za-z0-9_.:\-]", "_", Path(name).name)[: limits.MAX_NAME_CHARS]
    return cleaned if re.fullmatch(limits.NAME_PATTERN, cleaned) else f"model-{cleaned}"[:128]


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def config_layout(
    config: Mapping[str, Any], *, block_tokens: int, dtype: str, order: str
) -> BlockLayout | None:
    """Derive a layout from a model's configuration; None if the KV is not of the plain kind.

    Args:
        config: config.json; for a multimodal model the text part is used.
        block_tokens: tokens of the engine's blocks.
        dtype: element type of the engine's KV; empty or ``auto``: the model's own.
        order: name of the byte order within a layer.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    if config.get("kv_lora_rank"):  # The KV is one compressed vector per token.
        return None
    name = dtype if dtype not in ("", "auto") else config.get("dtype") or config.get("torch_dtype")
    try:
        heads = int(config["num_attention_heads"])
        return BlockLayout(
            layers=int(config["num_hidden_layers"]),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            dtype=KvDtype(str(name)),
            block_tokens=block_tokens,
            order=order,
        )
    except (KeyError, TypeError, ValueError):
        return None


def opaque_layout(kind: str, block_tokens: int = 0) -> BlockLayout:
    """Return a layout for an engine with unshared KV: only ``block_tokens`` has a meaning."""
    return BlockLayout(
        layers=1,
        kv_heads=1,
        head_dim=1,
        dtype=KvDtype.FLOAT32,
        block_tokens=block_tokens or _OPAQUE_TOKENS,
        order=f"{kind}-opaque",
    )

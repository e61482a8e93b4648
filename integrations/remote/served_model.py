"""The engine's model as the cluster sees it: a ModelInfo from the engine's reports and the folder.

Called by the keeper before each life of the node, in a thread because files are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from tierkv.integrations.identity import FACTS_MARK
from tierkv.integrations.layouts import VLLM_ORDER, config_layout, opaque_layout
from tierkv.integrations.remote.config import EngineKind, RemoteConfig
from tierkv.integrations.remote.door import EngineDoor, EngineLook
from tierkv.integrations.remote.text_tokens import END, text_folder
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import ModelInfo
from tierkv.storage.modelfiles.model_folder import ModelFolder, inspect_model_folder

_EMBED_REFUSAL: Final = "the engine generates text and gives no hidden states"
_BLEND_REFUSAL: Final = "another engine computes it"
_UNTOLD_CONTEXT: Final = 1 << 17
"""Tokens of context if the engine reports no limit; the engine itself refuses longer prompts."""

_BYTES_PER_TOKEN: Final = 16
"""Assumed bytes per token, an upper estimate: the front counts bytes, the engine decides."""

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
    )


def _folder(config: RemoteConfig, look: EngineLook) -> Path:
    folder = Path(config.model_folder or look.folder).expanduser()
    if config.model_folder and not folder.is_dir():
        raise ConfigError(
            f"the folder of the model, {config.model_folder!r}, is no folder here",
            hint="give the files of what the engine serves: --model FOLDER",
        )
    if not folder.is_dir():
        raise ConfigError(
            f"the engine serves {look.served!r} from {look.folder or 'somewhere'!r}, which is no "
            "folder here",
            hint="give the model's files, at least its tokenizer and weights: --model FOLDER",
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

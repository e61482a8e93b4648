"""Whose KV it is: what two engines must have in common to share blocks.

Made by what runs in the engine, from the engine's own configuration. Equal identities have equal
fingerprints, which key the names of blocks; different ones never meet, and ``differences`` says for
people in what. Pure but for reading the model's folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ModelFolderError
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import ModelInfo
from tierkv.storage.modelfiles.model_folder import inspect_model_folder

FACTS_MARK: Final = "+"
"""Stands in a node's revision between that of the weights and a digest of the facts."""

_COMMIT: Final = re.compile("[0-9a-f]{40}")
_FINGERPRINT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An engine's model as far as its KV depends on it.

    Attributes:
        engine: ``vllm`` or ``sglang``.
        version: of the engine; told, but no reason not to share: the order's name has its own.
        model: what the engine calls it, a folder or a name.
        revision: which weights (``revision_of``); empty where that can't be told: then the pool is
            not used at all.
        layout: shape and byte order of one rank's blocks; None where a block is only bytes and
            ``facts`` say how many.
        ranks: processes that divide each block between them (tensor parallelism).
        rank: this one of them; told, but in no fingerprint (integrations/keys.py names parts).
        facts: whatever else the bytes or names depend on, by name: how weights are quantised, the
            dtype of a compressed KV cache, the seed of the engine's own hashes.
        architecture: such as ``LlamaForCausalLM``; told only.
        context_tokens: longest prompt plus answer; told only.
    """

    engine: str
    version: str
    model: str
    revision: str
    layout: BlockLayout | None
    ranks: int = 1
    rank: int = 0
    facts: tuple[tuple[str, str], ...] = ()
    architecture: str = ""
    context_tokens: int = 0

    @property
    def label(self) -> str:
        """The model's name as the cluster's rules for names allow it."""
        name = Path(self.model).name if Path(self.model).is_absolute() else self.model
        cleaned = re.sub(r"[^A-Za-z0-9_.:\-/]", "_", name)[: limits.MAX_NAME_CHARS]
        return cleaned if re.match(r"[A-Za-z0-9_]", cleaned) else f"_{cleaned[1:]}"

    def fingerprint(self) -> bytes:
        """Return 16 bytes that differ whenever stored bytes or their names would.

        Of an undivided block of which nothing but its layout matters it is the layout's own, as the
        front and compute nodes have it.
        """
        if self.layout is not None and self.ranks == 1 and not self.facts:
            return self.layout.fingerprint()
        mac = blake2b(digest_size=_FINGERPRINT_BYTES, person=b"tierkv-engine-1")
        layout = b"" if self.layout is None else self.layout.fingerprint()
        parts = [layout, str(self.ranks).encode()]
        for name, value in sorted(self.facts):
            parts += [_encode(name), _encode(value)]
        for part in parts:
            mac.update(len(part).to_bytes(4, "little") + part)
        return mac.digest()

    def model_info(self) -> ModelInfo | None:
        """Describe the model as a node of the cluster does; None for opaque blocks.

        Facts become part of the revision, so that tenants' salts (integrations/salts.py) made for
        other facts are not this engine's.
        """
        if self.layout is None or not self.revision:
            return None
        context = min(max(self.context_tokens, 1), limits.MAX_CONTEXT_TOKENS)
        return ModelInfo(
            name=self.label,
            folder=self.model if Path(self.model).is_absolute() else "",
            revision=self.revision + self._facts_suffix(),
            layout=self.layout,
            context_tokens=context,
            eos_token_ids=(),
            architecture=self.architecture,
            parameters=0,
        )

    def _facts_suffix(self) -> str:
        if not self.facts:
            return ""
        digest = blake2b(digest_size=4, person=b"tierkv-facts-1")
        for text in (text for fact in sorted(self.facts) for text in fact):
            part = _encode(text)
            digest.update(len(part).to_bytes(4, "little") + part)
        return f"{FACTS_MARK}{digest.hexdigest()}"

    def fields(self) -> dict[str, str]:
        """Return everything that must be equal, by name, for people."""
        found = {"revision": self.revision, "tensor parallel": str(self.ranks)}
        if self.layout is not None:
            found |= layout_fields(self.layout)
        return found | dict(self.facts)


def layout_fields(layout: BlockLayout) -> dict[str, str]:
    """Return what a layout consists of, by the names people know."""
    return {
        "block size": str(layout.block_tokens),
        "layers": str(layout.layers),
        "KV heads": str(layout.kv_heads),
        "head size": str(layout.head_dim),
        "dtype": str(layout.dtype),
        "byte order": layout.order or "TierKV's own",
        "codec": str(layout.codec),
    }


def differences(here: dict[str, str], there: dict[str, str]) -> str:
    """Say in what two identities differ, field by field; empty where they do not."""
    names = dict.fromkeys([*here, *there])
    return ", ".join(
        f"{name} {here.get(name, 'unknown')} here, {there.get(name, 'unknown')} there"
        for name in names
        if here.get(name) != there.get(name)
    )


def revision_of(model: str, *, told: str | None = None) -> str:
    """Name the weights of a model: the same on every machine and for every engine.

    Args:
        model: a folder, or a name at a hub whose snapshot this machine has.
        told: the commit that the engine was told to take, or a branch.

    Returns:
        The digest of the folder's configuration and weights, as compute nodes have it; else the
        name with a commit; else nothing, because a branch says nothing about weights.
    """
    folder = Path(model) if Path(model).is_dir() else _snapshot(model, told)
    if folder is not None:
        try:
            return inspect_model_folder(folder).revision
        except ModelFolderError:
            # Weights in another format: only a commit can name them.
            told = told or folder.resolve().name
    return f"{model}@{told}" if told and _COMMIT.fullmatch(told) else ""


def _snapshot(model: str, told: str | None) -> Path | None:
    """Return where the hub's library keeps a model on this machine; it downloads nothing."""
    try:
        # The engine's own dependency; TierKV does not have it.
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model, revision=told, local_files_only=True))
    except (OSError, ValueError):
        return None


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

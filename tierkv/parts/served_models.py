"""The served models: folders and names, the default model, configuration and policy of their nodes.

Called wherever compute nodes are planned or composed. The small model shipped with TierKV is the
default, so everything works without a download. This module loads no model and imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tierkv import compute
from tierkv.compute.config import ComputeConfig, LoadPolicy
from tierkv.config import LoadedConfig
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import ReusePolicy
from tierkv.settings import ComputeSettings, NamespaceSettings

SHIPPED_NAME = "tierkv-demo"


def model_folder(settings: ComputeSettings) -> Path:
    """Return the configured model folder, or the shipped folder."""
    if _is_shipped(settings.model):
        return Path(compute.__file__).parent / "demo_model" / "weights"
    return Path(settings.model).expanduser()


def model_name(settings: ComputeSettings) -> str:
    """Return the model's name in requests."""
    if settings.model_name:
        return settings.model_name
    shipped = _is_shipped(settings.model)
    return SHIPPED_NAME if shipped else model_folder(settings).resolve().name


def split_by_model(settings: ComputeSettings) -> list[ComputeSettings]:
    """Return the settings of each served model's nodes; the first is ``compute.model``'s.

    Raises:
        ConfigError: two models would have one name.
    """
    alone = settings.model_copy(update={"more_models": ()})
    served = [alone]
    served += [
        alone.model_copy(update={"model": folder, "model_name": ""})
        for folder in settings.more_models
    ]
    names = [model_name(each) for each in served]
    for name, each in zip(names, served, strict=True):
        if names.count(name) > 1:
            raise ConfigError(
                f"two models have the name {name!r}; one of them is {model_folder(each)}",
                hint="Rename a folder, or name the first model with --set compute.model_name=NAME.",
            )
    return served


def with_default_model(config: LoadedConfig) -> LoadedConfig:
    """Make the first of several models the default for calls that name no model."""
    settings = config.settings
    if settings.front.default_model or not settings.compute.more_models:
        return config
    front = settings.front.model_copy(update={"default_model": model_name(settings.compute)})
    return replace(config, settings=settings.model_copy(update={"front": front}))


def _is_shipped(model: str) -> bool:
    """True also for the shipped model's name, unless a folder here has the same name."""
    return not model or (model == SHIPPED_NAME and not Path(model).exists())


def compute_config(
    settings: ComputeSettings, *, node_id: NodeId, host: HostId, role: NodeRole
) -> ComputeConfig:
    """Convert settings to the room's configuration."""
    return ComputeConfig(
        node_id=node_id,
        host=host,
        role=role,
        model_folder=str(model_folder(settings)),
        model_name=model_name(settings),
        dtype=settings.dtype,
        device=settings.device,
        l1_bytes=int(settings.l1_capacity),
        block_tokens=settings.block_tokens,
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        eviction_policy=settings.eviction_policy,
        load_policy=LoadPolicy(settings.load_policy),
        kv_codec=settings.kv_codec,
        kv_calibration=settings.kv_calibration or None,
        ttft_budget_s=settings.ttft_budget_s,
        publish=settings.publish,
        threads=settings.threads,
        speculative_tokens=settings.speculative_tokens,
    )


def namespace_policy(settings: NamespaceSettings) -> ReusePolicy:
    """Return the settings as the policy that the meta server grants."""
    return ReusePolicy(
        kv_codec=None if settings.kv_codec == "default" else KvCodec(settings.kv_codec),
        blend=settings.blend,
        recompute_ratio=settings.recompute_ratio,
        selector=settings.selector,
        gradual=settings.gradual,
    )

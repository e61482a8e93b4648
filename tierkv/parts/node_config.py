"""Conversion of settings to the compute room's configuration; imports no torch."""

from __future__ import annotations

from tierkv.compute.config import ComputeConfig, LoadPolicy
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.parts.shipped_model import model_folder, model_name
from tierkv.settings import ComputeSettings


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

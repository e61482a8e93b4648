"""Whether a call's chunks are blended, and how: the namespace allows, the call may ask for less.

Pure; called by dbfront/generation/generation.py for each call. A refusal is never an error: the
answer is then exact, and only a call that asked for blending is told why.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.dbfront.contracts import TextCall
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import Blend
from tierkv.metaserver.client import NamespaceGrant


def blend_of(
    call: TextCall, chunks: Sequence[tuple[int, int]], grant: NamespaceGrant, model: ModelInfo
) -> Blend | None:
    """Return the leave to blend that goes with a request; None keeps its answer exact."""
    if not chunks or call.blend is False or not call.use_cache or _refusal(grant, model):
        return None
    policy = grant.policy
    return Blend(
        chunks=tuple(chunks),
        recompute_ratio=max(policy.recompute_ratio, call.recompute_ratio or 0.0),
        selector=call.selector or policy.selector,
        gradual=policy.gradual,
    )


def blend_refusal(call: TextCall, grant: NamespaceGrant, model: ModelInfo) -> str:
    """Say why a call that asked for blending is answered exactly; empty when it did not ask."""
    asked = call.blend or call.recompute_ratio is not None or call.selector is not None
    if call.blend is False or not call.use_cache or not asked:
        return ""
    return _refusal(grant, model)


def _refusal(grant: NamespaceGrant, model: ModelInfo) -> str:
    if not grant.cache_enabled:
        return f"namespace {grant.domain} has its cache off"
    if not grant.policy.blend:
        return f"namespace {grant.domain} does not allow blending"
    if model.blend_refusal:
        return f"model {model.name} is not blended: {model.blend_refusal}"
    return ""

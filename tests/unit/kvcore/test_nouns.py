"""The small nouns: requests, locations, nodes, clocks, ids, event sinks."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from tierkv.kvcore import limits
from tierkv.kvcore.block import Location, Replica, Tier, tier_seen_from
from tierkv.kvcore.ids import (
    BlockKey,
    HostId,
    Incarnation,
    NamespaceKey,
    NodeId,
    RequestId,
    new_request_id,
)
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import Blend, GenerateRequest, HitTokens, ReuseHint, SamplingParams


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": limits.MAX_COMPLETION_TOKENS + 1}, "max_tokens"),
    ],
)
def test_sampling_out_of_range_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SamplingParams(**fields)


def test_sampling_bounds_are_inclusive() -> None:
    for temperature in (0.0, 2.0):
        assert SamplingParams(temperature=temperature, top_p=1.0).temperature == temperature
    assert SamplingParams(max_tokens=limits.MAX_COMPLETION_TOKENS).top_p == 1.0


def test_hit_tokens_add_up_per_tier() -> None:
    total = HitTokens(l1=1, l2=2) + HitTokens(l2=3, l3=4, l4=5)
    assert total == HitTokens(1, 5, 4, 5)
    assert total.total == 15


def replica(tier: Tier, host: str = "here") -> Replica:
    node = NodeId("n")
    location = None if tier is Tier.L1 else Location(node, Incarnation(1), 0, 0, 1, 64)
    return Replica(BlockKey(bytes(16)), node, HostId(host), tier, location)


@pytest.mark.parametrize(
    ("tier", "host", "seen"),
    [
        (Tier.L1, "here", Tier.L1),
        (Tier.L2, "here", Tier.L2),
        (Tier.L2, "elsewhere", Tier.L3),
        (Tier.L4, "here", Tier.L4),
        (Tier.L4, "elsewhere", Tier.L4),
    ],
)
def test_pooled_memory_is_l2_at_home_and_l3_elsewhere(tier: Tier, host: str, seen: Tier) -> None:
    assert tier_seen_from(replica(tier, host), HostId("here")) is seen


def test_values_can_not_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        replica(Tier.L2).tier = Tier.L1  # type: ignore[misc]


def test_roles_say_who_prefills_and_who_decodes() -> None:
    assert [role for role in NodeRole if role.prefills] == [NodeRole.PREFILL, NodeRole.COMPUTE]
    assert [role for role in NodeRole if role.decodes] == [NodeRole.DECODE, NodeRole.COMPUTE]


def test_request_ids_are_fresh_and_named() -> None:
    ids = {new_request_id("chat") for _ in range(100)}
    assert len(ids) == 100
    assert all(request_id.startswith("chat-") for request_id in ids)


def test_a_request_with_another_hint_is_else_the_same() -> None:
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        token_ids=(1, 2, 3, 4),
        namespace_key=NamespaceKey(b"k" * 32),
        tenant="t",
        sampling=SamplingParams(max_tokens=3),
        session_id="s",
        priority=-2,
        use_cache=False,
        handoff=True,
        resumed_tokens=1,
        blend=Blend(((0, 2),)),
        kv_codec=KvCodec.NONE,
        prepared_for="p",
        hint=ReuseHint(next_turn=True),
        guide="{}",
        score_token_ids=(7,),
        embed=True,
    )
    plain = GenerateRequest(RequestId("q"), "n", (1,), NamespaceKey(b"l" * 32))
    alike = [f.name for f in fields(request) if getattr(request, f.name) == getattr(plain, f.name)]
    assert alike == []  # A field that is forgotten would show.
    hint = ReuseHint(pending_calls=3, pending_tokens=2)
    assert request.with_hint(hint) == replace(request, hint=hint)

"""KV events as vLLM and SGLang make them, for tests: factories, and a cache that publishes them.

The cache names blocks like vLLM, by a chain of hashes over tokens and salt, and drops what it likes
to; what it publishes it also keeps for replay, up to a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from tierkv.integrations.events.messages import EngineBatch, decode_batch
from tierkv.integrations.keys import TenantSalt, identity_digest
from tierkv.kvcore.block import Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored
from tierkv.kvcore.ids import BlockKey, NamespaceKey
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo

WIDTH = 4
MODEL = ModelInfo(
    name="m",
    folder="",
    revision="r",
    layout=BlockLayout(2, 2, 16, KvDtype.FLOAT32, WIDTH, order="vllm-hnd-1"),
    context_tokens=4096,
    eos_token_ids=(),
    architecture="x",
    parameters=1,
)


def namespace(tenant: int = 0) -> NamespaceKey:
    """Return a tenant's key."""
    return NamespaceKey(bytes([tenant + 1]) * 32)


def salt(tenant: int = 0) -> str:
    """Return the salt the front sends for a tenant."""
    return str(TenantSalt(namespace(tenant), identity_digest(MODEL.identity)))


def engine_names(tokens: Sequence[int], salted: str | None) -> list[bytes]:
    """Name a prompt's full blocks as an engine does."""
    names, parent = [], (salted or "").encode("utf-8", "surrogatepass")
    for start in range(0, len(tokens) - WIDTH + 1, WIDTH):
        parent = sha256(parent + repr(list(tokens[start : start + WIDTH])).encode()).digest()
        names.append(parent)
    return names


def stored(
    tokens: Sequence[int], salted: str | None, *, first: int = 0, **fields: Any
) -> dict[str, Any]:
    """Return vLLM's event that a prompt's blocks from ``first`` on were stored."""
    names = engine_names(tokens, salted)
    extra = [[salted] if salted and index == 0 else None for index in range(len(names))]
    return {
        "type": "BlockStored",
        "block_hashes": names[first:],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": list(tokens[first * WIDTH : len(names) * WIDTH]),
        "block_size": WIDTH,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra[first:],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields


def removed(*names: bytes, **fields: Any) -> dict[str, Any]:
    """Return vLLM's event that blocks were dropped."""
    event = {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0}
    return event | fields


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: dict[str, Any], time_s: float = 0.0) -> bytes:
    """Pack a batch as the engines do."""
    return msgspec.msgpack.encode([time_s, list(events), 0])


def batch(seq: int, *events: dict[str, Any], time_s: float | None = None) -> EngineBatch:
    """Return a batch as it is after decoding."""
    return decode_batch(seq, payload(*events, time_s=float(seq) if time_s is None else time_s))


@dataclass
class Claimed:
    """A directory's view of one node: a reporter that enters what it is told."""

    keys: set[BlockKey] = field(default_factory=set)

    def report(self, events: Sequence[BlockEvent]) -> None:
        """Enter news; each must be news."""
        for event in events:
            if isinstance(event, BlockStored):
                assert event.tier is Tier.L1 and event.location is None
                assert event.key not in self.keys
                self.keys.add(event.key)
            else:
                assert isinstance(event, BlockRemoved)
                self.keys.remove(event.key)


async def until(condition: Callable[[], bool], what: str, *, deadline_s: float = 30.0) -> None:
    """Let the event loop go on until something is so; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.005)

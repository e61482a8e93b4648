"""KV events of vLLM and SGLang as they come over ZeroMQ, decoded to values.

Both send batches ``[time, events, rank]`` in msgpack, each event a map with its kind under
``type``. Called by integrations/events/listener.py; fields nobody here needs are passed over, and
what can't be read is said to be unreadable, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Any, Final

import msgspec

from tierkv.kvcore import limits

EngineHash = int | bytes
"""An engine's own name of a block: 64 bits, or the whole digest."""

_DIGEST_BYTES: Final = 16


class EngineStored(msgspec.Struct, frozen=True, gc=False, tag="BlockStored"):
    """Blocks that an engine can reuse from now on, one behind the other.

    Attributes:
        block_hashes: their names.
        parent_block_hash: name of the block before the first; None at a prompt's beginning.
        token_ids: what they hold, msgpack; ``token_numbers`` reads it.
        block_size: tokens of each.
        extra_keys: vLLM: what else each block's name stands on, the salt with a prompt's first.
        cache_salt: SGLang: the request's salt.
        lora_id: adapter, by number.
        lora_name: adapter, by name.
        medium: ``GPU`` is the engine's own cache.
        group_idx: vLLM: which of a hybrid model's caches.
        kv_cache_spec_kind: vLLM: kind of attention of that cache.
        session_id: conversation, where the engine was told.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: int
    extra_keys: list[list[Any] | None] | None = None
    cache_salt: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class EngineRemoved(msgspec.Struct, frozen=True, gc=False, tag="BlockRemoved"):
    """Blocks that an engine dropped from one of its caches."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class EngineCleared(msgspec.Struct, frozen=True, gc=False, tag="AllBlocksCleared"):
    """An engine dropped everything it had cached."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The events of one step of an engine.

    Attributes:
        seq: its number, counting from 0 in each life of the engine.
        time_s: when the engine sent it, by the engine's clock.
        digest: of all its bytes; tells batches of different lives apart.
        events: oldest first.
        readable: False when something in it could not be read, so that news was lost.
    """

    seq: int
    time_s: float
    digest: bytes
    events: tuple[EngineEvent, ...]
    readable: bool = True


class _Envelope(msgspec.Struct, array_like=True, gc=False):
    """A batch before its events are looked at; a rank may follow."""

    ts: float
    events: list[msgspec.Raw]


_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The last of values nested too deep, of which any field may hold some."""

_envelopes: Final = msgspec.msgpack.Decoder(_Envelope)
_events: Final = msgspec.msgpack.Decoder(EngineStored | EngineRemoved | EngineCleared)
_numbers: Final = msgspec.msgpack.Decoder(list[int])


def decode_batch(seq: int, payload: bytes) -> EngineBatch:
    """Read a batch; one that can't be read, or has events that can't, says so."""
    digest = blake2b(payload, digest_size=_DIGEST_BYTES).digest()
    try:
        envelope = _envelopes.decode(payload)
    except _UNREADABLE:
        return EngineBatch(seq, 0.0, digest, (), readable=False)
    time_s = envelope.ts if isfinite(envelope.ts) else 0.0
    events: list[EngineEvent] = []
    for raw in envelope.events:
        try:
            events.append(_events.decode(raw))
        except _UNREADABLE:
            return EngineBatch(seq, time_s, digest, tuple(events), readable=False)
    return EngineBatch(seq, time_s, digest, tuple(events))


def token_numbers(event: EngineStored) -> list[int] | None:
    """Return the token ids of all its blocks; None unless there are as many as the blocks hold.

    Some events have others: pairs of tokens with speculative decoding, gaps in sliding windows.
    """
    try:
        tokens = _numbers.decode(event.token_ids)
    except _UNREADABLE:
        return None
    if len(tokens) != len(event.block_hashes) * event.block_size:
        return None
    if tokens and (min(tokens) < 0 or max(tokens) >= 1 << 32):
        return None
    return tokens if len(tokens) <= limits.MAX_CONTEXT_TOKENS else None

"""KV events of vLLM and SGLang, received over ZeroMQ and decoded to values.

Both engines send batches ``[time, events, rank]`` in msgpack. Each event is a map with the kind
under ``type``. Called by integrations/events/listener.py. Unused fields are skipped. Unreadable
content is marked as unreadable, never guessed.
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
    """Consecutive blocks, reusable by an engine from now on.

    Attributes:
        block_hashes: names of the blocks.
        parent_block_hash: name of the block before the first; None at a prompt's beginning.
        token_ids: tokens of the blocks as msgpack, for ``token_numbers``.
        block_size: tokens of each block.
        extra_keys: vLLM: further inputs of each block's name; a prompt's first block has the salt.
        cache_salt: SGLang: the request's salt.
        lora_id: adapter, by number.
        lora_name: adapter, by name.
        medium: ``GPU`` is the engine's own cache.
        group_idx: vLLM: number of the cache in a hybrid model.
        kv_cache_spec_kind: vLLM: kind of attention of the cache.
        session_id: conversation, if the engine was told.
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
    """Blocks dropped by an engine from one of the engine's caches."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class EngineCleared(msgspec.Struct, frozen=True, gc=False, tag="AllBlocksCleared"):
    """An engine dropped its whole cache."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The events of one step of an engine.

    Attributes:
        seq: number of the batch, counting from 0 in each life of the engine.
        time_s: send time, by the engine's clock.
        digest: hash of all bytes of the batch; distinguishes batches of different lives.
        events: oldest first.
        readable: False if any part could not be read, so news was lost.
    """

    seq: int
    time_s: float
    digest: bytes
    events: tuple[EngineEvent, ...]
    readable: bool = True


class _Envelope(msgspec.Struct, array_like=True, gc=False):
    """A batch with undecoded events; a rank may follow."""

    ts: float
    events: list[msgspec.Raw]


_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""RecursionError: any field may hold values that are nested too deeply."""

_envelopes: Final = msgspec.msgpack.Decoder(_Envelope)
_events: Final = msgspec.msgpack.Decoder(EngineStored | EngineRemoved | EngineCleared)
_numbers: Final = msgspec.msgpack.Decoder(list[int])


def decode_batch(seq: int, payload: bytes) -> EngineBatch:
    """Decode a batch. ``readable`` is False if the batch or an event can't be decoded."""
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
    """Return the token ids of all blocks; None unless their number fits the blocks.

    Some events have other tokens: pairs with speculative decoding, gaps in sliding windows.
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

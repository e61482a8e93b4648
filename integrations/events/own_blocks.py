"""Blocks in a foreign engine's own cache, under TierKV's names: a pure core.

The engine names blocks by its own hashes. The engine's events tell the tokens of each block and the
name of the previous block. Together with the tenant's key, sent by the front as the request's salt,
the tokens give the name for the scheduler's look-up in the directory. Blocks without a TierKV salt,
of adapters, with images or of another size have no TierKV name and are skipped, counted by reason.
Used by integrations/events/feed.py alone. A wrong claim costs time, never a token.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.integrations.events.messages import (
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    token_numbers,
)
from tierkv.integrations.keys import identity_digest, parse_salt
from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Owner, Tier, next_block_key
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored
from tierkv.kvcore.ids import BlockKey, NamespaceKey
from tierkv.kvcore.node import ModelInfo

_OWN_MEDIA: Final = frozenset({None, "GPU"})
"""Media of the engine's own cache; vLLM says GPU on a CPU too."""

_WHOLE_PREFIX: Final = frozenset(
    {None, "full_attention", "mla_attention", "sink_full_attention", "unknown"}
)
"""Kinds of cache that keep a prompt from its beginning; a window's blocks prove no prefix."""

_TENANTS: Final = 4_096


@dataclass(slots=True)
class _NamedBlock:
    """A block of the engine with a known TierKV name.

    Attributes:
        namespace: the block's namespace; following blocks inherit the namespace.
        key: the TierKV name.
        places: number of the engine's caches that hold the block; with 0 the block is in ``_idle``.
    """

    namespace: NamespaceKey
    key: BlockKey
    places: int = 0


@dataclass(slots=True)
class _Claim:
    """A block reported to the directory, and the number of caches that hold the block."""

    stored: BlockStored
    places: int = 0


class OwnBlocks:
    """Blocks of one engine, by rank. Mutated only through methods, which return the news.

    A rank is one cache: vLLM has one for each data-parallel rank. A block is claimed while at least
    one reachable rank holds the block. An engine may have two copies of a block and drop one copy.
    The block then counts as gone, which costs less than a claim for a missing block.

    Attributes:
        skipped: skipped blocks, by reason.
        _named: engine's name to TierKV's; also of recently dropped blocks, because other blocks may
            follow.
        _idle: names of ``_named`` in no cache, oldest first; bounded.
        _caches: blocks of each rank, by the engine's cache group and name.
        _silent: unreachable ranks, whose blocks are not claimed.
        _claims: blocks to report to the directory.
    """

    def __init__(self, model: ModelInfo, *, max_blocks: int = limits.MAX_ENGINE_BLOCKS) -> None:
        """Start empty.

        Args:
            model: the engine's model; its layout has the engine's block size.
            max_blocks: most blocks in all caches together.
        """
        self.skipped: Counter[str] = Counter()
        self._model = model
        self._identity = identity_digest(model.identity)
        self._max_blocks = max_blocks
        self._held = 0
        self._named: dict[EngineHash, _NamedBlock] = {}
        self._idle: OrderedDict[EngineHash, None] = OrderedDict()
        self._caches: dict[int, dict[tuple[int, EngineHash], BlockStored]] = {}
        self._silent: set[int] = set()
        self._claims: dict[BlockKey, _Claim] = {}
        self._tenants: OrderedDict[NamespaceKey, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._claims)

    def learn_tenant(self, namespace: NamespaceKey, tenant: str) -> None:
        """Record a key's tenant, for the views; used for blocks stored from now on."""
        self._tenants[namespace] = tenant
        self._tenants.move_to_end(namespace)
        if len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)

    def apply(self, rank: int, events: Iterable[EngineEvent]) -> list[BlockEvent]:
        """Apply the events of one rank's cache, in order."""
        news: list[BlockEvent] = []
        for event in events:
            if isinstance(event, EngineStored):
                news += self._store(rank, event)
            elif isinstance(event, EngineRemoved):
                news += self._remove(rank, event)
            elif isinstance(event, EngineCleared):
                news += self.clear(rank)
        return news

    def clear(self, rank: int) -> list[BlockEvent]:
        """Forget the blocks of a rank; later events are believed. O(blocks of the rank)."""
        news = self.hide(rank)
        self._silent.discard(rank)
        for _, name in self._caches.pop(rank, {}):
            self._let_go(name)
        self._forget_idle()
        return news

    def hide(self, rank: int) -> list[BlockEvent]:
        """Withdraw the claims of an unreachable rank, until ``show`` or ``clear``."""
        if rank in self._silent:
            return []
        self._silent.add(rank)
        held = self._caches.get(rank, {})
        return [news for stored in held.values() for news in self._unclaim(stored.key)]

    def show(self, rank: int) -> list[BlockEvent]:
        """Claim the blocks of a rank again: a replay proved the known life."""
        if rank not in self._silent:
            return []
        self._silent.discard(rank)
        held = self._caches.get(rank, {})
        return [news for stored in held.values() for news in self._claim(stored)]

    def inventory(self) -> tuple[BlockStored, ...]:
        """Return all claimed blocks."""
        return tuple([claim.stored for claim in self._claims.values()])

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of claimed blocks at the beginning of a chain."""
        for index, key in enumerate(keys):
            if key not in self._claims:
                return index
        return len(keys)

    def check_invariants(self) -> None:
        """Assert that names, caches and claims agree. O(all)."""
        places: Counter[EngineHash] = Counter()
        claims: Counter[BlockKey] = Counter()
        for rank, cache in self._caches.items():
            places.update([name for _, name in cache])
            if rank not in self._silent:
                claims.update([stored.key for stored in cache.values()])
        assert self._held == places.total() <= self._max_blocks
        assert {name: n.places for name, n in self._named.items() if n.places} == places
        assert set(self._idle) == {name for name, n in self._named.items() if not n.places}
        assert {key: claim.places for key, claim in self._claims.items()} == claims
        assert len(self._idle) <= limits.MAX_ENGINE_NAMES

    def _store(self, rank: int, event: EngineStored) -> list[BlockEvent]:
        tokens = token_numbers(event)
        reason = self._refusal(event)
        if reason or tokens is None:
            self.skipped[reason or "no_tokens"] += len(event.block_hashes)
            return []
        before = self._before(event)
        if before is None:
            self.skipped["foreign"] += len(event.block_hashes)
            return []
        return self._store_behind(rank, event, tokens, before)

    def _refusal(self, event: EngineStored) -> str:
        """Return the reason why no block of an event can have a TierKV name; empty if none."""
        if event.medium not in _OWN_MEDIA:
            return "other_medium"
        if event.lora_name is not None or event.lora_id is not None:
            return "adapter"
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX:
            return "other_cache"
        if event.block_size != self._model.layout.block_tokens:
            return "other_size"
        return ""

    def _before(self, event: EngineStored) -> _NamedBlock | None:
        """Return the block before an event's first block; None if that block has no TierKV name."""
        if event.parent_block_hash is not None:
            return self._named.get(event.parent_block_hash)
        first = event.extra_keys[0] if event.extra_keys else None
        salts = [event.cache_salt] if event.cache_salt is not None else first or []
        if len(salts) != 1 or not isinstance(salts[0], str):
            return None
        salt = parse_salt(salts[0])
        if salt is None or salt.identity != self._identity:
            return None
        return _NamedBlock(salt.namespace_key, ROOT_PARENT)

    def _store_behind(
        self, rank: int, event: EngineStored, tokens: list[int], before: _NamedBlock
    ) -> list[BlockEvent]:
        news: list[BlockEvent] = []
        width = event.block_size
        for index, name in enumerate(event.block_hashes):
            named = None
            if not self._stands_on_more(event, index):
                named = self._name(name, before, tokens[index * width : (index + 1) * width])
            if named is None:
                self.skipped["ambiguous"] += len(event.block_hashes) - index
                break
            place = (event.group_idx or 0, name)
            news += self._enter(rank, place, named, before.key, event.session_id or "")
            before = named
        self._forget_idle()
        return news

    @staticmethod
    def _stands_on_more(event: EngineStored, index: int) -> bool:
        """True if more than tokens determines a block, for example an image."""
        if not event.extra_keys or (index == 0 and event.parent_block_hash is None):
            return False  # ``_before`` checks the extra keys of a first block.
        return any(event.extra_keys[index : index + 1])

    def _enter(
        self,
        rank: int,
        place: tuple[int, EngineHash],
        named: _NamedBlock,
        parent: BlockKey,
        session: str,
    ) -> list[BlockEvent]:
        """Record that a rank holds a block, unless known."""
        cache = self._caches.setdefault(rank, {})
        if place in cache:
            return []
        if self._held >= self._max_blocks:
            self.skipped["full"] += 1
            return []
        stored = cache[place] = self._stored(named, parent, session)
        self._held += 1
        named.places += 1
        self._idle.pop(place[1], None)
        return [] if rank in self._silent else self._claim(stored)

    def _stored(self, named: _NamedBlock, parent: BlockKey, session: str) -> BlockStored:
        owner = Owner(
            self._model.name,
            self._tenants.get(named.namespace, ""),
            session[: limits.MAX_NAME_CHARS],
        )
        tokens = self._model.layout.block_tokens
        return BlockStored(BlockSpec(named.key, parent, tokens, owner=owner), Tier.L1)

    def _remove(self, rank: int, event: EngineRemoved) -> list[BlockEvent]:
        if event.medium not in _OWN_MEDIA:
            return []
        news: list[BlockEvent] = []
        cache = self._caches.get(rank, {})
        for name in event.block_hashes:
            stored = cache.pop((event.group_idx or 0, name), None)
            if stored is None:
                continue
            self._let_go(name)
            if rank not in self._silent:
                news += self._unclaim(stored.key)
        self._forget_idle()
        return news

    def _name(self, name: EngineHash, before: _NamedBlock, tokens: list[int]) -> _NamedBlock | None:
        """Record the TierKV name of a block; None if the engine's name already means another block.

        Engines may cut hashes to 64 bits. Two blocks with one name are never mixed up here.
        """
        key = next_block_key(before.namespace, before.key, tokens)
        known = self._named.get(name)
        if known is not None and known.key == key:
            return known
        if known is not None and known.places:
            return None
        named = self._named[name] = _NamedBlock(before.namespace, key)
        self._idle[name] = None
        return named

    def _let_go(self, name: EngineHash) -> None:
        self._held -= 1
        named = self._named[name]
        named.places -= 1
        if not named.places:
            self._idle[name] = None

    def _forget_idle(self) -> None:
        while len(self._idle) > limits.MAX_ENGINE_NAMES:
            longest, _ = self._idle.popitem(last=False)
            del self._named[longest]

    def _claim(self, stored: BlockStored) -> list[BlockEvent]:
        claim = self._claims.get(stored.key)
        if claim is None:
            self._claims[stored.key] = _Claim(stored, places=1)
            return [stored]
        claim.places += 1
        return []

    def _unclaim(self, key: BlockKey) -> list[BlockEvent]:
        claim = self._claims[key]
        claim.places -= 1
        if claim.places:
            return []
        del self._claims[key]
        return [BlockRemoved(key, Tier.L1)]

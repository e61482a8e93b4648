"""What each namespace keeps in the lower tier of this node, and may keep: a ledger of bytes.

Used by the demoter (dmp/node/tiering.py); the demoter's thread does all the deleting. A full
namespace loses its oldest copies, or makes no new copies; copies of older versions are deleted a
few at a time. Sizes are those of the blocks' bytes. Only namespaces with limits are counted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.slots.accounts import EVERYONE, IN_MEMORY, Accounts, NamespaceAccount, Quota
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey

_NO_BLOCK: Final = 1
"""A capacity in which no block fits."""
_DELETED_AT_ONCE: Final = 256
"""Copies deleted before the demoter looks for blocks to copy again."""


def _allowed(quota: Quota) -> int:
    """Return the bytes that a namespace may have below; 0: no limit."""
    return _NO_BLOCK if quota.media == IN_MEMORY else quota.disk_capacity_bytes


class DiskLedger:
    """The ledger. All methods are thread-safe; ``entered`` and ``delete_some`` do I/O.

    Attributes:
        _accounts: the namespaces; their capacity is that of the lower tier.
        _kept: counted copies by account, oldest first: key and bytes.
        _account_of: the account of each counted copy.
        _doomed: copies to delete.
        _wanted: new quotas, until the demoter's thread takes them.
    """

    def __init__(self, lower: LowerTier) -> None:
        self._lower = lower
        self._lock = threading.Lock()
        self._accounts = Accounts()
        self._kept: dict[int, OrderedDict[BlockKey, int]] = {}
        self._account_of: dict[BlockKey, int] = {}
        self._doomed: deque[BlockKey] = deque()
        self._wanted: tuple[Quota, ...] | None = None

    def set(self, quotas: Sequence[Quota]) -> None:
        """Have ``delete_some`` take new quotas."""
        counted = (
            each for each in quotas if each.disk_capacity_bytes or each.version or each.media
        )
        with self._lock:
            self._wanted = tuple(
                replace(quota, capacity_bytes=_allowed(quota), media="") for quota in counted
            )

    def takes(self, block: BlockSpec) -> bool:
        """Return whether a copy of a block is allowed; a refusal is counted."""
        size = block.ranges.payload_bytes
        with self._lock:
            number, is_outdated = self._accounts.place(block.owner)
            if number == EVERYONE:
                return True
            account = self._accounts.by_number[number]
            capacity = account.quota.capacity_bytes
            full = self._accounts.excess(number, size) and not account.quota.evicts
            if not (full or (capacity and size > capacity)):
                return not is_outdated
            account.refused += 1
            return False

    def entered(self, block: BlockSpec) -> list[BlockKey]:
        """Charge a new copy; delete the oldest until all fit, and return the deleted keys."""
        with self._lock:
            number = self._charge(block)
            gone = self._excess(number)
        for key in gone:
            self._lower.delete(key)
        return gone

    def left(self, keys: Sequence[BlockKey]) -> None:
        """Refund copies that are gone."""
        with self._lock:
            for key in keys:
                self._refund(key)

    def delete_some(self) -> list[BlockKey]:
        """Take new quotas, delete a part of the excess copies, and return the deleted keys."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._recount(wanted)
        with self._lock:
            count = min(_DELETED_AT_ONCE, len(self._doomed))
            gone = [self._doomed.popleft() for _ in range(count)]
        for key in gone:
            self._lower.delete(key)
        return gone

    def accounts(self) -> Iterator[NamespaceAccount]:
        """Return the namespaces that are counted, as of now."""
        with self._lock:
            return iter([replace(account) for account in self._accounts])

    def _recount(self, quotas: Sequence[Quota]) -> None:
        """Count all copies anew; O(copies) if there are quotas."""
        blocks = self._lower.blocks() if quotas else ()
        with self._lock:
            for key in list(self._account_of):
                self._refund(key)
            self._accounts.replace(quotas)
            self._accounts.drop_empty(quotas)
            self._doomed.clear()
            for block in blocks:
                number, is_outdated = self._accounts.place(block.owner)
                if is_outdated:
                    self._accounts.by_number[number].evicted_for_version += 1
                    self._doomed.append(block.key)
                else:
                    self._charge(block)
            for number in list(self._accounts.by_number):
                self._doomed.extend(self._excess(number))

    def _charge(self, block: BlockSpec) -> int:
        number = self._accounts.of(block.owner)
        if number != EVERYONE and block.key not in self._account_of:
            size = block.ranges.payload_bytes
            self._accounts.take(number, size)
            self._kept.setdefault(number, OrderedDict())[block.key] = size
            self._account_of[block.key] = number
        return number

    def _refund(self, key: BlockKey) -> None:
        number = self._account_of.pop(key, EVERYONE)
        if number != EVERYONE:
            self._accounts.give_back(number, self._kept[number].pop(key))

    def _excess(self, number: int) -> list[BlockKey]:
        gone: list[BlockKey] = []
        while self._accounts.excess(number):
            key = next(iter(self._kept[number]))
            self._refund(key)
            self._accounts.by_number[number].evicted_for_quota += 1
            gone.append(key)
        return gone

"""What each namespace keeps on this node, and may keep: a ledger of slot bytes.

A part of the pure core, used by dmp/slots/slot_table.py. Taking a slot charges the account, and
freeing the slot, for any reason, refunds the bytes. The ledger therefore equals a recount at any
time. Slots of tenants without a quota belong to everyone's account, without a limit.

A timer wheel finds unused blocks of namespaces with a ``ttl_s``, without scans.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Final

from tierkv.dmp.config import SLOT_ALIGN
from tierkv.dmp.segment.slots import Slot
from tierkv.kvcore import limits
from tierkv.kvcore.block import Owner
from tierkv.kvcore.ids import mark_of, tenant_of, version_mark

EVERYONE: Final = 0
"""NamespaceAccount of the tenants without a quota."""

MOST_ACCOUNTS: Final = limits.MAX_LIMITED_NAMESPACES
assert MOST_ACCOUNTS < SLOT_ALIGN
"""An account's number fits below a slot size, so that both make one number, the lane."""


IN_MEMORY, ON_DISK = "memory", "disk"
"""The media of a namespace that keeps blocks in one of them only."""

REST_AFTER_S: Final = 10.0
"""A namespace with disks only leaves an unused block in memory for so long: a reader who had the
block brought up finds it."""

_REMEMBERED_TENANTS: Final = 65_536
_name = attrgetter("name")


@dataclass(frozen=True, slots=True)
class Quota:
    """What one namespace may keep on this node.

    Attributes:
        name: the namespace.
        tenants: whose blocks count.
        capacity_bytes: most slot bytes in use; 0: no limit.
        ttl_s: seconds after which an unused block is removed; 0: never.
        evicts: whether a new block takes the place of the namespace's own oldest blocks once the
            capacity is used; otherwise it is refused.
        eviction: name of the policy that chooses among the namespace's own blocks; empty: the
            node's.
        version: blocks of another version are removed, and no longer stored; empty: there is none.
        disk_capacity_bytes: most bytes of blocks in the lower tier; 0: no limit.
        read_bytes_per_s: most bytes read on average; 0: no limit.
        write_bytes_per_s: most bytes written on average; 0: no limit.
        requests_per_s: most transfers on average; 0: no limit.
        weight: share of a busy node's transfers, relative to the rest of the namespaces.
        media: ``memory`` or ``disk`` if blocks stay in only one of them; empty: both.
        model: name of the only model whose blocks count; empty: all models without a quota of
            their own for the tenant.
    """

    name: str
    tenants: frozenset[str]
    capacity_bytes: int = 0
    ttl_s: float = 0.0
    evicts: bool = True
    eviction: str = ""
    version: str = ""
    disk_capacity_bytes: int = 0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    requests_per_s: float = 0.0
    weight: float = 1.0
    media: str = ""
    model: str = ""

    @property
    def memory_ttl_s(self) -> float:
        """Seconds after which an unused block leaves memory; 0: never."""
        return REST_AFTER_S if self.media == ON_DISK else self.ttl_s

    def without_rates(self) -> Quota:
        """Return the quota without what only transfers heed."""
        return replace(
            self, read_bytes_per_s=0.0, write_bytes_per_s=0.0, requests_per_s=0.0, weight=1.0
        )

    def has_policy_of(self, other: Quota) -> bool:
        """Return whether the policy made for another quota serves this one."""
        if not self.eviction:
            return not other.eviction
        return (self.eviction, self.capacity_bytes, self.ttl_s) == (
            other.eviction, other.capacity_bytes, other.ttl_s,
        )  # fmt: skip


@dataclass(slots=True)
class NamespaceAccount:
    """A namespace's place in the ledger.

    Attributes:
        quota: what the namespace may keep.
        used_bytes: slot bytes in use.
        blocks: slots in use.
        hits: uses of blocks; uses of one block within a second count once.
        refused: blocks refused because the capacity was used.
        evicted_for_quota: own blocks that made room for own blocks.
        evicted_for_memory: blocks evicted because the node's memory was used.
        evicted_for_ttl: unused blocks removed.
        evicted_for_version: blocks of older versions removed.
    """

    quota: Quota
    used_bytes: int = 0
    blocks: int = 0
    refused: int = 0
    evicted_for_quota: int = 0
    evicted_for_memory: int = 0
    evicted_for_ttl: int = 0
    evicted_for_version: int = 0
    hits: int = 0


class Accounts:
    """The ledger. The numbers of accounts stay while a namespace has a quota.

    Attributes:
        by_number: the accounts; everyone's is not among them.
        _of_tenant: the account of each tenant, and of one model where a quota names the model.
        _places: answers of ``place`` by tenant and model, as long as the quotas stay.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, NamespaceAccount] = {}
        self._of_tenant: dict[tuple[str, str], int] = {}
        self._places: dict[tuple[str, str], tuple[int, bool]] = {}

    def __iter__(self) -> Iterator[NamespaceAccount]:
        return iter(self.by_number.values())

    def __len__(self) -> int:
        return len(self.by_number)

    def of(self, owner: Owner) -> int:
        """Return the number of the account of a block's owner: a salt or version changes none."""
        return self.place(owner)[0]

    def place(self, owner: Owner) -> tuple[int, bool]:
        """Return the number of a block's account, and whether the block is of an older version."""
        key = (owner.tenant, owner.model)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _REMEMBERED_TENANTS:
                self._places.clear()
            place = self._places[key] = self._find(*key)
        return place

    def _find(self, tenant: str, model: str) -> tuple[int, bool]:
        tried = product((model, ""), (tenant, tenant_of(tenant)))
        known = (self._of_tenant.get((name, of_model)) for of_model, name in tried)
        number = next(filter(None, known), EVERYONE)
        account = self.by_number.get(number)
        if account is None or not account.quota.version:
            return number, False
        return number, mark_of(tenant) != version_mark(account.quota.version)

    def take(self, number: int, size: int) -> None:
        """Charge a slot."""
        if number:
            account = self.by_number[number]
            account.used_bytes += size
            account.blocks += 1

    def give_back(self, number: int, size: int) -> None:
        """Refund a slot."""
        if number:
            account = self.by_number[number]
            account.used_bytes -= size
            account.blocks -= 1

    def excess(self, number: int, size: int = 0) -> int:
        """Return by how many bytes the account is over its capacity once ``size`` is added."""
        account = self.by_number.get(number)
        if account is None or not account.quota.capacity_bytes:
            return 0
        return max(0, account.used_bytes + size - account.quota.capacity_bytes)

    def by_pressure(self, capacity_bytes: int, used_bytes: int) -> list[int]:
        """Return all accounts, the largest used part of the allowed bytes first.

        Accounts without a limit share the bytes that no quota claims.

        Args:
            capacity_bytes: slot bytes of the node.
            used_bytes: slot bytes in use by all accounts.
        """
        limited = [a for a in self.by_number.values() if a.quota.capacity_bytes]
        claimed = sum(account.quota.capacity_bytes for account in limited)
        rest = max(1, capacity_bytes - claimed)
        unlimited = used_bytes - sum(account.used_bytes for account in limited)

        def pressure(number: int) -> float:
            account = self.by_number.get(number)
            if account is None or not account.quota.capacity_bytes:
                return unlimited / rest
            return account.used_bytes / account.quota.capacity_bytes

        return sorted((EVERYONE, *self.by_number), key=lambda n: (-pressure(n), n))

    def differ_in_rates_only(self, quotas: Sequence[Quota]) -> bool:
        """Return whether new quotas leave every slot where it is."""
        now = [account.quota.without_rates() for account in self.by_number.values()]
        return sorted(now, key=_name) == sorted((q.without_rates() for q in quotas), key=_name)

    def replace(self, quotas: Sequence[Quota]) -> None:
        """Take new quotas; ``Quotas.set`` then moves the slots between accounts.

        The account of a namespace that has no quota any more must be emptied and dropped
        (``drop_empty``).
        """
        numbers = {account.quota.name: number for number, account in self.by_number.items()}
        free = iter(n for n in range(1, MOST_ACCOUNTS + 1) if n not in self.by_number)
        self._of_tenant = {}
        self._places.clear()
        for quota in quotas[:MOST_ACCOUNTS]:
            number = numbers.get(quota.name) or next(free, EVERYONE)
            if number == EVERYONE:  # All numbers are in use by namespaces that go.
                break
            known = self.by_number.get(number)
            if known is None:
                self.by_number[number] = NamespaceAccount(quota)
            else:
                known.quota = quota
            self._of_tenant |= {(tenant, quota.model): number for tenant in quota.tenants}

    def drop_empty(self, quotas: Sequence[Quota]) -> None:
        """Forget the accounts of namespaces without a quota."""
        names = {quota.name for quota in quotas}
        for number, account in list(self.by_number.items()):
            if account.quota.name not in names:
                assert not account.used_bytes, account
                del self.by_number[number]

    def check_invariants(self, slots: Sequence[Slot]) -> None:
        """Assert that the ledger equals a recount; O(slots x accounts)."""
        for number, account in self.by_number.items():
            own = [slot.extent.slot_bytes for slot in slots if slot.account == number]
            assert (account.used_bytes, account.blocks) == (sum(own), len(own)), account


class TtlWheel:
    """Slots by the second of their next check; O(1) per slot and check."""

    def __init__(self, slot_of: Callable[[int, int], Slot | None]) -> None:
        self._slot_of = slot_of
        self._buckets: dict[int, list[tuple[int, int]]] = {}
        self._seconds: list[int] = []

    def expect(self, slot: Slot, at: float) -> None:
        """Schedule a slot's next check for the first whole second after ``at``."""
        second = int(at) + 1
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = []
            heapq.heappush(self._seconds, second)
        bucket.append((slot.index, slot.generation))

    def due(self, now: float) -> Iterator[Slot]:
        """Yield the slots to be checked until now."""
        while self._seconds and self._seconds[0] <= now:
            for index, generation in self._buckets.pop(heapq.heappop(self._seconds)):
                slot = self._slot_of(index, generation)
                if slot is not None:
                    yield slot

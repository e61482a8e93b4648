"""The ledger of the lower tier: whatever happens, it equals a recount, and nobody is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.fix_dmp import block_key, make_put
from tierkv.dmp.node.disk_ledger import DiskLedger
from tierkv.dmp.slots.accounts import Quota
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey, mark_of, scope_of_version, tenant_of, version_mark
from tierkv.kvcore.node import TierStats

SIZE = 1_000
RED = frozenset({"ann", "bob"})
NAMES = [f"n{i}" for i in range(12)]


class Tier:
    """Copies in a dictionary, which is all that the ledger asks a tier for."""

    def __init__(self) -> None:
        self.kept: dict[BlockKey, BlockSpec] = {}

    def put(self, block: BlockSpec, payload: memoryview, *, checksums: bytes | None = None) -> None:
        self.kept[block.key] = block

    def find(self, key: BlockKey) -> BlockSpec | None:
        return self.kept.get(key)

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes:
        raise NotImplementedError

    def blocks(self) -> Sequence[BlockSpec]:
        return list(self.kept.values())

    def delete(self, key: BlockKey) -> None:
        self.kept.pop(key, None)

    def set_listener(self, gone: Callable[[Sequence[BlockKey]], None]) -> None:
        """Nothing leaves by itself."""

    def stats(self) -> TierStats:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""


class LedgerMachine(RuleBasedStateMachine):
    """Copies of three tenants, two of which share a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = Tier()
        self.ledger = DiskLedger(self.tier)
        self.quota: Quota | None = None
        self.others = 0

    @rule(
        name=st.sampled_from(NAMES), tenant=st.sampled_from(["ann", "bob", "dan"]),
        version=st.sampled_from(["", "r1", "r2"]), ranges=st.integers(1, 3),
    )  # fmt: skip
    def copy(self, name: str, tenant: str, version: str, ranges: int) -> None:
        scope = scope_of_version(tenant, version)
        block = make_put(name, range_bytes=SIZE, range_count=ranges, tenant=scope)
        if block.key in self.tier.kept or not self.ledger.takes(block):
            return
        self.tier.put(block, memoryview(b""))
        before = set(self.tier.kept)
        gone = self.ledger.entered(block)
        assert before - set(self.tier.kept) == set(gone)
        assert block.key not in gone

    @rule(name=st.sampled_from(NAMES))
    def left(self, name: str) -> None:
        if self.tier.kept.pop(block_key(name), None) is not None:
            self.ledger.left([block_key(name)])

    @rule(
        capacity=st.integers(0, 6), evicts=st.booleans(), version=st.sampled_from(["", "r1", "r2"]),
        exists=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def change(self, capacity: int, evicts: bool, version: str, exists: bool) -> None:
        others = [b for b in self.tier.blocks() if tenant_of(b.owner.tenant) not in RED]
        self.quota = (
            Quota("red", RED, evicts=evicts, version=version, disk_capacity_bytes=capacity * SIZE)
            if exists
            else None
        )
        self.ledger.set([self.quota] if self.quota else [])
        while self.ledger.delete_some():
            pass
        assert all(block.key in self.tier.kept for block in others), "nobody else's copies go"
        for block in self.red() if self.quota and version else ():
            assert mark_of(block.owner.tenant) == version_mark(version)

    def red(self) -> list[BlockSpec]:
        return [b for b in self.tier.blocks() if tenant_of(b.owner.tenant) in RED]

    @invariant()
    def the_ledger_is_a_recount(self) -> None:
        for account in self.ledger.accounts():
            used = sum(block.ranges.payload_bytes for block in self.red())
            assert (account.used_bytes, account.blocks) == (used, len(self.red()))
            if account.quota.capacity_bytes:
                assert used <= account.quota.capacity_bytes


def test_the_ledger_whatever_happens() -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )

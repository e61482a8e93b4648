"""What namespaces cost a pool node, in its slot table alone, and whether policies do there as told.

Run ``python -m bench.namespace_table``. No process and no wire. First, one namespace of a million
blocks changes its version: the time until no old block can be stored, the time until all are freed,
and the longest time for which other requests had to wait. Then puts and lookups with the
ledger beside the same without a namespace. Last, a trace goes through the table and through the
simulator, for each policy that a namespace may have: the difference in block hits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from bench.policies import tenants
from bench.report import Report, finish, make_parser
from tierkv.dmp.segment.slots import slot_bytes_for
from tierkv.dmp.slots.accounts import Quota
from tierkv.dmp.slots.eviction import policy_for
from tierkv.dmp.slots.slot_table import SlotTable
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Outlook, Owner, RangeShape
from tierkv.kvcore.ids import BlockKey, scope_of_version
from tierkv.policies.select import NAMESPACE_POLICIES
from tierkv.simulator.cache_replay import replay
from tierkv.simulator.trace import Request

_RANGES = RangeShape(3_000, 1)
_SIZE = slot_bytes_for(_RANGES.size_bytes, _RANGES.count)
_PER_EXTENT = 256
_MEMBERS = frozenset({"ann"})
_BLOCKS, _QUICK_BLOCKS = 1_000_000, 50_000
_CHAIN = 32
_CACHE_SHARES = {"small": 0.02, "large": 0.2}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; ``--quick`` switches 50,000 blocks and replays a short trace."""
    options = make_parser(__doc__).parse_args(argv)
    report = Report("namespace_table")
    measure(report, options.seed, quick=options.quick)
    finish(report, options.format)


def measure(report: Report, seed: int, *, quick: bool) -> None:
    """Measure everything, and add the results."""
    _switch(report, _QUICK_BLOCKS if quick else _BLOCKS)
    _ledger(report, 2_000 if quick else 20_000)
    _policies(report, tenants(seed, 400 if quick else 4_000))


def _table(slots: int) -> SlotTable:
    extents = -(-slots // _PER_EXTENT)
    return SlotTable(
        extent_count=extents,
        extent_bytes=_PER_EXTENT * _SIZE,
        slots_per_extent=_PER_EXTENT,
        make_policy=lambda size, quota: policy_for(
            quota, "leaf_lru", slot_bytes=size, capacity_bytes=extents * _PER_EXTENT * size
        ),
    )


def _block(number: int, parent: BlockKey, tenant: str) -> BlockSpec:
    return BlockSpec(_key(number), parent, 64, ranges=_RANGES, owner=Owner(tenant=tenant))


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def _put(table: SlotTable, block: BlockSpec) -> bool:
    decision = table.reserve(block, deadline=float("inf"))
    if decision is None:
        return False
    slot = decision.slot
    return table.seal(slot.index, slot.generation, now=table.now) is not None


def _fill(table: SlotTable, count: int, tenant: str) -> None:
    """Store chains of 32 blocks."""
    for number in range(1, count + 1):
        parent = ROOT_PARENT if number % _CHAIN == 1 else _key(number - 1)
        assert _put(table, _block(number, parent, tenant))


def _switch(report: Report, blocks: int) -> None:
    table, quota = _table(blocks + 1), Quota("red", _MEMBERS, version="r1")
    table.quotas.set([quota], 0.0)
    _fill(table, blocks, scope_of_version("ann", "r1"))
    waits = [_timed(lambda: table.quotas.set([replace(quota, version="r2")], 1.0))]
    late = _block(blocks + 1, ROOT_PARENT, scope_of_version("ann", "r1"))
    assert not _put(table, late), "a block of the old version was stored"
    steps = []
    while len(table.store):
        steps.append(_timed(table.quotas.remove_outdated))
        table.quotas.take_removed()
    (account,) = table.accounts
    assert account.evicted_for_version == blocks and not account.used_bytes
    report.add("switch_blocks", blocks)
    report.add("switch_takes_effect_s", waits[0])
    report.add("switch_frees_all_s", sum(steps))
    report.add("switch_longest_step_ms", 1e3 * max(steps))
    report.note("Between two steps of a switch the node serves other requests.")


def _timed(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _ledger(report: Report, count: int) -> None:
    """Put and look up the same blocks with and without a namespace, in turns."""
    costs: dict[str, list[float]] = {}
    for _ in range(7):
        for name in ("free", "counted"):
            table = _table(count)
            if name == "counted":
                table.quotas.set([Quota("red", _MEMBERS, count * _SIZE, version="r1")], 0.0)
            tenant = scope_of_version("ann", "r1") if name == "counted" else "ann"
            puts = _timed(lambda: _fill(table, count, tenant))  # noqa: B023
            keys = [_key(number) for number in range(1, count + 1)]
            finds = _timed(lambda: [table.find(key) for key in keys])  # noqa: B023
            costs.setdefault(f"put_{name}", []).append(puts / count)
            costs.setdefault(f"lookup_{name}", []).append(finds / count)
    for name, each in costs.items():
        report.add(f"{name}_us", 1e6 * median(each))
    for step in ("put", "lookup"):
        ratio = median(costs[f"{step}_counted"]) / median(costs[f"{step}_free"])
        report.add(f"{step}_counted_of_free", ratio)


def _policies(report: Report, requests: Sequence[Request]) -> None:
    distinct = len({block for request in requests for block in request.block_ids})
    for size, share in _CACHE_SHARES.items():
        capacity = max(1, int(share * distinct))
        for policy in NAMESPACE_POLICIES:
            told = replay(requests, policy, capacity, order="leaves")
            here = _hits(requests, policy, capacity) / told.block_references
            simulated = told.block_hits / told.block_references
            report.add(f"{policy}_{size}_hits_pct", 100 * here)
            report.add(f"{policy}_{size}_minus_simulator_points", 100 * (here - simulated))


def _hits(requests: Sequence[Request], policy: str, capacity: int) -> int:
    """Return the block hits of a namespace with a policy."""
    table = _table(2 * capacity + _PER_EXTENT)
    table.quotas.set([Quota("red", _MEMBERS, capacity * _SIZE, eviction=policy)], 0.0)
    hits = 0
    for request in requests:
        table.expire(request.timestamp_s)
        chain = request.block_ids
        found = []
        for block in chain:
            slot = table.find(_key(block))
            if slot is None:
                break
            table.hold(slot.index, slot.generation, until=float("inf"))
            found.append(slot)
        hits += len(found)
        for depth in range(len(found), len(chain)):
            parent = _key(chain[depth - 1]) if depth else ROOT_PARENT
            outlook = Outlook(depth=depth, tail=depth == len(chain) - 1)
            block = replace(_block(chain[depth], parent, "ann"), outlook=outlook)
            if not _put(table, block):
                break
        for slot in found:
            table.release(slot.index, slot.generation)
    return hits


if __name__ == "__main__":
    main()

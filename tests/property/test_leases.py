"""Leases against a naive model: grants, extensions, ends, expiry, nodes that go, in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.kvcore import limits
from tierkv.kvcore.block_event import NO_LEASE, LeaseId
from tierkv.kvcore.ids import NodeId
from tierkv.metaserver.directory.leases import Leases

NODES = [NodeId(name) for name in "abc"]
TTLS = st.sampled_from([0.5, 1.0, 2.0, 0.0, -1.0, float("nan"), limits.MAX_LEASE_S * 2])
HELD = st.dictionaries(st.sampled_from(NODES), st.integers(1, 3), max_size=3)
MOST, MOST_KEYS = 4, 24


class LeaseMachine(RuleBasedStateMachine):
    """The model is a dictionary of deadlines and, per node, of the orders it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(max_leases=MOST, max_kept_keys=MOST_KEYS)
        self.now = 0.0
        self.model: dict[LeaseId, tuple[float, dict[NodeId, int], int]] = {}
        self.told: dict[NodeId, dict[LeaseId, float]] = {node: {} for node in NODES}
        self.given: list[LeaseId] = [LeaseId(99_999)]

    @rule(seconds=st.sampled_from([0.25, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)
        self.model = {k: v for k, v in self.model.items() if v[0] > self.now}
        for orders in self.told.values():
            for lease in [lease for lease, until in orders.items() if until <= self.now]:
                del orders[lease]

    @rule(held=HELD, ttl_s=TTLS, blocks=st.integers(1, 4))
    def grant(self, held: dict[NodeId, int], ttl_s: float, blocks: int) -> None:
        raw = {node: bytes(16 * count) for node, count in held.items()}
        change = self.leases.grant(bytes(16 * blocks), raw, ttl_s, self.now)
        keys = blocks + sum(held.values())
        kept = sum(v[2] + sum(v[1].values()) for v in self.model.values())
        fits = len(self.model) < MOST and kept + keys <= MOST_KEYS
        good = 0 < ttl_s <= limits.MAX_LEASE_S
        assert (change.lease != NO_LEASE) is (fits and good)
        if change.lease == NO_LEASE:
            assert change.orders == ()
            return
        assert change.lease not in self.given, "a lease's number is used once"
        self.given.append(change.lease)
        self.model[change.lease] = (self.now + ttl_s, dict(held), blocks)
        for asked in change.orders:
            self.told[asked.node_id][asked.lease] = self.now + asked.ttl_s

    @rule(data=st.data(), ttl_s=TTLS)
    def extend(self, data: st.DataObject, ttl_s: float) -> None:
        lease = data.draw(st.sampled_from(self.given))
        change = self.leases.extend(lease, ttl_s, self.now)
        good = lease in self.model and 0 < ttl_s <= limits.MAX_LEASE_S
        assert (change.lease == lease) is good
        if good:
            self.model[lease] = (self.now + ttl_s, *self.model[lease][1:])
        for asked in change.orders:
            self.told[asked.node_id][asked.lease] = self.now + asked.ttl_s

    @rule(data=st.data(), used=st.booleans())
    def end(self, data: st.DataObject, used: bool) -> None:
        lease = data.draw(st.sampled_from(self.given))
        change = self.leases.end(lease, used=used)
        assert (change.lease == lease) is (lease in self.model)
        if lease in self.model:
            assert len(change.chain) == 16 * self.model.pop(lease)[2]
        for asked in change.orders:
            assert (asked.keys, asked.ttl_s) == (b"", 0.0)
            del self.told[asked.node_id][asked.lease]

    @rule(node=st.sampled_from(NODES))
    def node_is_gone(self, node: NodeId) -> None:
        self.leases.drop_node(node)
        self.told[node] = {}
        for _, held, _ in self.model.values():
            held.pop(node, None)

    @invariant()
    def nodes_keep_exactly_what_live_leases_promise(self) -> None:
        self.leases.check_invariants()
        assert len(self.leases) == len(self.model)
        for node in NODES:
            promised = {k: v[0] for k, v in self.model.items() if node in v[1]}
            assert self.told[node] == promised
            asked = self.leases.orders_of(node, self.now)
            assert {a.lease: self.now + a.ttl_s for a in asked} == promised
            assert {a.lease: len(a.keys) // 16 for a in asked} == {
                k: self.model[k][1][node] for k in promised
            }


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)

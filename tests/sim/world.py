"""The simulated cluster: what there is, what goes wrong, and what must be true all the same.

``play`` runs one seed: a stormy time with requests, crashes and a bad network, then peace, in which
everything must come right by itself. Every check is an assertion.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.fix_scheduler import make_model
from tests.sim.compute_server import ComputeServer
from tests.sim.directory import located_now
from tests.sim.front import Front
from tests.sim.meta_server import MetaServer, ReportingNode
from tests.sim.network import PEACE, Faults, Network, Process
from tests.sim.pool_server import PoolServer, SegmentFile
from tests.sim.prompts import MAX_BLOCKS, draw_prompt, expected_kv
from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockStored, EventBatch
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.metaserver.block_owners import BlockOwners
from tierkv.policies.select import PRODUCTION_POLICIES

STORM_S = 10.0
LONGEST_ANSWER_S = 40.0
SETTLE_S = 8.0
REQUESTS = 30


@dataclass
class Outcome:
    """What one seed came to."""

    ended: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)


class World:
    """All processes of one seed; ``start`` of a name begins its next life."""

    def __init__(self, seed: int, *, metas: int = 0, fronts: int = 0) -> None:
        """Draw a cluster; ``metas`` and ``fronts`` fix these numbers."""
        self.net = Network(seed)
        rng = self.net.rng
        count = metas or rng.choice([1, 3])
        self.metas = ["meta"] if count == 1 else [f"meta-{n}" for n in range(count)]
        self.counts: Counter[str] = Counter()
        self._lives: Counter[str] = Counter()
        self._policy = rng.choice(sorted(PRODUCTION_POLICIES))
        hosts = [f"h{n}" for n in range(rng.randint(1, 3))]
        self.dmp = {NodeId(f"dmp-{host}"): host for host in hosts}
        self.compute = {
            NodeId(f"cpu-{n}"): (role, rng.choice(hosts)) for n, role in enumerate(_roles(rng))
        }
        self._pages = rng.randint(MAX_BLOCKS + 1, 20)
        self._extents = rng.randint(2, 4)
        self._segments = {name: SegmentFile() for name in self.dmp}
        for name in (*self.metas, *self.dmp, *self.compute):
            self.start(name)
        front_names = [f"front-{n}" for n in range(fronts or rng.randint(1, 2))]
        self.fronts = [Front(name, self.net, self.metas) for name in front_names]
        self.net.tell(
            f"{count} meta servers, {len(self.fronts)} fronts, {len(self.dmp)} pool nodes of"
            f" {4 * self._extents} slots, {self._pages} pages each at "
            f"{', '.join(f'{n} ({r}, {h})' for n, (r, h) in self.compute.items())}; {self._policy}"
        )

    # -- lives

    def start(self, name: str) -> None:
        """Begin the next life of a process that is down."""
        self._lives[name] += 1
        self.net.tell(f"{name} starts, life {self._lives[name]}")
        if name in self.metas:
            MetaServer(name, self.net, self._lives[name])
        elif name in self.dmp:
            info = self._info(name, NodeRole.DMP, self.dmp[NodeId(name)])
            PoolServer(
                info,
                self.net,
                self.metas,
                extents=self._extents,
                policy=self._policy,
                segment=self._segments[NodeId(name)],
            )
        else:
            info = self._info(name, *self.compute[NodeId(name)])
            ComputeServer(
                info,
                self.net,
                self.metas,
                pages=self._pages,
                policy=self._policy,
                dmp=tuple(self.dmp),
            )

    def _info(self, name: str, role: NodeRole, host: str) -> NodeInfo:
        models = () if role is NodeRole.DMP else (make_model(),)
        life = Incarnation(self._lives[name])
        return NodeInfo(NodeId(name), life, role, HostId(host), models=models)

    def crash(self, name: str, *, loses_segment: bool = False) -> None:
        """Kill a process."""
        process = self.net.processes.get(name)
        if process is None:
            return
        self._count(process)
        process.crash()
        self.net.tell(f"{name} crashes{' and loses its segment' if loses_segment else ''}")
        self.counts["crashes"] += 1
        if loses_segment:
            self._segments[NodeId(name)] = SegmentFile()
        for other in self._all(PoolServer):
            if self.net.rng.random() < 0.7:  # Else the connection seems to live on.
                other.client_died(name)

    def _count(self, process: Process) -> None:
        if isinstance(process, ComputeServer):
            for name in ("loaded", "prefetched", "reused", "computed", "gave_way"):
                self.counts[name] += getattr(process, name)
            self.counts["evicted pages"] += process.pool.evicted_blocks
        elif isinstance(process, PoolServer):
            self.counts["stale references"] += process.stale
            self.counts["evicted slots"] += process.table.evicted_blocks
        elif isinstance(process, MetaServer):
            counts = process.state.leases.counts
            for name in ("granted", "committed", "aborted", "expired", "extended"):
                self.counts[f"leases {name}"] += getattr(counts, name)
            self.counts["refused events"] += process.state.directory.refused_events
            self.counts["stale batches"] += process.state.directory.stale_batches

    # -- the storm

    def storm(self) -> None:
        """Plan what will happen."""
        net, rng = self.net, self.net.rng
        bad = rng.choice([0.0, 0.02, 0.1])
        net.faults = Faults(loss=bad, double=bad, delay_s=rng.choice([0.002, 0.02]))
        net.tell(f"{net.faults}")
        crowds = [1.0 + rng.random() * (STORM_S - 2.0) for _ in range(rng.randint(2, 10))]
        for _ in range(REQUESTS):
            net.after(rng.choice(crowds) + rng.random() * 0.5, self._submit)
        for _ in range(rng.randrange(6)):
            net.after(1.0 + rng.random() * (STORM_S - 1.0), self._accident)
        for _ in range(rng.randrange(3)):
            net.after(1.0 + rng.random() * (STORM_S - 1.0), self._slow_path)
        for _ in range(rng.randrange(3)):
            net.after(1.0 + rng.random() * (STORM_S - 1.0), self._part)
        for _ in range(rng.randrange(4)):
            net.after(1.0 + rng.random() * (STORM_S - 1.0), self._lie)

    def _submit(self) -> None:
        rng = self.net.rng
        front = rng.choice(self.fronts)
        session = rng.choice([None, "s1", "s2"])
        request_id = front.submit(draw_prompt(rng), session=session, priority=rng.choice([0, 0, 2]))
        if rng.random() < 0.15:
            self.net.after(rng.random(), lambda: front.cancel(request_id))

    def _accident(self) -> None:
        rng = self.net.rng
        name = rng.choice([*self.metas, *self.dmp, *self.compute, *self.compute])
        self.crash(name, loses_segment=name in self.dmp and rng.random() < 0.3)
        self.net.after(0.2 + rng.random() * 4.0, lambda: self._start_again(name))

    def _start_again(self, name: str) -> None:
        if name not in self.net.processes:
            self.start(name)

    def _slow_path(self) -> None:
        name = self.net.rng.choice([*self.dmp, *self.compute, *self.metas])
        self.net.tell(f"the way to {name} is slow")
        self.net.slow[name] = 50.0
        self.net.after(3.0, lambda: self.net.slow.pop(name, None))

    def _part(self) -> None:
        """Keep some processes from asking a server, which others reach all the while."""
        rng = self.net.rng
        server = rng.choice([*self.metas, *self.dmp])
        askers = [*self.dmp, *self.compute, *(front.name for front in self.fronts)]
        parted = rng.sample(askers, rng.randint(1, len(askers)))
        cuts = {frozenset((name, server)) for name in parted if name != server}
        self.net.tell(f"{', '.join(parted)} can't reach {server}")
        self.counts["partitions"] += 1
        self.net.cuts |= cuts
        self.net.after(rng.random() * 4.0, lambda: self.net.cuts.difference_update(cuts))

    def _lie(self) -> None:
        """Somebody says what can't be; what the others say counts all the same."""
        rng = self.net.rng
        name = NodeId(rng.choice([*self.dmp, *self.compute]))
        node = self.net.processes.get(name)
        if isinstance(node, ReportingNode) and rng.random() < 0.5:
            self.net.tell(f"{name} lies")
            node.reporter.report(false_news(name, node.info.incarnation))
            return
        life = Incarnation(self._lives[name] - 1)  # Of an earlier life, or one there never was.
        ghost = rng.choice([(name, life), (NodeId("ghost"), Incarnation(1))])
        self.net.tell(f"{ghost[0]} speaks from life {ghost[1]}")
        batch = EventBatch(*ghost, 10**6, false_news(*ghost), inventory=True)
        for meta in self.metas:
            self.net.send(meta, lambda server: server.report(batch))

    # -- checks

    def check(self) -> None:
        """What must hold after every step."""
        for node in (*self._all(PoolServer), *self._all(ComputeServer)):
            node.check()
        for front in self.fronts:
            front.state.check_invariants()

    def check_now_and_then(self) -> None:
        """What costs more to look at."""
        for meta in self._all(MetaServer):
            meta.state.check_invariants(meta.now)
        for node in (*self._all(PoolServer), *self._all(ComputeServer)):
            node.check_expired()

    def check_at_rest(self) -> None:
        """What must have come right by itself."""
        self.check()
        self.check_now_and_then()
        for front in self.fronts:
            front.check_at_rest()
        for node in (*self._all(PoolServer), *self._all(ComputeServer)):
            node.check_at_rest()
        metas: list[MetaServer] = sorted(self._all(MetaServer), key=lambda meta: meta.name)
        assert [meta.name for meta in metas] == self.metas
        for meta in metas:
            assert len(meta.state.leases) == 0, f"{meta.name} still has leases"
        self._check_directory(metas)
        self._check_every_replica(metas)

    def _check_directory(self, metas: list[MetaServer]) -> None:
        """Each server knows what nodes hold of its blocks: nothing lost, nothing made up."""
        held = {
            (node.info.node_id, block.tier, block.key)
            for node in self._all(ReportingNode)
            for block in node.inventory()
        }
        owners = BlockOwners(self.metas)
        owned = {place: owners.of([place[2]])[0].tolist() for place in held}
        for number, meta in enumerate(metas):
            listing = meta.state.list_blocks(10_000, meta.now)
            listed = {(b.node_id, Tier(b.tier), b.block.key) for b in listing.blocks}
            mine = {place for place in held if number in owned[place]}
            assert listed == mine, f"{meta.name}: missing {mine - listed}, more {listed - mine}"
            assert listing.total == len(listed)

    def _check_every_replica(self, metas: list[MetaServer]) -> None:
        """Whatever the directory promises can be read, and is right."""
        rng = self.net.rng
        for _ in range(20):
            prompt = draw_prompt(rng)
            reply = located_now(metas, self.metas, prompt.keys)
            for kv, replicas in zip(expected_kv(prompt), reply.replicas, strict=False):
                for place in (replica.location for replica in replicas):
                    assert place is not None
                    self.net.processes[place.node].spawn(
                        self.net.processes[place.node].read(place),  # type: ignore[attr-defined]
                        lambda got, kv=kv: _equal(got, kv),
                    )
                    self.counts["replicas read at the end"] += 1
        self.net.run(1.0, lambda: None)

    def _all(self, kind: type) -> list:  # type: ignore[type-arg]
        return [p for p in self.net.processes.values() if isinstance(p, kind)]

    def play(self) -> Outcome:
        """Run the storm and the peace after it."""
        steps = [0]

        def check() -> None:
            steps[0] += 1
            if steps[0] % 32 == 0:
                self.check()
            if steps[0] % 128 == 0:
                self.check_now_and_then()

        self.storm()
        self.net.run(STORM_S, check)
        self.net.faults = PEACE
        self.net.slow.clear()
        self.net.cuts.clear()
        self.net.tell("peace")
        for name in (*self.metas, *self.dmp, *self.compute):
            self._start_again(name)
        end = self.net.now + LONGEST_ANSWER_S
        while any(front.jobs for front in self.fronts) and self.net.now < end:
            self.net.run(1.0, check)
        self.net.run(SETTLE_S, check)
        self.check_at_rest()
        return self._outcome(steps[0])

    def _outcome(self, steps: int) -> Outcome:
        for process in self.net.processes.values():
            self._count(process)
        self.counts["steps"] = steps
        self.counts["messages lost"] = self.net.lost
        ended = Counter(how.split(",")[0] for f in self.fronts for how in f.ended.values())
        return Outcome(ended, self.counts, self.net.story)


def false_news(name: NodeId, life: Incarnation) -> tuple[BlockStored, ...]:
    """Events no node may send: slots of others, no bytes, too many, tiers that are none."""
    key = BlockKey(b"no such block!!!")

    def place(node: str, length: int) -> Location:
        return Location(NodeId(node), life, 0, 0, 1, length)

    return (
        BlockStored(BlockSpec(key, ROOT_PARENT, 16), Tier.L2, place("other", 64)),
        BlockStored(BlockSpec(key, ROOT_PARENT, 16), Tier.L2, place(name, 0)),
        BlockStored(
            BlockSpec(key, ROOT_PARENT, 16), Tier.L2, place(name, limits.MAX_SLOT_BYTES + 1)
        ),
        BlockStored(BlockSpec(key, ROOT_PARENT, 16), Tier.L3, place(name, 64)),
        BlockStored(BlockSpec(key, ROOT_PARENT, 16), Tier.L2),
    )


def _roles(rng: random.Random) -> list[NodeRole]:
    """Draw compute nodes; some clusters split prefill and decode."""
    if rng.random() < 0.3:
        return [NodeRole.PREFILL, NodeRole.DECODE, rng.choice([NodeRole.PREFILL, NodeRole.COMPUTE])]
    return [NodeRole.COMPUTE] * rng.randint(1, 3)


def _equal(got: bytes, kv: bytes) -> None:
    assert got == kv, "the directory names a slot that holds something else"

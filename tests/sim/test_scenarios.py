"""Single misfortunes, one at a time, on a cluster that is otherwise well."""

from __future__ import annotations

import random
from typing import TypeVar

from tests.sim.compute_server import ComputeServer
from tests.sim.front import CONFIG, LEASE_S, Front
from tests.sim.meta_server import MetaServer, ReportingNode
from tests.sim.network import Faults
from tests.sim.pool_server import PoolServer
from tests.sim.prompts import draw_prompt, expected_answer, expected_kv, next_kv
from tests.sim.world import World, false_news
from tierkv.dmp.segment.slots import SlotState
from tierkv.kvcore.block_event import NO_LEASE, EventBatch
from tierkv.kvcore.ids import Incarnation, NodeId

T = TypeVar("T")


def calm(seed: int = 1) -> World:
    """A cluster in which everybody knows everybody."""
    world = World(seed, metas=1)
    world.net.run(2.0, world.check)
    return world


def submit(world: World, count: int) -> None:
    rng = random.Random(5)
    for _ in range(count):
        world.fronts[0].submit(draw_prompt(rng), session=None, priority=0)


def all_of(world: World, kind: type[T]) -> list[T]:
    return [p for p in world.net.processes.values() if isinstance(p, kind)]


def test_the_oracle_tells_prefixes_apart() -> None:
    rng = random.Random(1)
    prompts = [draw_prompt(rng) for _ in range(50)]
    for prompt in prompts:
        for other in prompts:
            same = [a == b for a, b in zip(prompt.keys, other.keys, strict=False)]
            kv = zip(expected_kv(prompt), expected_kv(other), strict=False)
            assert [a == b for a, b in kv] == same
            equal = (prompt.blocks, prompt.tail) == (other.blocks, other.tail)
            assert (expected_answer(prompt) == expected_answer(other)) is equal
    assert next_kv(b"", (1,)) != next_kv(b"x", (1,))


def test_full_queues_refuse_with_the_reason_and_recover() -> None:
    world = calm()
    front = world.fronts[0]
    submit(world, 80)
    live = len(front.jobs)
    assert live <= CONFIG.max_requests
    refused = [how for how in front.ended.values() if how.startswith("failed: overloaded")]
    assert len(refused) == front.state.placement.rejected == 80 - live
    world.net.run(40.0, world.check)
    later = [how for how in front.ended.values() if how == "finished"]
    assert len(later) + len([h for h in front.ended.values() if "overloaded" in h]) == 80
    submit(world, 1)
    world.net.run(10.0, world.check)
    assert list(front.ended.values())[-1] == "finished"
    world.check_at_rest()


def test_without_a_meta_server_answers_go_on_and_the_pool_is_still_read() -> None:
    world = calm()
    submit(world, 8)
    world.net.run(10.0, world.check)
    world.crash("meta")
    for node in world.compute:  # Nothing is left in L1.
        world.crash(node)
        world.start(node)
    world.net.run(1.0, world.check)
    assert not all_of(world, MetaServer)
    front = world.fronts[0]
    # The front knows the nodes' earlier lives only; it must learn of the new ones to use them.
    world.start("meta")
    world.net.run(3.0, world.check)
    world.crash("meta")
    submit(world, 8)
    world.net.run(20.0, world.check)
    assert list(front.ended.values()) == ["finished"] * 16
    assert sum(node.loaded for node in all_of(world, ComputeServer)) > 0
    world.start("meta")
    world.net.run(10.0, world.check)
    world.check_at_rest()


def test_leases_of_a_front_that_died_end_by_themselves() -> None:
    world = calm()
    submit(world, 8)
    world.net.run(10.0, world.check)
    lost = Front("lost", world.net, world.metas)
    world.net.run(1.0, world.check)
    prompts = [draw_prompt(random.Random(5)) for _ in range(3)]
    (meta,) = all_of(world, MetaServer)
    replies = [meta.locate(prompt.keys, reserve_s=LEASE_S) for prompt in prompts]
    assert all(reply.lease != NO_LEASE for reply in replies)
    lost.crash()
    world.net.run(0.5, world.check)
    assert any(node.table.leases.blocks for node in all_of(world, PoolServer))
    world.net.run(LEASE_S + 0.5, world.check)
    assert not any(node.table.leases.blocks for node in all_of(world, PoolServer))
    assert meta.state.leases.counts.expired >= 3
    assert not meta.extend_lease(replies[0].lease, 1.0), "it is over"
    assert not meta.end_lease(replies[0].lease, used=True)
    world.check_at_rest()


def test_a_writer_that_dies_leaves_no_reservation() -> None:
    world = calm()
    submit(world, 8)
    nodes = all_of(world, PoolServer)
    for _ in range(400):
        world.net.run(0.01, world.check)
        if any(node.table.store.counts[SlotState.WRITING] for node in nodes):
            break
    assert any(node.table.store.counts[SlotState.WRITING] for node in nodes)
    for name in world.compute:
        world.crash(name)
    world.net.run(4.0, world.check)
    for node in nodes:
        node.check_at_rest()
    for name in world.compute:
        world.start(name)
    world.net.run(30.0, world.check)
    world.check_at_rest()


def test_what_liars_say_is_counted_and_changes_nothing() -> None:
    world = calm()
    submit(world, 8)
    world.net.run(10.0, world.check)
    (meta,) = all_of(world, MetaServer)
    directory = meta.state.directory
    before = meta.state.list_blocks(1_000, meta.now).total
    node = all_of(world, PoolServer)[0]
    for liar in all_of(world, ReportingNode):
        liar.reporter.report(false_news(NodeId(liar.name), liar.info.incarnation))
    for name, life in (("ghost", 1), (node.name, 0), (node.name, 99)):
        batch = node.reporter.next_batch()
        meta.report(_batch(name, life))
        assert batch is None or batch.node_id == node.name
    world.net.run(3.0, world.check)
    assert directory.refused_events == 5 * len(all_of(world, ReportingNode))
    assert directory.stale_batches == 3
    assert meta.state.list_blocks(1_000, meta.now).total == before
    world.check_at_rest()


def test_batches_that_come_twice_and_in_any_order_change_nothing() -> None:
    world = calm()
    world.net.faults = Faults(double=1.0, delay_s=0.05)
    submit(world, 8)
    world.net.run(20.0, world.check)
    world.net.run(8.0, world.check)
    world.check_at_rest()


def _batch(name: str, life: int) -> EventBatch:
    node, incarnation = NodeId(name), Incarnation(life)
    return EventBatch(node, incarnation, 10**6, false_news(node, incarnation), inventory=True)

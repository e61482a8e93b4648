"""The directory's benchmark fills a directory with what it says, and measures what it says."""

from __future__ import annotations

import pytest

from bench.meta_load import HOSTS, SHARED, Load, inventories, nodes
from tests.fix_bench import quick_metrics
from tierkv.kvcore.block import Tier
from tierkv.metaserver.client import NodeCoverage
from tierkv.metaserver.local import LocalMeta

pytestmark = pytest.mark.integration


async def test_the_load_is_what_it_says() -> None:
    meta, load = LocalMeta(), Load(1, 20_000)
    for host in range(HOSTS):
        for info in nodes(host):
            await meta.register(info)
        for batch in inventories(load, host):
            report = await meta.report_events(batch)
            assert (report.accepted, report.send_inventory) == (True, False)
    counts = dict(await meta.directory_counts())
    assert counts["blocks"] == load.blocks
    assert counts["copies"] == load.blocks + 2 * load.blocks // SHARED
    chain = load.chain(3, 0, load.per_host)
    reply = await meta.locate(chain)
    shared = load.per_host // SHARED
    assert (reply.prefix_blocks, reply.memory_blocks) == (len(chain), len(chain))
    assert [len(some) for some in reply.replicas] == [2] * shared + [1] * (len(chain) - shared)
    assert {r.tier for some in reply.replicas for r in some} == {Tier.L2}
    own, next_door = (nodes(host)[1].node_id for host in (3, 4))
    assert reply.coverage == (
        NodeCoverage(own, l1_blocks=shared, l2_blocks=len(chain)),
        NodeCoverage(next_door, l1_blocks=0, l2_blocks=shared),
    )
    meta.state.directory.check_invariants()
    await meta.close()


@pytest.mark.bench
def test_it_runs_and_says_its_numbers() -> None:
    metrics = quick_metrics("meta --blocks 20000", timeout=100)
    assert metrics["0.02M_copies_per_block"] == 1.4
    assert metrics["0.02M_events_per_s"] > 0 and metrics["0.02M_restart_until_right_s"] > 0

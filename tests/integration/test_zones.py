"""Two zones as processes: KV stays in its zone, is read from others, and a limit means computing.

Answers are those of a node without a cache, whatever is read from where.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fix_cluster import free_port, wait_for
from tests.fix_roles import Roles
from tests.integration.test_cluster import make_prompts
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.ring import reach_nodes
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.select import PathOptions, Transport
from tierkv.dmp.zone_traffic import ZoneTraffic
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import NodeId, ZoneId

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(300)]
PROMPTS = make_prompts(91)
ZONES = {"dmp-0": "west", "dmp-1": "east", "compute-0": "west", "compute-1": "east"}


class TwoZones(Roles):
    """A pool node and a compute node in each of two zones, no two on one host."""

    def __init__(self, folder: Path) -> None:
        zones = {
            name: [f"cluster.zone={zone}", f"cluster.host=host-of-{name}"]
            for name, zone in ZONES.items()
        }
        super().__init__(folder, zones)
        self._ports["dmp-1"] = free_port()
        self.to_east = self._proxy("dmp-1")

    def _proxies(self) -> list[object]:  # type: ignore[override]
        return [*super()._proxies(), self.to_east]

    def limit(self, name: str, rate: str) -> None:
        """Start a node again, with a limit of bytes between zones."""
        self.kill(name)
        self._more = {**self._more, name: [*self._more[name], f"cluster.cross_zone_rate={rate}"]}
        self.start(name)

    def pools(self) -> set[str]:
        """Return the pool nodes that hold the model's blocks."""
        held = (
            "SELECT DISTINCT node_id FROM tierkv.kvcache_blocks "
            "WHERE tier <> 'L1' AND model_name = 'tierkv-demo'"
        )
        return {node for (node,) in self.query(held)}

    def between_zones(self, node: str) -> tuple[int, int, int]:
        """Return a compute node's bytes from and to other zones, and the refusals."""
        (row,) = self.query(
            "SELECT DISTINCT cross_zone_bytes_in, cross_zone_bytes_out, cross_zone_refusals "
            f"FROM tierkv.stat_kvcache_node WHERE node_id = '{node}'"
        )
        return row

    def address(self, name: str) -> str:
        """Return where a node listens."""
        return f"127.0.0.1:{self._ports[name]}"

    def wait_for_blocks(self, *, tenants: int) -> None:
        """Wait until the pool has the whole blocks of the prompts, of each tenant."""
        starts = {tuple(p[:end]) for p in PROMPTS for end in range(16, len(p) + 1, 16)}
        blocks = tenants * len(starts)
        wait_for(lambda: self.in_pool() >= blocks, what=f"{blocks} blocks in the pool")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoZones]:
    roles = TwoZones(tmp_path_factory.mktemp("zones"))
    try:
        roles.start("meta")
        roles.start("dmp-0", "dmp-1", "front")
        wait_for(lambda: {"dmp-0", "dmp-1"} <= roles.nodes("zone").keys(), what="pool nodes")
        roles.start("compute-0")  # It knows both zones' pool nodes from the start.
        yield roles
    finally:
        roles.stop()


def test_kv_stays_in_its_zone_and_answers_are_equal_across_zones_and_at_the_limit(
    cluster: TwoZones,
) -> None:
    exact = [cluster.complete(prompt, cache_salt="alone") for prompt in PROMPTS]
    assert [cluster.complete(prompt) for prompt in PROMPTS] == exact
    cluster.wait_for_blocks(tenants=2)
    assert cluster.pools() == {"dmp-0"}
    assert cluster.between_zones("compute-0") == (0, 0, 0)

    cluster.kill("compute-0")
    cluster.start("compute-1")  # All KV is in the other zone now.
    assert [cluster.complete(prompt) for prompt in PROMPTS] == exact
    wait_for(lambda: cluster.between_zones("compute-1")[0] > 0, what="bytes between the zones")
    assert cluster.between_zones("compute-1")[1:] == (0, 0)

    cluster.limit("compute-1", "1B")
    assert cluster.complete(PROMPTS[0]) == exact[0]  # One load begins, and takes all there is.
    wait_for(lambda: cluster.between_zones("compute-1")[0] > 0, what="bytes between the zones")
    most, _, _ = cluster.between_zones("compute-1")
    assert [cluster.complete(prompt) for prompt in PROMPTS] == exact
    assert [cluster.complete(prompt, cache_salt="new") for prompt in PROMPTS] == exact
    wait_for(lambda: cluster.pools() == {"dmp-0", "dmp-1"}, what="new KV is in the own zone")
    assert cluster.between_zones("compute-1")[:2] == (most, 0)


def test_a_pool_client_puts_into_its_zone_and_counts_what_it_reads_elsewhere(
    cluster: TwoZones,
) -> None:
    addresses = [cluster.address("dmp-0"), cluster.address("dmp-1")]
    peers = [Peer(NodeId(""), address, "roles") for address in addresses]

    def pool_in(zone: str) -> tuple[Pool, ZoneTraffic]:
        traffic = ZoneTraffic(ZoneId(zone), clock=SystemClock())
        ring = reach_nodes(peers, PathOptions(Transport.TCP, traffic=traffic))
        return Pool(ring, SystemClock()), traffic

    (east, own), (west, other) = pool_in("east"), pool_in("west")
    with east, west:
        keys = [f"value-{i}" for i in range(20)]
        puts = east.open_puts([(key, 1_000, 1_000) for key in keys])
        opened = [put for put in puts if put is not None]
        assert all(east.write_ranges([(put, 0, b"x" * 1_000) for put in opened]))
        assert east.seal_puts(opened) == [True] * 20
        assert (own.bytes_out, own.bytes_in) == (0, 0)
        assert west.get_many(keys) == [b"x" * 1_000] * 20
        assert other.bytes_in == 20_000

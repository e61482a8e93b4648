"""What a meta server spends on knowing nodes: their heartbeats, and the lists that fronts ask for.

Run ``python -m bench.scale``. One server process (``tierkv serve meta``); this process registers
compute nodes and sends their heartbeats over gRPC, then asks for the list. CPU is the server's. The
cores that a cluster takes follow by sum: each node beats once a second, and each of 10 fronts lists
once a second. ``if_all_list`` is the same where each node lists, too, as before heartbeats told a
version of the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.many import Server, servers
from bench.report import Report, finish, make_parser
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, TierStats
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.several_meta import connect_meta

_FRONTS = 10
_MODEL = ModelInfo(
    name="Qwen3-0.6B",
    folder="/models/Qwen3-0.6B",
    revision="0123456789abcdef" * 2,
    layout=BlockLayout(28, 8, 128, KvDtype.BFLOAT16),
    context_tokens=32_768,
    eos_token_ids=(151_645, 151_643),
    architecture="Qwen3ForCausalLM",
    parameters=600_000_000,
)
_REPORT = NodeReport(
    NodeLoad(
        requests_running=40, requests_waiting=3, waiting_prefill_tokens=2_000, kv_usage=0.7,
        prefill_tokens_per_s=9e4, decode_tokens_per_s=60.0, l2_bytes_per_s=9e9,
        l3_bytes_per_s=2e9, prefill_step_s=0.01, prefill_token_s=1e-5, step_tokens=2_048,
    ),
    tiers=(TierStats(Tier.L1, "gpu memory", capacity_bytes=1 << 34, used_bytes=1 << 33),),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    arguments = parser.parse_args(argv)
    report = Report("scale")
    sizes = (10, 50) if arguments.quick else (100, 300, 1_000)
    for size in sizes:
        with servers(1) as (server,):
            asyncio.run(_measure(report, server, size, lists=5 if arguments.quick else 30))
    finish(report, arguments.format)


async def _measure(report: Report, server: Server, size: int, *, lists: int) -> None:
    meta = connect_meta(server.address)
    nodes = [
        NodeInfo(
            NodeId(f"compute-{n}"), Incarnation(1), NodeRole.COMPUTE, HostId(f"host-{n}"),
            control_address=f"10.0.0.1:{n}", models=(_MODEL,),
        )
        for n in range(size)
    ]  # fmt: skip
    for node in nodes:
        await meta.register(node)
    beat_s = await _cpu_of_beats(meta, server, nodes)
    before, began = server.cpu_s(), time.perf_counter()
    for _ in range(lists):
        assert len(await meta.list_nodes()) == size + 1  # And the server itself.
    list_s = (server.cpu_s() - before) / lists
    list_ms = 1e3 * (time.perf_counter() - began) / lists
    await meta.close()
    name = f"{size}_nodes"
    report.add(f"{name}_cpu_us_per_heartbeat", 1e6 * beat_s)
    report.add(f"{name}_cpu_ms_per_list", 1e3 * list_s)
    report.add(f"{name}_list_ms", list_ms)
    report.add(f"{name}_server_cores", size * beat_s + _FRONTS * list_s)
    report.add(f"{name}_server_cores_if_all_list", size * beat_s + (size + _FRONTS) * list_s)


async def _cpu_of_beats(meta: MetaClient, server: Server, nodes: Sequence[NodeInfo]) -> float:
    """Send rounds of heartbeats for a while; return the server's seconds for one."""
    before, beats, end = server.cpu_s(), 0, time.perf_counter() + 2.0
    while time.perf_counter() < end:
        for start in range(0, len(nodes), 50):
            some = nodes[start : start + 50]
            await asyncio.gather(
                *(meta.heartbeat(node.node_id, node.incarnation, _REPORT) for node in some)
            )
            beats += len(some)
    return (server.cpu_s() - before) / beats


if __name__ == "__main__":
    main()

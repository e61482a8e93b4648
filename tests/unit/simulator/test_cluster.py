"""Tiny clusters whose numbers can be worked out by hand, and what holds for every cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from tierkv.simulator.cluster import Cluster
from tierkv.simulator.nodes.node import LEAST, MOST, SLOWED, Noise
from tierkv.simulator.nodes.serving_model import Constants, ServingModel, load_constants
from tierkv.simulator.options import GB, ClusterOptions, Gate, RouterName
from tierkv.simulator.results import ResultLedger
from tierkv.simulator.trace import Request
from tierkv.simulator.workload import Workload, make_workload

BLOCK = 100
MODEL = ServingModel(
    description="one second per hundred tokens",
    layers=2,
    kv_heads=1,
    head_dim=125_000,  # 1 MB of KV per token: 100 MB per block
    flop_per_token=1.0,
    flop_per_pair=0.0,
    flop_per_s=100.0,
    fixed_s=0.0,
    tpot_s=0.5,
)
SHIPPED = load_constants()
CONSTANTS = Constants(
    {"tiny": MODEL},
    replace(SHIPPED.cluster, decode_harm=0.0, fetch_latency_s=0.0, write_backlog_s=1e9),
    SHIPPED.routers,
)


def request(
    at_s: float, blocks: str, *, tokens: int = 0, output: int = 1, **more: object
) -> Request:
    """Make a request; each letter is a block, and the prompt has half a block more."""
    ids = tuple(map(ord, blocks))
    return Request(at_s, tokens or len(ids) * BLOCK + BLOCK // 2, output, ids, **more)  # type: ignore[arg-type]


def workload(*requests: Request) -> Workload:
    return make_workload(requests, block_tokens=BLOCK)


def options(**more: object) -> ClusterOptions:
    plain = ClusterOptions(model="tiny", block_tokens=BLOCK, policy="leaf_lru", local_gb=100.0)
    return replace(plain, **more)  # type: ignore[arg-type]


def run(load: Workload, constants: Constants = CONSTANTS, **more: object) -> ResultLedger:
    return Cluster(load, options(**more), constants).run()


@pytest.mark.parametrize("router", [RouterName.TIERKV, RouterName.CONDUCTOR])
def test_noise_is_the_seeds_and_bounded(router: RouterName) -> None:
    load = workload(*(request(10.0 * at, "abc"[: at % 4]) for at in range(40)))
    usual, *noisy = (
        ttfts(run(load, nodes=3, router=router, noise=on, seed=seed))
        for on, seed in ((False, 1), (True, 1), (True, 1), (True, 2))
    )
    assert noisy[0] == noisy[1] != noisy[2]
    assert usual not in noisy


def test_a_prefill_takes_half_to_twice_its_time_and_more_in_a_slow_phase() -> None:
    noise = Noise(on=True, nodes=2, seed=5)
    factors = [noise.factor(0, 0.01 * at) for at in range(50_000)]
    assert min(factors) >= 0.99 * LEAST / ((MOST - LEAST) / math.log(MOST / LEAST))
    assert MOST < max(factors) <= SLOWED * MOST
    assert 1.0 < sum(factors) / len(factors) < SLOWED
    assert Noise(on=False, nodes=1, seed=5).factor(0, 9.0) == 1.0


def ttfts(ledger: ResultLedger) -> list[float]:
    return [pytest.approx(ttft, abs=1e-6) for ttft in ledger.ttfts_s]


def test_one_node_computes_one_prompt_after_the_other() -> None:
    ledger = run(workload(request(0, "ab"), request(1, "cde")))
    assert ttfts(ledger) == [2.5, 1.5 + 3.5]
    assert ledger.prefill_busy_s == pytest.approx(6.0)
    assert ledger.span_s == pytest.approx(6.0)


def test_a_known_prefix_is_not_computed_again() -> None:
    ledger = run(workload(request(0, "ab"), request(10, "abc")))
    assert ttfts(ledger) == [2.5, 1.5]
    assert (ledger.local_hit_tokens, ledger.computed_tokens) == (200, 250 + 150)
    assert ledger.local_hit_blocks == 2


def test_the_last_token_is_always_computed() -> None:
    ledger = run(workload(request(0, "ab", tokens=200), request(10, "ab", tokens=200)))
    assert ledger.local_hit_tokens == 100
    assert ttfts(ledger) == [2.0, 1.0]


def test_two_nodes_share_what_comes_at_once() -> None:
    load = workload(request(0, "ab"), request(0, "cd"))
    for router in (RouterName.TIERKV, RouterName.LEAST_WORK, RouterName.ROUND_ROBIN):
        assert ttfts(run(load, nodes=2, router=router)) == [2.5, 2.5], router


def test_without_a_pool_another_node_knows_nothing() -> None:
    load = workload(request(0, "ab"), request(10, "ab"))
    assert ttfts(run(load, nodes=2, router=RouterName.ROUND_ROBIN)) == [2.5, 2.5]


def test_a_pool_brings_blocks_to_the_other_node_layer_by_layer() -> None:
    # 200 MB at 1 GB/s take 0.2 s, 0.5 s of computing hide all but the first of two layers.
    load = workload(request(0, "ab"), request(10, "ab"))
    ledger = run(load, nodes=2, router=RouterName.ROUND_ROBIN, pool_gb=10.0, pool_gbps=1.0)
    assert ttfts(ledger) == [2.5, 0.1 + 0.5]
    assert ledger.pool_hit_tokens == 200
    assert (ledger.pool_read_bytes, ledger.pool_write_bytes) == (200_000_000, 200_000_000)


def test_a_load_slower_than_computing_is_not_made_unless_told_to() -> None:
    # 200 MB at 0.05 GB/s take 4 s.
    load = workload(request(0, "ab"), request(100, "ab"))
    slow = {"nodes": 2, "router": RouterName.ROUND_ROBIN, "pool_gb": 10.0, "pool_gbps": 0.05}
    assert ttfts(run(load, **slow)) == [2.5, 2.5]
    assert ttfts(run(load, **slow, gate=Gate.OFF)) == [2.5, 4.0 + 0.25]


def test_a_blind_gate_queues_where_a_seeing_one_computes() -> None:
    # Each load takes 1.6 s alone; the second would wait for the first.
    first = [request(0, "ab")]
    both = [request(100, "ab"), request(100, "ab")]
    load = workload(*first, *both)
    base = {"nodes": 3, "router": RouterName.ROUND_ROBIN, "pool_gb": 10.0, "pool_gbps": 0.125}
    assert ttfts(run(load, **base)) == [2.5, 1.6 + 0.25, 2.5]
    assert ttfts(run(load, **base, gate=Gate.BLIND)) == [2.5, 1.6 + 0.25, 3.2 + 0.25]


def test_writes_wait_for_loads_and_are_skipped_when_behind() -> None:
    load = workload(request(0, "ab"), request(3, "cd"), request(6, "ef"))
    tight = replace(CONSTANTS, cluster=replace(CONSTANTS.cluster, write_backlog_s=0.5))
    ledger = run(load, tight, pool_gb=10.0, pool_gbps=0.05)
    # The first write lasts from 2.5 to 6.5 s: the second, at 5.5 s, is skipped, the third is not.
    assert ledger.pool_write_bytes == 400_000_000
    assert ledger.pool_skipped_write_bytes == 200_000_000


def test_a_session_waits_for_its_answer_in_a_closed_loop() -> None:
    def turn(at_s: float, blocks: str, think_s: float | None) -> Request:
        return request(at_s, blocks, output=3, session_id="s", think_time_s=think_s)

    load = workload(turn(0, "ab", None), turn(1, "abc", 4.0), turn(2, "abcd", None))
    ledger = run(load, closed_loop=True)
    # 2.5 s prefill, 2 tokens of 0.5 s, 4 s of thinking; an unknown pause keeps the trace's gap.
    assert list(ledger.arrivals_s) == pytest.approx([0.0, 7.5, 7.5 + 1.5 + 1.0])
    assert list(run(load).arrivals_s) == [0.0, 1.0, 2.0]


def test_answers_are_delayed_by_prefills_beside_them() -> None:
    def turn(at_s: float, blocks: str, name: str) -> Request:
        return request(at_s, blocks, output=11, session_id=name, think_time_s=0.0)

    harmful = replace(CONSTANTS, cluster=replace(CONSTANTS.cluster, decode_harm=0.5))
    # Answer of 5 s from 1.5 s on; 2 s of prefill beside it cost 1 s more.
    load = workload(turn(0, "a", "s"), turn(2, "klm"[:2], "t"), turn(3, "ab", "s"))
    arrivals = run(load, harmful, closed_loop=True).arrivals_s
    assert arrivals[2] == pytest.approx(1.5 + 5.0 + 0.5 * 2.5, abs=0.01)


def test_a_slot_is_waited_for() -> None:
    narrow = replace(CONSTANTS, cluster=replace(CONSTANTS.cluster, decode_slots=1))
    load = workload(
        request(0, "a", output=11, session_id="s"),
        request(0, "b", output=11, session_id="t"),
        request(0, "bc", output=1, session_id="t", think_time_s=0.0),
    )
    arrivals = run(load, narrow, closed_loop=True).arrivals_s
    assert arrivals[2] == pytest.approx(1.5 + 5.0 + 5.0)


def test_promised_blocks_stay_until_they_are_used() -> None:
    # Two blocks of room. While "x" is computed, "ab" is promised to the third request.
    load = workload(request(0, "ab"), request(10, "x"), request(10.1, "ab"), request(30, "ab"))
    kept = run(load, local_gb=0.25)
    lost = run(load, local_gb=0.25, reserve=False)
    assert kept.local_hit_tokens == 400
    assert lost.local_hit_tokens < 400


SEEDED = Random(7)


def random_workload(requests: int = 300) -> Workload:
    """Sessions that grow, over a few shared beginnings."""
    chains = {s: [1_000_000 + s % 3] for s in range(12)}
    made: list[Request] = []
    for number in range(requests):
        session = SEEDED.randrange(12)
        chain = chains[session]
        chain.extend(1_000 * number + extra for extra in range(SEEDED.randrange(1, 4)))
        made.append(
            Request(
                number * 0.7,
                len(chain) * BLOCK + SEEDED.randrange(BLOCK),
                SEEDED.randrange(1, 20),
                tuple(chain),
                session_id=str(session),
                think_time_s=1.0,
            )
        )
        if len(chain) > 30:
            chains[session] = chain[:1]
    return make_workload(made, block_tokens=BLOCK)


LOAD = random_workload()


@pytest.mark.parametrize("router", list(RouterName))
@pytest.mark.parametrize("closed_loop", [False, True])
def test_every_router_serves_every_request_and_no_token_is_lost(
    router: RouterName, closed_loop: bool
) -> None:
    cluster = Cluster(
        LOAD,
        options(
            nodes=3,
            router=router,
            local_gb=3.0,
            pool_gb=12.0,
            pool_gbps=2.0,
            closed_loop=closed_loop,
        ),
        CONSTANTS,
    )
    ledger = cluster.run()
    assert ledger.requests == len(LOAD.prompts)
    assert ledger.refused == 0
    tokens = sum(prompt.input_tokens for prompt in LOAD.prompts)
    counted = ledger.local_hit_tokens + ledger.pool_hit_tokens + ledger.computed_tokens
    assert counted == ledger.prompt_tokens == tokens
    assert ledger.pool_hit_tokens * 1_000_000 <= ledger.pool_read_bytes
    assert min(ledger.ttfts_s) > 0.0
    for node in cluster.nodes:
        node.cache.check_invariants()
        assert (node.outstanding, node.queued_tokens, node.active_blocks) == (0, 0, 0)
    cluster.pool.cache.check_invariants()


def test_blocks_are_as_large_as_the_arithmetic_here_assumes() -> None:
    assert MODEL.layout(BLOCK).stored_bytes == 100_000_000 == GB / 10

"""The loading controller with numbers small enough to check by hand."""

from __future__ import annotations

import math

import pytest

from tierkv.costing.blend_controller import BlendWork, choose_ratio
from tierkv.costing.load_controller import Chain, Level, Prompt, Run, choose, choose_depth, makespan
from tierkv.costing.service_time import Line, StepCost
from tierkv.kvcore.block import Tier
from tierkv.kvcore.layout import KvCodec

RAW = Level(KvCodec.NONE, layer_bytes=100.0)


def prompt(**changes) -> Prompt:
    """A hundred blocks of ten tokens at one second each, and ten more tokens; ten layers."""
    fields = {
        "start": 0, "stop": 1_010, "block_tokens": 10, "layers": 10, "step_tokens": 10_000,
        "cost": StepCost(0.1),
    }  # fmt: skip
    return Prompt(**(fields | changes))


def run(blocks: int, seconds_per_block: float, **changes) -> Run:
    """A run whose blocks take so long each, all ten layers together."""
    line = Line(changes.pop("latency_s", 0.0), 1_000 / seconds_per_block)
    return Run(changes.pop("tier", Tier.L3), blocks, line, **changes)


def test_a_fast_path_is_loaded_whole_behind_the_last_tokens() -> None:
    decision = choose(prompt(), [run(100, 0.05)], [RAW])
    assert (decision.depth, decision.codec, decision.kind(100)) == (100, KvCodec.NONE, "load")
    assert decision.compute_s == pytest.approx(101.0)
    assert decision.predicted_s == pytest.approx(5 + 1 / 10)  # The last layer of 1 s computing.
    assert [name for name, _ in decision.alternatives] == ["none:100", "compute"]


def test_a_slow_path_is_not_loaded() -> None:
    decision = choose(prompt(), [run(100, 3.0, latency_s=100.0)], [RAW])
    assert (decision.depth, decision.codec, decision.choice) == (0, None, "compute")
    assert decision.predicted_s == decision.compute_s
    assert decision.alternatives[0] == ("compute", decision.compute_s)


def test_as_slow_as_computing_half_of_it_is_loaded_while_the_other_half_is_computed() -> None:
    decision = choose(prompt(), [run(100, 1.0)], [RAW])
    assert decision.depth == 50 and decision.kind(100) == "part"
    assert decision.predicted_s == pytest.approx(51 + 50 / 10)  # One layer of the load first.


def test_of_a_chain_over_two_tiers_only_the_fast_part_is_loaded() -> None:
    runs = [run(60, 0.01, tier=Tier.L2, place="a"), run(40, 30.0, tier=Tier.L4, place="b")]
    decision = choose(prompt(), runs, [RAW])
    assert decision.depth == 60
    assert choose(prompt(), [runs[0], run(40, 0.02, place="b")], [RAW]).depth == 100


def test_blocks_at_rest_are_brought_up_before_any_layer_is_read() -> None:
    resting = run(100, 0.1, promote=Line(2.0, 1_000 / 0.2))
    seconds = Chain([resting], RAW, 10).seconds(100)
    assert (seconds.promote_s, seconds.layers_s) == (pytest.approx(22.0), pytest.approx(10.0))
    assert makespan(prompt(), Chain([resting], RAW, 10), 100) == pytest.approx(22 + 10.1)


def test_runs_of_one_place_share_the_latency_of_its_calls() -> None:
    runs = [run(1, 1.0, latency_s=0.5, place=place) for place in ("a", "b", "a")]
    chain = Chain(runs, RAW, 10)
    assert [chain.seconds(depth).layers_s for depth in (1, 2, 3)] == [6.0, 12.0, 13.0]


def test_few_blocks_pay_the_latency_once_and_many_once_a_layer() -> None:
    level = Level(KvCodec.NONE, 50.0, read_bytes=1_000)  # Ten layers of two blocks are one read.
    chain = Chain([Run(Tier.L3, 100, Line(0.5, math.inf))], level, 10)
    seconds = [chain.seconds(depth).layers_s for depth in (1, 2, 4, 20, 100)]
    assert seconds == pytest.approx([0.5, 0.5, 1.0, 5.0, 5.0])


def test_what_is_ahead_of_the_node_hides_a_load() -> None:
    idle = choose(prompt(), [run(100, 0.9)], [RAW])
    busy = choose(prompt(compute_from_s=200.0), [run(100, 0.9)], [RAW])
    assert idle.depth < busy.depth == 100
    assert busy.predicted_s == pytest.approx(200 + 1)


def test_a_coarser_level_wins_on_a_slow_line_and_the_budget_asks_for_the_finer_one() -> None:
    fine, coarse = Level(KvCodec.INT8, 100.0), Level(KvCodec.INT4, 25.0)
    runs = [run(100, 0.4)]
    assert choose(prompt(), runs, [fine, coarse]).codec is KvCodec.INT4
    timely = choose(prompt(), runs, [fine, coarse], budget_s=60.0)
    assert (timely.codec, timely.depth) == (KvCodec.INT8, choose(prompt(), runs, [fine]).depth)
    assert choose(prompt(), runs, [fine, coarse], budget_s=1.0).codec is KvCodec.INT4


def test_decoding_counts() -> None:
    slow = Level(KvCodec.INT4, 25.0, decode_bytes_per_s=25 * 10 / 5.0)  # Five seconds a block.
    assert choose(prompt(), [run(100, 0.4)], [slow]).depth < 30


def test_a_partial_last_block_leaves_the_last_token_to_compute() -> None:
    handed_over = prompt(stop=1_006)  # A hundred blocks, five tokens of the next, and one more.
    decision = choose_depth(handed_over, [run(101, 0.0001)], RAW, 101)
    assert decision.predicted_s == pytest.approx(0.1, rel=0.02)


WORK = BlendWork(reused_tokens=800, min_ratio=0.15)


def test_blending_computes_the_least_when_all_is_here() -> None:
    decision = choose_ratio(prompt(stop=1_000), WORK, [], RAW)
    assert decision.recompute_ratio == 0.15
    assert decision.predicted_s == pytest.approx(0.1 * (200 + 120))
    assert decision.choice == "blend:0.15" and decision.compute_s == pytest.approx(100.0)


def test_a_slow_load_lets_more_be_computed_again_behind_it() -> None:
    decision = choose_ratio(prompt(stop=1_000), WORK, [run(80, 0.75)], RAW)
    assert decision.recompute_ratio == pytest.approx(0.5)  # 200 + 400 tokens take a minute, too.
    assert decision.predicted_s == pytest.approx(60 + 6.0)


def test_a_load_slower_than_computing_all_means_computing_all() -> None:
    decision = choose_ratio(prompt(stop=1_000), WORK, [run(80, 2.0)], RAW)
    assert decision.recompute_ratio is None
    assert decision.predicted_s == decision.compute_s == pytest.approx(100.0)


def test_passes_that_were_seen_to_be_slow_are_blended_only_while_that_is_faster() -> None:
    slow = choose_ratio(prompt(stop=1_000), WORK, [], RAW, slower=2.0)
    assert slow.predicted_s == pytest.approx(2.0 * 32) and slow.pass_s == pytest.approx(32)
    slower = choose_ratio(prompt(stop=1_000), WORK, [], RAW, slower=2.5)  # 80 s: too little won.
    assert slower.recompute_ratio is None and slower.predicted_s == pytest.approx(100.0)
    assert slower.pass_s == 0.0


def test_scanning_costs_whole_layers_and_asking_the_question_costs_a_pass() -> None:
    scanned = choose_ratio(prompt(stop=1_000), BlendWork(800, 0.15, scan_layers=2), [], RAW)
    assert scanned.predicted_s == pytest.approx(2 * 10 + 8 * 3.2)
    asked = choose_ratio(prompt(stop=1_000), BlendWork(800, 0.15, fresh_passes=1), [], RAW)
    assert asked.predicted_s == pytest.approx(32 + 20)


def test_an_infinite_rate_is_no_trouble() -> None:
    decision = choose(prompt(), [Run(Tier.L2, 100, Line(0.0, math.inf))], [RAW])
    assert decision.predicted_s == pytest.approx(1.0)

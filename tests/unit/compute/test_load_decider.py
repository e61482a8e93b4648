"""What a node measured, what it decides from that, and how it gets over a path that was slow."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fix_model import node_config
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.config import LoadPolicy
from tierkv.compute.tiers.finder import Attempt, Source
from tierkv.compute.tiers.load_decider import Ahead, LoadDecider, probe
from tierkv.compute.tiers.load_figures import (
    BLEND_PROBE_REFUSALS,
    PROBE_PAUSE_S,
    PROBE_REFUSALS,
    LoadFigures,
)
from tierkv.compute.tiers.load_log import LoadLog, LoadRecord
from tierkv.costing.blend_controller import BlendWork
from tierkv.costing.correction import Beside
from tierkv.kvcore.block import Location, Tier
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype
from tierkv.kvcore.node import LoadChoiceStats

LAYOUT = BlockLayout(layers=4, kv_heads=1, head_dim=8, dtype=KvDtype.FLOAT32, block_tokens=8)
"""One layer of a block has 512 bytes."""
BLOCKS = 10
TOKENS = 8 * BLOCKS


class Rig:
    """Figures and a decider over a pool node that is never read."""

    def __init__(self, policy: LoadPolicy = LoadPolicy.AUTO, host: str = "there") -> None:
        self.clock = ManualClock()
        self.figures = LoadFigures(LAYOUT, host=HostId("here"), clock=self.clock)
        config = node_config(load_policy=policy, load_timeout_s=30.0)
        self.decider = LoadDecider(config, LAYOUT, self.figures)
        self.node = MemoryPoolNode(host=host)

    def sources(self, tier: Tier = Tier.L3, *, rests: bool = False) -> list[tuple[Source, ...]]:
        at = Location(self.node.node_id, Incarnation(1), 0, 1, 1, LAYOUT.stored_bytes)
        key = BlockKey(bytes(16))
        one = Source(self.node, None, tier, key) if rests else Source(self.node, at, tier)
        return [(one,)] * BLOCKS

    def decide(self, sources, **changes):
        return self.decider.decide(sources, KvCodec.NONE, start=0, stop=TOKENS + 1, **changes)

    def computes(self, seconds_per_token: float) -> None:
        self.figures.steps.add(100, 100 * 50, 100 * seconds_per_token)

    def reads(self, seconds_per_block: float, tier: Tier = Tier.L3) -> None:
        for _ in range(LAYOUT.layers):
            read_s = 10 * seconds_per_block / LAYOUT.layers
            self.clock.advance(read_s)
            self.figures.read(tier, 10 * 512, read_s)


@pytest.mark.parametrize(("policy", "depth"), [("always", BLOCKS), ("never", 0), ("auto", 0)])
def test_the_policy_comes_before_the_figures(policy: str, depth: int) -> None:
    rig = Rig(LoadPolicy(policy))
    rig.computes(0.001)
    rig.reads(1.0)
    assert rig.decide(rig.sources()).depth == depth
    assert rig.decide([]).depth == 0


def test_nothing_measured_means_load() -> None:
    rig = Rig()
    decision = rig.decide(rig.sources())
    assert decision.depth == BLOCKS
    assert rig.decider.patience_s(decision.compute_s) == 30.0


def test_loads_follow_what_was_measured_of_their_tier() -> None:
    rig = Rig()
    rig.computes(0.01)
    rig.reads(0.001)
    assert rig.decide(rig.sources()).depth >= BLOCKS - 1
    for _ in range(8):
        rig.reads(1.0)
    assert rig.decide(rig.sources()).depth == 0
    assert rig.decide(rig.sources(Tier.L2)).depth >= BLOCKS - 1


def test_what_rests_costs_bringing_it_up_and_is_read_in_memory() -> None:
    rig = Rig()
    rig.computes(0.01)
    (run,) = rig.figures.runs(rig.sources(Tier.L4, rests=True))
    assert run.promote is not None and run.tier is Tier.L4
    assert run.line == rig.figures.line(Tier.L3)
    (home,) = Rig(host="here").figures.runs(rig.sources(Tier.L4, rests=True))
    assert home.line == rig.figures.line(Tier.L3)  # By the node that holds it, not by the tier.
    rig.figures.promoted(10 * LAYOUT.stored_bytes, 100.0)
    assert rig.decide(rig.sources(Tier.L4, rests=True)).depth == 0


def test_decoding_is_measured_per_codec() -> None:
    rig = Rig()
    rig.figures.decoded(KvCodec.INT4, 1_000, 1.0)
    assert rig.figures.level(KvCodec.INT4, []).decode_bytes_per_s == 1_000
    assert rig.figures.level(KvCodec.NONE, []).decode_bytes_per_s == math.inf


def test_an_avoided_path_is_probed_after_some_refusals_or_some_time() -> None:
    rig = Rig()
    rig.reads(1.0)
    sources = rig.sources()
    assert [rig.figures.refused(sources) for _ in range(PROBE_REFUSALS)].count(True) == 1
    assert not rig.figures.refused(sources)  # One probe at a time.
    rig.figures.probe_ended(sources[0][0])
    assert not rig.figures.refused(sources)
    rig.clock.advance(PROBE_PAUSE_S)
    assert rig.figures.refused(sources)


def test_a_probe_reads_little_from_a_slow_path_and_more_from_a_fast_one() -> None:
    rig = Rig()
    assert rig.figures.probe_blocks(rig.sources()) == BLOCKS
    rig.reads(10.0)
    assert rig.figures.probe_blocks(rig.sources()) == 1


def test_a_path_that_became_fast_is_used_again_after_probes() -> None:
    class Timed(MemoryPoolNode):
        def read_ranges(self, reads) -> None:
            rig.clock.advance(1e-6 * sum(len(read.destination) for read in reads))

    rig = Rig()
    rig.node = Timed()
    rig.computes(0.01)
    rig.reads(50.0)
    assert rig.decide(rig.sources()).depth == 0
    probes = 0
    while rig.decide(rig.sources()).depth == 0:
        probe(rig.sources(), rig.figures, absorb=absorbing, clock=rig.clock)
        probes += 1
        rig.clock.advance(PROBE_PAUSE_S)
    assert 1 <= probes <= 12


@contextmanager
def absorbing() -> Iterator[Attempt]:
    yield Attempt()


def test_a_load_that_was_given_up_is_remembered() -> None:
    rig = Rig()
    rig.computes(0.01)
    decision = rig.decide(rig.sources())
    assert decision.depth > 0
    patience_s = rig.decider.patience_s(decision.compute_s, decision.predicted_s)
    assert 0.5 <= patience_s < 30.0
    rig.figures.gave_up(rig.sources(), patience_s, layers_ready=0)
    assert rig.decide(rig.sources()).depth < BLOCKS // 2


def test_patience_is_a_share_of_computing_unless_more_was_predicted() -> None:
    rig = Rig()
    assert rig.decider.patience_s(8.0, 1.0) == 4.0
    assert rig.decider.patience_s(8.0, 6.0) == 9.0
    assert rig.decider.patience_s(0.01, 0.01) == 0.5


def test_a_load_waits_for_a_free_loader_and_computing_for_those_ahead() -> None:
    rig = Rig()  # Two loader threads.
    assert rig.decider.load_wait_s([5.0]) == 0.0
    assert rig.decider.load_wait_s([5.0, 3.0]) == 3.0
    assert rig.decider.load_wait_s([5.0, 3.0, 4.0]) == 4.0
    rig.computes(0.01)
    busy = rig.decide(rig.sources(), ahead=Ahead(tokens=1_000))
    assert busy.compute_s == pytest.approx(rig.decide(rig.sources()).compute_s + 10.0)


def test_saving_pays_where_loading_is_faster_than_computing() -> None:
    rig = Rig()
    ask = {"tokens": 5, "context_tokens": 500}
    assert rig.decider.worth_saving(Tier.L2, KvCodec.NONE, **ask)
    rig.computes(0.01)
    rig.reads(0.001, Tier.L2)
    assert rig.decider.worth_saving(Tier.L2, KvCodec.NONE, **ask)
    for _ in range(8):
        rig.reads(1.0, Tier.L2)
    assert not rig.decider.worth_saving(Tier.L2, KvCodec.NONE, **ask)
    assert not Rig(LoadPolicy.NEVER).decider.worth_saving(Tier.L2, KvCodec.NONE, **ask)


@pytest.mark.parametrize(("policy", "ratio"), [("always", 0.15), ("never", None), ("auto", None)])
def test_blending_over_a_slow_path(policy: str, ratio: float | None) -> None:
    rig = Rig(LoadPolicy(policy))
    rig.computes(0.01)
    rig.reads(10.0)
    work = BlendWork(reused_tokens=70, min_ratio=0.15)
    ask = {"start": 0, "stop": TOKENS + 1}
    decision = rig.decider.decide_blend(rig.sources(), KvCodec.NONE, work, **ask)
    assert decision.recompute_ratio == ratio
    here = rig.decider.decide_blend([], KvCodec.NONE, work, **ask)
    assert here.recompute_ratio == 0.15  # Nothing is loaded: the policy has nothing to say.


def test_blending_is_given_up_where_passes_take_longer_than_computing_and_tried_again() -> None:
    rig = Rig(LoadPolicy.AUTO)
    rig.computes(0.01)
    work = BlendWork(reused_tokens=70, min_ratio=0.15)
    ask = {"start": 0, "stop": TOKENS + 1}

    def blends() -> bool:
        return rig.decider.decide_blend([], KvCodec.NONE, work, **ask).recompute_ratio is not None

    assert blends()
    for _ in range(8):
        rig.figures.blended(0.1, 2.0)
    assert rig.figures.blend_slower.value > 10 and not blends()
    tries = 1
    while not blends():
        tries += 1
    assert tries == BLEND_PROBE_REFUSALS - 1
    assert not any(blends() for _ in range(BLEND_PROBE_REFUSALS - 1))  # One, not a wave.
    for _ in range(20):
        rig.figures.blended(0.1, 0.01)  # A GPU's clock says when work was handed over.
    assert rig.figures.blend_slower.value == 1.0


def test_missing_chunks_get_the_part_of_their_cost_that_a_pass_would_save() -> None:
    rig = Rig(LoadPolicy.AUTO)
    work = BlendWork(reused_tokens=70, min_ratio=0.15)
    ask = {"start": 0, "stop": TOKENS + 1, "ahead": Ahead()}
    assert rig.decider.chunk_credit(work, **ask) == 1.0, "nothing measured"
    rig.computes(0.01)
    rig.figures.blend_slower.value = 1.0
    assert rig.decider.chunk_credit(work, **ask) == pytest.approx(0.85, abs=0.01)
    rig.figures.blend_slower.value = 3.0
    assert rig.decider.chunk_credit(work, **ask) == 0.0, "no pass is worth its time"
    refusals = [rig.figures.chunks_refused() for _ in range(BLEND_PROBE_REFUSALS)]
    assert refusals == [False] * (BLEND_PROBE_REFUSALS - 1) + [True]
    always = Rig(LoadPolicy.ALWAYS)
    always.computes(0.01)
    assert always.decider.chunk_credit(work, **ask) == 1.0


def test_passes_that_took_less_than_steps_make_steps_cheaper_once_each() -> None:
    """While only passes run no step is measured: their cost would stay what it was for ever."""
    rig = Rig(LoadPolicy.AUTO)
    rig.computes(0.01)
    figures = rig.figures

    def token_s() -> float:
        assert figures.steps.cost is not None
        return figures.steps.cost.causal_seconds(0, 1)

    before, scale = token_s(), figures.steps.scale
    for _ in range(40):  # All decided before the first of them ended.
        figures.blended(1.0, 0.5, scale=scale, to_the_end=True)
    assert token_s() == pytest.approx(before / 2, rel=0.05)
    figures.blended(1.0, 0.1, scale=scale)  # A GPU's clock ends at the launch: nothing is learnt.
    assert token_s() == pytest.approx(before / 2, rel=0.05)


def decided(log: LoadLog, request_id: str, kind: str = "load") -> LoadRecord:
    return log.decided(
        request_id,
        kind=kind,
        choice="none:3",
        found_blocks=3,
        planned_s=0.5,
        alternatives=(("none:3", 0.5), ("compute", 2.0)),
        now=10.0,
        beside=Beside(),
    )


def test_what_is_predicted_follows_what_plans_of_the_same_kind_took() -> None:
    log = LoadLog()
    for _ in range(30):
        record = decided(log, "r1")
        log.ended(record, 11.5)
    assert (record.planned_s, record.predicted_s) == (0.5, pytest.approx(1.5, rel=0.05))
    assert decided(log, "r1", kind="compute").predicted_s == 0.5


def test_who_shares_a_step_waits_for_all_of_it_and_is_planned_as_alone() -> None:
    rig = Rig()
    steps = [(1, 1.0, 0.02, 1), (10, 55.0, 0.11, 1), (100, 5050.0, 1.01, 1), (100, 300.0, 1.36, 8)]
    rig.figures.steps.calibrate(steps)
    alone = rig.decide(rig.sources())
    shared = rig.decide(rig.sources(), ahead=Ahead(after=4))
    assert shared.depth == alone.depth
    own = TOKENS + 1 - alone.depth * LAYOUT.block_tokens
    later_s = shared.predicted_s - alone.predicted_s
    assert later_s == pytest.approx(4 * (0.01 * own + 0.05), rel=0.1)


def test_the_log_counts_by_kind_and_says_what_came_of_each(caplog) -> None:
    log = LoadLog()
    record, cancelled = decided(log, "r1"), decided(log, "r2")
    with caplog.at_level(logging.INFO, logger="tierkv.compute.tiers.load_log"):
        log.ended(record, 10.75)
        log.ended(cancelled, -1.0)
    assert log.stats() == (LoadChoiceStats("load", 2, 1, 0.5, 0.75, 0.25),)
    assert record.actual_s == 0.75 and math.isnan(cancelled.actual_s)
    assert list(log.recent) == [record, cancelled]
    assert (
        "request r1: found 3 blocks, chose none:3, predicted 0.5000 s, took 0.7500 s"
        in (caplog.messages[0])
    )

"""Blending on tiny random models: exact where it must be, never looking ahead, near elsewhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.fix_kitchen import Kitchen, Prompt, blend_of, make_prompt
from tests.fix_logits import BLOCK, CASES, Pair, close
from tierkv.compute.blend.plan import BlendPlan, ChunkUse, deviation, lay_out, make_selector
from tierkv.kvcore.layout import KvDtype
from tierkv.kvcore.request import BlendSelector

torch.set_num_threads(1)
SELECTORS = [*BlendSelector, "gradual"]
PROMPT = make_prompt(5, head=10, chunks=(20, 8, 17), gaps=(0, 3), end=6)


def blend_by(name, prompt: Prompt, ratio: float):
    return blend_of(prompt, ratio, "hkvd" if name == "gradual" else name, name == "gradual")


@pytest.fixture(params=["llama3-rope", "mistral", "qwen2-tied", "qwen3"])
def pair(request, tmp_path):
    return Pair(CASES[request.param], tmp_path, pages=129)


@pytest.fixture
def llama(tmp_path):
    return Pair(CASES["llama"], tmp_path, pages=257)


@pytest.mark.parametrize("selector", SELECTORS)
def test_ratio_one_equals_full_recompute(pair, selector) -> None:
    kitchen = Kitchen(pair.ours)
    _, kv = kitchen.full(PROMPT)
    plan = kitchen.plan(PROMPT, blend_by(selector, PROMPT, 1.0), exact=13, missing=(1,))
    outcome = kitchen.blend(plan)
    close(outcome.logits[0], pair.reference(list(PROMPT.ids))[-1])
    close(kitchen.kv(plan.page_table, len(PROMPT.ids)), kv)
    assert outcome.recomputed_tokens == outcome.reused_tokens == 17 + 17


def test_isolated_chunk_rotated_to_where_it_was_computed_is_the_kv_in_place(pair) -> None:
    kitchen = Kitchen(pair.ours)
    prompt = make_prompt(6, head=11, chunks=(21,), gaps=(), end=5)
    _, kv = kitchen.full(prompt)
    plan = kitchen.plan(prompt, blend_by("boundary", prompt, 1e-12))
    outcome = kitchen.blend(plan)
    assert outcome.recomputed_tokens == 0  # All 21 come from the chunk, and all are right.
    close(kitchen.kv(plan.page_table, 32), kv[:, :, :32])
    close(outcome.logits[0], pair.reference(list(prompt.ids))[-1])


def test_chunk_computed_in_two_steps_is_the_same_chunk(llama) -> None:
    kitchen = Kitchen(llama.ours)
    one = kitchen.isolate(range(9), range(30, 51))
    two = kitchen.isolate(range(9), range(30, 51), split=17)
    close(kitchen.kv(two, 21), kitchen.kv(one, 21))
    assert not kitchen.kv(one, 24)[:, :, 21:].any()  # The last block is partial, the rest zero.


def test_layer_zero_never_deviates(pair) -> None:
    kitchen = Kitchen(pair.ours)
    _, kv = kitchen.full(PROMPT)
    plan = kitchen.plan(PROMPT, blend_by("boundary", PROMPT, 1e-12))
    kitchen.blend(plan)
    blended = kitchen.kv(plan.page_table, len(PROMPT.ids))
    close(blended[0], kv[0])
    moved = torch.from_numpy(np.arange(*PROMPT.chunks[2]))  # Has other context than in isolation.
    assert (blended - kv)[1:, :, moved].abs().amax() > 0.01


@pytest.mark.parametrize("selector", SELECTORS)
def test_fresh_tokens_are_always_computed(llama, selector) -> None:
    """With nothing selected, blending equals computing the fresh tokens over the placed KV."""
    kitchen = Kitchen(llama.ours)
    plan = kitchen.plan(PROMPT, blend_by(selector, PROMPT, 1e-12), missing=(1,))
    outcome = kitchen.blend(plan, check_layer=0)
    assert outcome.recomputed_tokens == 0
    # The text behind the last chunk, computed as usual over what is in the pages now, is the same.
    table, start = plan.page_table, PROMPT.chunks[-1][1]
    kv = kitchen.kv(table, len(PROMPT.ids))
    close(kitchen.forward(PROMPT.ids, table, start), outcome.logits[0])
    close(kitchen.kv(table, len(PROMPT.ids)), kv)


def test_last_token_is_fresh_even_inside_a_chunk(llama) -> None:
    kitchen = Kitchen(llama.ours)
    prompt = Prompt(PROMPT.ids[:47], ((10, 30), (30, 47)))
    plan = kitchen.plan(prompt, blend_by("boundary", prompt, 1.0), exact=30)
    outcome = kitchen.blend(plan)
    assert outcome.reused_tokens == 16
    close(outcome.logits[0], llama.reference(list(prompt.ids))[-1])


@pytest.mark.parametrize("selector", SELECTORS)
def test_no_token_sees_a_later_one(llama, selector) -> None:
    """Perturb the last chunk: what was selected and computed before it must not change."""
    kitchen = Kitchen(llama.ours)
    plan = kitchen.plan(PROMPT, blend_by(selector, PROMPT, 0.5))
    if selector in ("hkvd", "gradual", "query"):  # Their choice may depend on it; take theirs.
        plan = dataclasses.replace(plan, blend=blend_by("boundary", PROMPT, 0.5))
    before = kitchen.blend(plan)
    start = PROMPT.chunks[-1][0]
    assert (before.selected < start).sum() >= 14
    kv = kitchen.kv(plan.page_table, start)
    late = plan.reused[-1].pages
    llama.pages.kv[:, late] += torch.randn_like(llama.pages.kv[:, late])
    after = kitchen.blend(plan)
    assert torch.equal(kitchen.kv(plan.page_table, start), kv)
    assert (after.logits - before.logits).abs().amax() > 0.01


def test_deviation_finds_the_tokens_that_changed(llama) -> None:
    """Of a first chunk in place nothing deviates; of one whose KV was damaged, the damage."""
    kitchen = Kitchen(llama.ours)
    prompt = make_prompt(6, head=8, chunks=(16, 16), gaps=(0,), end=5)
    plan = kitchen.plan(prompt, blend_by("hkvd", prompt, 4 / 32), exact=0)
    same = kitchen.isolate(prompt.ids[:24], prompt.ids[24:40])  # With all its context: exact.
    plan = dataclasses.replace(
        plan, reused=(plan.reused[0], dataclasses.replace(plan.reused[1], pages=same))
    )
    damaged = [3, 11, 17, 30]  # Tokens of the two chunks, counted from 8.
    for at in damaged:
        use = plan.reused[at // 16]
        page, row = use.pages[at % 16 // BLOCK], at % BLOCK
        llama.pages.kv[:, page, :, row] += 0.5
    outcome = kitchen.blend(plan)
    assert outcome.selected.tolist() == [8 + at for at in damaged]
    close(outcome.logits[0], llama.reference(list(prompt.ids))[-1])


def test_deviation_weighs_keys_and_values_alike() -> None:
    base = torch.zeros(3, 1, 2)
    keys, values = base.clone(), base.clone()
    keys[0] = 100.0
    values[2] = 0.01
    found = deviation((keys, values), (base, base))
    torch.testing.assert_close(found, torch.tensor([3.0, 0.0, 3.0]))
    assert not deviation((base, base), (base, base)).any()


def test_query_selects_what_the_question_attends_to(llama) -> None:
    kitchen = Kitchen(llama.ours)
    plan = kitchen.plan(PROMPT, blend_by("query", PROMPT, 0.2))
    for use in plan.reused:  # Keys that no question can overlook, for three tokens.
        llama.pages.kv[:, use.pages, 0] *= 0.01
    loud = [2, 25, 40]
    targets = lay_out(plan, BLOCK)
    for at in loud:
        row = int(targets.sources[targets.reused[at]])
        for layer in range(llama.arch.layers):
            llama.pages.token_rows(layer)[row] = 30.0
    outcome = kitchen.blend(plan)
    assert outcome.recomputed_tokens == 9
    assert len(set(targets.reused[loud].tolist()) & set(outcome.selected.tolist())) >= 2


def test_boundary_selects_the_first_tokens_of_each_chunk(llama) -> None:
    kitchen = Kitchen(llama.ours)
    plan = kitchen.plan(PROMPT, blend_by("boundary", PROMPT, 0.25), exact=14)
    selected = kitchen.blend(plan).selected.tolist()
    assert selected == [14, 15, 16, 17, 30, 31, *range(41, 46)]


def test_gradual_filtering_never_grows_and_averages_the_ratio() -> None:
    uses = tuple(ChunkUse(a, b - a, np.arange(1, 5)) for a, b in PROMPT.chunks)
    for ratio in (0.05, 0.15, 0.5, 0.8, 1.0):
        blend = blend_by("gradual", PROMPT, ratio)
        plan = BlendPlan(np.array(PROMPT.ids), 0, np.arange(5, 15), uses, blend)
        selector = make_selector(plan, lay_out(plan, BLOCK), layers=12, check_layer=1)
        keep = [selector.keep_at(layer) for layer in range(12)]
        assert keep[0] is None and keep[1:] == sorted(keep[1:], reverse=True)
        assert np.mean(keep[1:]) == pytest.approx(45 * ratio, abs=1)


@pytest.mark.parametrize("selector", SELECTORS)
def test_bfloat16_stays_near_full_recompute(selector, tmp_path) -> None:
    pair = Pair(CASES["qwen3"], tmp_path, dtype=KvDtype.BFLOAT16, pages=129)
    kitchen = Kitchen(pair.ours)
    want, _ = kitchen.full(PROMPT)
    outcome = kitchen.blend(kitchen.plan(PROMPT, blend_by(selector, PROMPT, 1.0), exact=13))
    assert (outcome.logits[0] - want).norm() <= 0.03 * want.norm()
    less = kitchen.blend(kitchen.plan(PROMPT, blend_by(selector, PROMPT, 0.3), exact=13))
    assert torch.isfinite(less.logits).all()

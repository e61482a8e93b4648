"""What every Selector does, numbered as in compute/blend/plan.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_kitchen import Kitchen, Prompt, blend_of, make_prompt
from tests.fix_model import node_config
from tierkv.compute.blend.plan import (
    BlendPlan,
    ChunkUse,
    PlanRows,
    Selector,
    first_read,
    lay_out,
    make_selector,
)
from tierkv.compute.loading import load_model
from tierkv.kvcore.request import BlendSelector

BLOCK = 8
NAMES = [*BlendSelector, "gradual"]
RATIOS = st.floats(1e-3, 1.0)
LAYERS = st.integers(1, 40)
PROMPT = make_prompt(5, head=10, chunks=(20, 8, 17), gaps=(0, 3), end=6)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    chunks = draw(st.lists(st.integers(1, 23), min_size=1, max_size=4))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(chunks) - 1, max_size=len(chunks) - 1))
    head, end = draw(st.integers(0, 12)), draw(st.integers(0, 6))
    return make_prompt(draw(st.integers(0, 99)), head, chunks, gaps, end)


def selector_of(name: str, prompt: Prompt, ratio: float, layers: int) -> tuple[Selector, PlanRows]:
    """Return a selector, and the tokens among which it chooses."""
    uses = tuple(ChunkUse(a, b - a, np.arange(1, 4)) for a, b in prompt.chunks)
    blend = blend_by(name, prompt, ratio)
    plan = BlendPlan(np.array(prompt.ids), 0, np.arange(4, 40), uses, blend)
    rows = lay_out(plan, BLOCK)
    return make_selector(plan, rows, layers=layers), rows


def blend_by(name: str, prompt: Prompt, ratio: float):
    return blend_of(prompt, ratio, "hkvd" if name == "gradual" else name, name == "gradual")


def begin(selector: Selector, rows: PlanRows) -> list[int]:
    return selector.begin(torch.rand(len(rows.reused)) if selector.scouts else None).tolist()


@pytest.fixture
def kitchen() -> Kitchen:
    return Kitchen(load_model(node_config()).decoder)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(prompt=prompts(), ratio=RATIOS, layers=LAYERS)
def test_1_it_begins_with_some_of_the_reused_tokens_in_order(name, prompt, ratio, layers) -> None:
    selector, rows = selector_of(name, prompt, ratio, layers)
    active = begin(selector, rows)
    assert active == sorted(set(active)) and set(active) <= set(range(len(rows.reused)))


@pytest.mark.parametrize("name", NAMES)
def test_2_only_who_scouts_is_told_of_the_questions_attention(name, kitchen, monkeypatch) -> None:
    told: list[torch.Tensor | None] = []

    def make(plan, rows, **how):
        selector = make_selector(plan, rows, **how)
        plain = selector.begin
        selector.begin = lambda attention: (told.append(attention), plain(attention))[1]
        return selector

    monkeypatch.setattr("tierkv.compute.blend.passes.make_selector", make)
    plan = kitchen.plan(PROMPT, blend_by(name, PROMPT, 0.3))
    kitchen.blend(plan)
    (attention,) = told
    assert (attention is not None) is selector_of(name, PROMPT, 0.3, layers=3)[0].scouts
    if attention is not None:
        assert attention.shape == (len(lay_out(plan, BLOCK).reused),)
        assert attention.dtype is torch.float32 and (attention >= 0).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(prompt=prompts(), ratio=RATIOS, layers=LAYERS)
def test_3_fewer_tokens_stay_from_layer_to_layer(name, prompt, ratio, layers) -> None:
    selector, rows = selector_of(name, prompt, ratio, layers)
    kept = [len(begin(selector, rows))]
    for layer in range(layers):
        keep = selector.keep_at(layer)
        kept.append(kept[-1] if keep is None else keep)
    assert kept == sorted(kept, reverse=True)
    chosen, share = kept[1 + selector.first_read], ratio * len(rows.reused)
    assert chosen >= share - 1e-6
    if name in (BlendSelector.HKVD, BlendSelector.QUERY):
        assert chosen < share + 1
    elif name == BlendSelector.BOUNDARY:  # Of each chunk; the prompt's last token is fresh.
        lengths = [min(b, len(prompt.ids) - 1) - a for a, b in prompt.chunks]
        assert chosen == sum(math.ceil(ratio * length - 1e-9) for length in lengths)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(prompt=prompts(), ratio=RATIOS, layers=LAYERS)
def test_4_all_are_computed_before_the_first_layer_that_is_read(
    name, prompt, ratio, layers
) -> None:
    selector, rows = selector_of(name, prompt, ratio, layers)
    assert selector.first_read == first_read(blend_by(name, prompt, ratio), layers) < layers
    if selector.first_read:
        assert len(begin(selector, rows)) == len(rows.reused)
        assert {selector.keep_at(layer) for layer in range(selector.first_read)} == {None}


@pytest.mark.parametrize("name", NAMES)
def test_4_kv_of_chunks_before_that_layer_is_not_needed(name, kitchen) -> None:
    plan = kitchen.plan(PROMPT, blend_by(name, PROMPT, 0.3))
    want = kitchen.blend(plan).logits
    selector, _ = selector_of(name, PROMPT, 0.3, layers=kitchen.decoder.arch.layers)
    for use in plan.reused:
        kitchen.decoder.pages.kv[: selector.first_read, use.pages] = torch.nan
    assert torch.equal(kitchen.blend(plan).logits, want)

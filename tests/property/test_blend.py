"""Any layout of chunks, gaps, misses, exact prefix: ratio 1 is exact, no token sees a later one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_kitchen import Kitchen, Prompt, make_prompt
from tests.fix_logits import BLOCK, CASES, Pair, close
from tierkv.compute.blend.plan import lay_out
from tierkv.kvcore.request import Blend, BlendSelector

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama3-rope", "mistral", "qwen2-tied", "qwen3"])
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    yield Pair(CASES[request.param], tmp_path_factory.mktemp(request.param), pages=129)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    chunks = draw(st.lists(st.integers(1, 23), min_size=1, max_size=4))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(chunks) - 1, max_size=len(chunks) - 1))
    head, end = draw(st.integers(0, 12)), draw(st.integers(0, 6))
    return make_prompt(draw(st.integers(0, 99)), head, chunks, gaps, end)


SELECTORS = st.sampled_from([*BlendSelector, "gradual"])


def blend_by(prompt: Prompt, ratio: float, selector) -> Blend:
    if selector == "gradual":
        return Blend(prompt.chunks, ratio, BlendSelector.HKVD, gradual=True)
    return Blend(prompt.chunks, ratio, selector, gradual=False)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    prompt=prompts(),
    selector=SELECTORS,
    exact=st.floats(0, 1),
    missing=st.sets(st.integers(0, 3)),
    check_layer=st.integers(0, 3),
)
def test_ratio_one_is_a_full_recompute(pair, prompt, selector, exact, missing, check_layer) -> None:
    kitchen = Kitchen(pair.ours)
    _, kv = kitchen.full(prompt)
    exact_tokens = int(exact * (len(prompt.ids) - 1))
    blend = blend_by(prompt, 1.0, selector)
    plan = kitchen.plan(prompt, blend, exact=exact_tokens, missing=missing)
    outcome = kitchen.blend(plan, check_layer=check_layer)
    close(outcome.logits[0], pair.reference(list(prompt.ids))[-1])
    close(kitchen.kv(plan.page_table, len(prompt.ids)), kv)
    assert outcome.recomputed_tokens == outcome.reused_tokens == len(lay_out(plan, BLOCK).reused)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(prompt=prompts(), ratio=st.floats(0.01, 0.9), cut=st.integers(0, 3), seed=st.integers(0, 99))
def test_no_token_sees_a_later_chunk(pair, prompt, ratio, cut, seed) -> None:
    kitchen = Kitchen(pair.ours)
    plan = kitchen.plan(prompt, blend_by(prompt, ratio, BlendSelector.BOUNDARY))
    late = plan.reused[cut % len(plan.reused)]
    kitchen.blend(plan)
    before = kitchen.kv(plan.page_table, late.start)
    generator = torch.Generator().manual_seed(seed)
    kv = pair.pages.kv[:, late.pages]
    pair.pages.kv[:, late.pages] = kv + torch.randn(kv.shape, generator=generator)
    kitchen.blend(plan)
    assert torch.equal(kitchen.kv(plan.page_table, late.start), before)

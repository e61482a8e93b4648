"""Bias, penalties and tokens held back, against a slow reference; draws among fewer tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_model import make_request
from tierkv.compute.batching.logit_edits import LogitEdits
from tierkv.compute.batching.sampler import Draw, Sampler, apply_edits, logprobs_of
from tierkv.kvcore.request import GenerateRequest, SamplingParams

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
NUMBERS = st.floats(-2, 2, width=32)
SAMPLINGS = st.builds(
    SamplingParams,
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    repetition_penalty=st.floats(0.125, 2, width=32),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    min_tokens=st.integers(0, 6),
)
ENDS = (3, 7)


def reference(
    row: list[float], sampling: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    """Return the changed logits, one token at a time, in float32."""
    out = []
    for token, logit in enumerate(np.array(row, dtype=np.float32)):
        logit = np.float32(logit) + np.float32(dict(sampling.logit_bias).get(token, 0.0))
        if token in prompt or token in answer:
            repetition = np.float32(sampling.repetition_penalty)
            logit = logit / repetition if logit > 0 else logit * repetition
        times = answer.count(token)
        logit = logit - np.float32(sampling.frequency_penalty) * np.float32(times)
        logit = logit - np.float32(sampling.presence_penalty if times else 0.0)
        if len(answer) < sampling.min_tokens and token in ENDS:
            logit = np.float32(-np.inf)
        out.append(float(logit))
    return out


def request(prompt: list[int], sampling: SamplingParams, resumed: int = 0) -> GenerateRequest:
    return replace(make_request(prompt), sampling=sampling, resumed_tokens=resumed)


def edited(rows: torch.Tensor, *edits) -> torch.Tensor:
    changed = rows.clone()
    apply_edits(changed, list(enumerate(edits)))
    return changed


@settings(deadline=None)
@given(
    sampling=SAMPLINGS,
    other=SAMPLINGS,
    prompt=st.lists(TOKENS, min_size=1, max_size=8),
    answer=st.lists(TOKENS, max_size=8),
    step=st.integers(1, 3),
    row=st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB),
)
def test_edits_equal_the_reference_at_every_token(
    sampling: SamplingParams,
    other: SamplingParams,
    prompt: list[int],
    answer: list[int],
    step: int,
    row: list[float],
) -> None:
    tokens = np.array(prompt + answer + [0], dtype=np.int64)
    going = LogitEdits(request(prompt, sampling), ENDS)
    mate = LogitEdits(request(prompt, other), ENDS)
    rows = torch.tensor([row, row])
    for count in range(0, len(answer) + 1, step):
        length = len(prompt) + count
        both = edited(rows, going.at(tokens, length), mate.at(tokens, length))
        want = reference(row, sampling, prompt, answer[:count])
        assert both[0].tolist() == pytest.approx(want, rel=1e-6, abs=1e-5)
        # Another node that resumes the answer, and one that has no batch mate, agree to the bit.
        resumed = LogitEdits(request([*tokens[:length]], sampling, resumed=count), ENDS)
        assert torch.equal(edited(rows[:1], resumed.at(tokens, length))[0], both[0])


def test_a_prompt_counts_for_repetition_only() -> None:
    tokens = np.array([1, 1, 2], dtype=np.int64)
    rows = torch.ones(1, 4)
    counted = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    assert edited(rows, LogitEdits(request([1, 1], counted), ()).at(tokens, 3)).tolist() == [
        [1.0, 1.0, -0.5, 1.0]
    ]
    repeated = SamplingParams(repetition_penalty=2.0)
    assert edited(rows, LogitEdits(request([1, 1], repeated), ()).at(tokens, 3)).tolist() == [
        [1.0, 0.5, 0.5, 1.0]
    ]


def test_greedy_answers_obey_edits_and_the_logits_stay() -> None:
    rows = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(3, 1)
    tokens = np.array([0, 1], dtype=np.int64)
    banned = LogitEdits(request([0], SamplingParams(logit_bias=((1, -100.0),))), ())
    held = LogitEdits(request([0], SamplingParams(min_tokens=2)), (1, 2))
    draws = [
        Draw(0.0, 1.0, 0, 0, edits=banned.at(tokens, 1)),
        Draw(0.0, 1.0, 0, 0, edits=held.at(tokens, 2)),
        Draw(0.0, 1.0, 0, 0),
    ]
    assert Sampler().sample(rows, draws) == [2, 3, 1]
    draws[1] = Draw(0.0, 1.0, 0, 0, edits=held.at(np.array([0, 1, 3]), 3))
    assert Sampler().sample(rows, draws) == [2, 1, 1]
    assert torch.equal(rows, torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(3, 1))


def test_many_seen_tokens_get_more_room() -> None:
    prompt = list(range(500))
    edits = LogitEdits(request(prompt, SamplingParams(repetition_penalty=2.0)), ())
    got = edits.at(np.array([*prompt, 7, 7]), 502)
    assert sorted(got.seen.tolist()) == prompt
    assert dict(zip(got.seen.tolist(), got.counts.tolist(), strict=True))[7] == 2.0


LOGITS = torch.tensor([[0.1, 2.0, 1.9, -3.0]])
CHANCES = torch.softmax(LOGITS[0], -1)


def drawn(count: int, **how: float) -> Counter:
    fixed = {"temperature": 1.0, "top_p": 1.0, "seed": 11} | how
    draws = (Draw(index=index, **fixed) for index in range(count))
    return Counter(Sampler().sample(LOGITS, [draw])[0] for draw in draws)


def test_top_k_and_min_p_keep_the_most_likely() -> None:
    assert set(drawn(300, top_k=2)) == {1, 2}
    assert set(drawn(50, top_k=1, temperature=2.0)) == {1}
    assert set(drawn(600, top_k=4)) == set(drawn(600)) == {0, 1, 2, 3}
    assert set(drawn(300, min_p=0.1)) == {0, 1, 2}
    assert set(drawn(300, min_p=0.5)) == {1, 2}
    assert set(drawn(50, min_p=1.0)) == {1}
    assert set(drawn(50, top_k=1_000_000, min_p=1.0)) == {1}


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    """Tokens 1 and 2 have 0.54 and 0.46 of the mass that two tokens have, and less of all."""
    share = float(CHANCES[1] / (CHANCES[1] + CHANCES[2]))
    assert float(CHANCES[1]) < share - 0.02
    assert set(drawn(100, top_k=2, top_p=share - 0.01)) == {1}
    assert set(drawn(300, top_p=share - 0.01)) == {1, 2}


def test_what_is_kept_is_drawn_by_its_chance() -> None:
    got = drawn(2_000, top_k=3)
    want = CHANCES[:3] / CHANCES[:3].sum() * 2_000
    assert all(abs(got[token] - float(want[token])) < 100 for token in range(3))


def test_equal_logits_are_cut_at_k_by_id() -> None:
    rows = torch.zeros(1, 5)
    seen = {Sampler().sample(rows, [Draw(1.0, 1.0, 1, i, top_k=2)])[0] for i in range(100)}
    assert seen == {0, 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.5),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((i, 1.0) for i in range(1_025))),
        ("min_tokens", 513),
        ("logprobs", 21),
    ],
)
def test_sampling_out_of_bounds_is_refused(field: str, value: object) -> None:
    name = "top_logprobs" if field == "logprobs" else field
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{field: value})


def test_logprobs_are_of_the_whole_vocabulary() -> None:
    rows = torch.tensor([[1.0, 1.0, 0.0, -5.0], [0.0, 0.0, 0.0, 4.0]])
    want = torch.log_softmax(rows, -1)
    first, second = logprobs_of(rows, [2, 3], [2, 0])
    assert first.logprob == pytest.approx(float(want[0, 2]))
    assert first.top == (
        (0, pytest.approx(float(want[0, 0]))),
        (1, pytest.approx(float(want[0, 1]))),
    )
    assert second.logprob == pytest.approx(float(want[1, 3])) and second.top == ()
    (all_of_them,) = logprobs_of(rows[:1], [0], [20])
    assert [token for token, _ in all_of_them.top] == [0, 1, 2, 3]

"""Sampling in the words of each engine's API; what an API has no word for is not claimed."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.integrations.remote.answering import may_continue
from tierkv.integrations.remote.door import EngineKind, EngineRequest, RemoteConfig
from tierkv.integrations.remote.openai_http import OpenAiDoor
from tierkv.integrations.remote.sglang_http import generate_body
from tierkv.integrations.remote.vllm_http import VllmDoor
from tierkv.kvcore.ids import HostId, NamespaceKey, NodeId, RequestId
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import OPTIONAL_FIELDS, GenerateRequest, SamplingParams
from tierkv.parts.engine_part import open_door

SHAPED = SamplingParams(
    max_tokens=9,
    top_k=4,
    min_p=0.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias=((5, 2.0), (7, -100.0)),
    min_tokens=6,
)


def ask(sampling: SamplingParams, **changes: Any) -> EngineRequest:
    request = GenerateRequest(
        RequestId("q"),
        "m",
        tuple(b"Hello"),
        NamespaceKey(bytes(32)),
        sampling=sampling,
        **changes,
    )
    return EngineRequest(request, "m", "salt", max_tokens=9)


def config(kind: EngineKind) -> RemoteConfig:
    return RemoteConfig(NodeId("n"), HostId("h"), NodeRole.COMPUTE, kind, "http://127.0.0.1:1")


def body(kind: EngineKind, asked: EngineRequest) -> dict[str, Any]:
    door = open_door(config(kind))
    if isinstance(door, VllmDoor):
        return door._body(asked)
    if isinstance(door, OpenAiDoor):
        return door._body(asked)[1]
    return generate_body(asked)["sampling_params"]  # type: ignore[no-any-return]


SHARED = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 2.0, "7": -100.0},
}
OWN = {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5}


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (EngineKind.VLLM, SHARED | OWN | {"min_tokens": 6}),
        (EngineKind.SGLANG, SHARED | OWN | {"min_new_tokens": 6}),
        (EngineKind.OPENAI, SHARED),
    ],
)
def test_every_field_that_is_taken_is_sent(kind: EngineKind, want: dict[str, Any]) -> None:
    sent = body(kind, ask(SHAPED))
    assert {name: sent[name] for name in want} == want
    plain = body(kind, ask(SamplingParams(max_tokens=9)))
    assert not {"logit_bias", "min_tokens", "min_new_tokens"} & set(plain)
    taken = open_door(config(kind)).sampling_fields
    told = {"min_tokens" if name == "min_new_tokens" else name for name in want}
    assert set(taken) == told and set(taken) < set(OPTIONAL_FIELDS)


def test_what_was_written_before_counts_for_min_tokens() -> None:
    asked = ask(SamplingParams(max_tokens=9, min_tokens=6), resumed_tokens=4)
    assert body(EngineKind.VLLM, asked)["min_tokens"] == 2
    assert body(EngineKind.SGLANG, asked)["min_new_tokens"] == 2


def test_an_answer_whose_tokens_count_is_not_continued_elsewhere() -> None:
    """For the engine they would be prompt, which these penalties do not count."""
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert not may_continue(ask(SamplingParams(**{penalty: 0.5})).request)
    assert may_continue(ask(SamplingParams(repetition_penalty=1.5, min_tokens=2)).request)

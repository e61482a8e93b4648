"""What a node of ours sends to SGLang's ``/generate``, read by SGLang's own request classes.

A running server needs a GPU, so replies are only compared with the fields of the same classes.
"""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams as TheirParams

from tierkv.integrations.keys import TenantSalt, identity_digest
from tierkv.integrations.remote.door import Counts, EngineRequest
from tierkv.integrations.remote.sglang_http import counts_of_meta, generate_body, score_body
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.request import GenerateRequest, HitTokens, SamplingParams

SALT = str(TenantSalt(NamespaceKey(bytes(range(32))), identity_digest("r:f")))


def ask(**changes: Any) -> EngineRequest:
    fields: dict[str, Any] = {
        "request_id": RequestId("q:2"),
        "model": "m",
        "token_ids": tuple(range(40)),
        "namespace_key": NamespaceKey(bytes(32)),
    }
    request = GenerateRequest(**(fields | changes))
    return EngineRequest(request, served="m", salt=SALT, max_tokens=7)


def read(body: dict[str, Any]) -> tuple[GenerateReqInput, TheirParams]:
    """Do what the server does with a body before it is queued."""
    asked = GenerateReqInput(**body)
    asked.normalize_batch_and_arguments()
    params = TheirParams(**asked.sampling_params)
    params.normalize(None)
    params.verify(1_000)
    return asked, params


def test_a_greedy_answer() -> None:
    sampling = SamplingParams(max_tokens=7, stop_token_ids=(5, 6), ignore_eos=True)
    asked, params = read(generate_body(ask(sampling=sampling, session_id="s-1")))
    assert asked.is_single and asked.stream and list(asked.input_ids) == list(range(40))
    assert (asked.rid, asked.cache_salt, asked.session_id) == ("q:2", SALT, "s-1")
    # Greedy is top_k = 1 to SGLang once it has normalised a temperature of 0.
    assert params.top_k == 1 and params.max_new_tokens == 7 and params.ignore_eos
    assert set(params.stop_token_ids) == {5, 6}


def test_a_drawn_answer_of_a_schema() -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.9, seed=(1 << 63) + 5)
    _, params = read(generate_body(ask(sampling=sampling, guide='{"type":"string"}')))
    assert (params.temperature, params.top_p) == (0.5, 0.9)
    assert params.sampling_seed == 5 and params.json_schema == '{"type":"string"}'


def test_chances_of_tokens() -> None:
    asked, params = read(score_body(ask(score_token_ids=(9, 8, 9))))
    assert asked.return_logprob and asked.token_ids_logprob == [9, 8] and not asked.stream
    assert params.max_new_tokens == 1 and asked.logprob_start_len == -1


@pytest.mark.parametrize(
    ("meta", "want"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 0}, Counts(9, 2)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "cached_tokens": 7,
                "cached_tokens_details": {"device": 4, "host": 2, "storage": 1},
            },
            Counts(9, 2, HitTokens(l1=4, l2=2, l3=1)),
        ),
        ({}, Counts(0, 0)),
    ],
)
def test_cached_tokens_by_where_they_were(meta: dict[str, Any], want: Counts) -> None:
    assert counts_of_meta(meta) == want

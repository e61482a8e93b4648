"""Each reducer of ended calls and requests, told events by hand: exact numbers."""

from __future__ import annotations

import pytest

from tests.fix_accounts import USAGE, make_answer, make_call, make_failed_call, make_request
from tests.fix_sql import make_model
from tests.fix_text import text_call
from tierkv.dbfront.accounts.ended_call import CallCost, CallEnd, EndedCall, end_of
from tierkv.dbfront.accounts.statement_entry import LoggedStatements, StatementEntry, hour_of
from tierkv.dbfront.accounts.statement_trace import FormTrace, StatementTrace
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import ClientInfo, PlanSummary, PreparedCall
from tierkv.dbfront.generation.forecast_inputs import AnswerLengths
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.statement.error_policy import ErrorPolicy, Failures, Spending
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import RowLevelError, SqlError
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.request import FinishReason, GenerateRequest, HitTokens, SamplingParams, Usage

NOON = 1_700_049_600.0
TWO = (make_answer(), make_answer(ttft_s=0.5, node_id="n2", finish_reason=FinishReason.LENGTH))
DOUBLE = Usage(200, 14, HitTokens(l1=32, l3=64), 96, blended_tokens=10, recomputed_tokens=4)


def prepared(**asked: object) -> PreparedCall:
    call = text_call(prompt="x", **asked)
    request = GenerateRequest(
        RequestId("r"), "tiny", (1,), NamespaceKey(bytes(32)), "team", SamplingParams(max_tokens=9)
    )
    return PreparedCall(call, make_model(), request)


def test_a_cost_adds_up_answers() -> None:
    assert CallCost.of(()) == CallCost()
    assert CallCost.of(TWO[:1]) == CallCost(USAGE, (0.25,), 1.5, ("n1",))
    assert CallCost.of(TWO) == CallCost(DOUBLE, (0.25, 0.5), 3.0, ("n1", "n2"))
    assert [end_of(()), end_of(TWO[:1]), end_of(TWO)] == [
        CallEnd.STOP,
        CallEnd.STOP,
        CallEnd.LENGTH,
    ]


def test_counters_of_a_statement() -> None:
    stats = AiStats()
    for call in (make_call(*TWO), make_call(), make_failed_call(), make_call(is_local=True)):
        stats.take(call)
    assert stats == AiStats(
        distinct_calls=3,
        requests=2,
        errors=1,
        prompt_tokens=200,
        completion_tokens=14,
        hit_tokens=HitTokens(l1=32, l3=64),
        blended_tokens=10,
        recomputed_tokens=4,
        ttft_sum_s=0.75,
    )


def test_a_local_call_that_fails_is_an_error() -> None:
    stats = AiStats()
    stats.take(make_failed_call(is_local=True))
    assert stats == AiStats(distinct_calls=1, errors=1)


def test_counters_of_forms_and_nodes() -> None:
    trace = StatementTrace([0, 1])
    trace.ran({0: 2, 1: 1}, engine_s=0.5)
    trace.batch_begins([0, 0, 1], now_s=10.0)
    trace.take(make_call(*TWO, retries=2, ended_s=11.0))
    trace.take(make_call(make_answer(), ended_s=12.5))
    trace.take(make_failed_call(form=1, retries=1, ended_s=13.0))
    trace.batch_ended(PlanSummary(1, 30), model_s=3.0)
    first, second = trace.forms[0], trace.forms[1]
    assert (first.asked, first.requests, first.errors, first.retries) == (2, 3, 0, 2)
    assert (first.prompt_tokens, first.completion_tokens) == (300, 21)
    assert first.hit_tokens == HitTokens(l1=48, l3=96)
    assert (first.ttft_s.tolist(), first.wall_s) == ([0.25, 0.5, 0.25], 2.5)
    assert second == FormTrace(asked=1, errors=1, retries=1, wall_s=3.0)
    assert trace.nodes == {"n1": 2, "n2": 1}
    assert trace.rounds[0].plan == PlanSummary(1, 30)


def test_generated_tokens_are_spent() -> None:
    spending = Spending(ErrorPolicy(max_completion_tokens=14))
    call = prepared(max_tokens=9)
    spending.add_wave([call])
    spending.take(make_call(make_answer()))
    with pytest.raises(SqlError, match="at least 16 tokens to generate"):
        spending.add_wave([call])


def test_failures_are_warned_of_once_per_message() -> None:
    failures = Failures(ErrorPolicy(max_error_ratio=0.5), writes=False)
    taken = [make_failed_call("a"), make_failed_call("b"), make_failed_call("a")]
    for call in [*taken, make_call(), make_failed_call("a value says so", is_null=False)]:
        failures.take(call)
    failures.check(RowLevelError("a"), 6)
    (notice,) = failures.notices(6)
    assert notice.message == "3 of 6 AI calls failed and gave NULL: a; b"
    with pytest.raises(SqlError, match="3 of 5 AI calls failed"):
        failures.check(RowLevelError("a"), 5)


def test_a_write_fails_with_its_first_failure() -> None:
    failures, error = Failures(ErrorPolicy(), writes=True), RowLevelError("no")
    with pytest.raises(RowLevelError) as caught:
        failures.check(error, 100)
    assert caught.value is error


def booked(*calls: EndedCall) -> tuple[list[dict[str, object]], ...]:
    store, clock = StatisticStore(now_s=NOON), ManualClock(0.0, epoch=NOON)
    entry = StatementEntry(
        store, clock, LoggedStatements.OFF, client=ClientInfo("ann"), pid=1, text="SELECT 1"
    )
    for call in calls:
        entry.take(call)
    tables = ("functions", "first_tokens", "usage")
    rows = tuple(store.select(f"SELECT * FROM {name}", NOON) for name in tables)
    store.close(NOON)
    return rows


def test_statistics_of_functions_and_hours() -> None:
    functions, first_tokens, usage = booked(
        make_call(*TWO, retries=1),
        make_call(make_answer(ttft_s=0.0), is_null=True),
        make_failed_call(retries=2),
        make_call(is_local=True),
    )
    tokens = {"prompt_tokens": 300, "cached_tokens": 144, "completion_tokens": 21}
    counted = {"calls": 3, "errors": 1, **tokens}
    named = {"function_name": "ai_generate", "model_name": "tiny", "last_s": NOON}
    times = {"total_time": 4500.0, "answered": 2, "ttft_time": 750.0}
    others = {"rows": 0, "retries": 3, "null_results": 2, "classified_calls": 0}
    assert functions == [named | counted | times | others]
    assert [row["answers"] for row in first_tokens] == [1, 1]
    facts = {"user_name": "ann", "query_tag": "", "is_completed": 0}
    assert usage == [named | counted | facts | {"start_s": hour_of(NOON), "query_id": "s1"}]


def test_metrics_of_requests() -> None:
    metrics = Metrics()
    metrics.take(make_request())
    metrics.take(make_request(end=CallEnd.LENGTH, ttft_s=0.0))
    metrics.take(make_request(end=CallEnd.FAILED, usage=None, ttft_s=0.0))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"tierkv_{name}", {"model": "tiny", **labels})

    ends = {end: value("requests_total", outcome=end) for end in CallEnd}
    assert ends == {"stop": 1, "length": 1, "cancelled": 0, "failed": 1}
    assert (value("prompt_tokens_total"), value("completion_tokens_total")) == (200, 14)
    hits = [value("hit_tokens_total", tier=tier) for tier in ("L1", "L2", "L3", "L4")]
    assert hits == [32, 0, 64, 0]
    assert (value("written_tokens_total"), value("blended_tokens_total")) == (96, 10)
    assert value("recomputed_tokens_total") == 4
    assert value("time_to_first_token_seconds_count") == 1
    assert value("call_duration_seconds_sum") == 4.5


def test_lengths_are_learned_of_whole_answers_by_kind() -> None:
    lengths = AnswerLengths()
    lengths.take(make_request())
    lengths.take(make_request(usage=Usage(100, 4), end=CallEnd.LENGTH))
    lengths.take(make_request(usage=Usage(100, 90), end=CallEnd.CANCELLED))
    lengths.take(make_request(usage=None, end=CallEnd.FAILED))
    lengths.take(make_request(usage=Usage(100, 2), json_schema="{}"))
    assert lengths.expected(prepared()) == 5.5
    assert lengths.expected(prepared(json_schema="{}")) == 2.0
    assert lengths.expected(prepared(labels=("a", "b"))) is None

"""Statistics, counters of a statement and metrics agree on the same calls, told in any order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.fix_accounts import make_answer, make_call, make_failed_call, make_request
from tierkv.dbfront.accounts.ended_call import CallCost, EndedCall
from tierkv.dbfront.accounts.statement_entry import count_call
from tierkv.dbfront.accounts.statement_trace import StatementTrace
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import TextAnswer
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.kvcore.request import HitTokens, Usage

Sums = tuple[int, int, int]
"""Prompt, cached and completion tokens."""

FORMS, MODELS = (0, 1, 2), ("tiny", "other")
TOKENS = st.integers(0, 10**6)
USAGES = st.builds(
    Usage, TOKENS, TOKENS, st.builds(HitTokens, TOKENS, TOKENS, TOKENS, TOKENS), TOKENS
)
ANSWERS = st.builds(
    make_answer, usage=USAGES, ttft_s=st.sampled_from([0.0, 0.25]), node_id=st.sampled_from("ab")
)
NAMED = {"form": st.sampled_from(FORMS), "model": st.sampled_from(MODELS)}


@st.composite
def ended_calls(draw: st.DrawFn) -> tuple[EndedCall, Sequence[TextAnswer]]:
    named = {name: draw(values) for name, values in NAMED.items()}
    answers = draw(st.lists(ANSWERS, max_size=3))  # None: another call is charged for it.
    if draw(st.booleans()):
        return make_failed_call(cost=CallCost.of(answers), **named), answers
    return make_call(*answers, **named), answers


def counted(calls: Sequence[EndedCall]) -> tuple[Sums, AiStats, StatementTrace]:
    store, stats, trace = StatisticStore(now_s=0.0), AiStats(), StatementTrace(FORMS)
    trace.batch_begins([call.form for call in calls], now_s=0.0)
    for call in calls:
        count_call(store, call, 0.0, {})
        stats.take(call)
        trace.take(call)
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    rows = store.select(f"SELECT {', '.join(names)}, calls, errors FROM functions", 0.0)
    assert rows == store.select(f"SELECT {', '.join(names)}, calls, errors FROM usage", 0.0)
    assert sum(row["calls"] for row in rows) == stats.distinct_calls == len(calls)
    assert sum(row["errors"] for row in rows) == stats.errors
    store.close(0.0)
    prompt, cached, completion = (sum(row[name] for row in rows) for name in names)
    return (prompt, cached, completion), stats, trace


def measured(ended: Sequence[tuple[EndedCall, Sequence[TextAnswer]]]) -> tuple[Sums, float]:
    """Publish the request of each answer, and read the metrics back."""
    metrics = Metrics()
    for call, answers in ended:
        for answer in answers:
            metrics.take(make_request(model=call.model, usage=answer.usage, ttft_s=answer.ttft_s))

    def total(name: str) -> float:
        samples = (one for family in metrics.registry.collect() for one in family.samples)
        return sum(one.value for one in samples if one.name == f"tierkv_{name}_total")

    tokens = [int(total(name)) for name in ("prompt_tokens", "hit_tokens", "completion_tokens")]
    return (tokens[0], tokens[1], tokens[2]), total("requests")


@given(
    st.lists(ended_calls(), max_size=12).flatmap(
        lambda n: st.tuples(st.just(n), st.permutations(n))
    )
)
def test_every_account_of_the_same_calls_agrees(
    orders: tuple[
        list[tuple[EndedCall, Sequence[TextAnswer]]], list[tuple[EndedCall, Sequence[TextAnswer]]]
    ],
) -> None:
    told, again = orders
    sums, stats, trace = counted([call for call, _ in told])
    other_sums, other_stats, other_trace = counted([call for call, _ in again])
    assert (sums, stats) == (other_sums, other_stats)
    assert trace.nodes == other_trace.nodes
    assert sums == (stats.prompt_tokens, stats.hit_tokens.total, stats.completion_tokens)
    forms = trace.forms.values()
    assert sums == (
        sum(form.prompt_tokens for form in forms),
        sum(form.hit_tokens.total for form in forms),
        sum(form.completion_tokens for form in forms),
    )
    assert measured(again) == (sums, stats.requests)
    assert sum(form.requests for form in forms) == trace.nodes.total() == stats.requests

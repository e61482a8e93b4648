"""What every CallReducer does, numbered as in dbfront/accounts/ended_call.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from tests.fix_accounts import make_answer, make_call, make_failed_call
from tierkv.dbfront.accounts.ended_call import CallEnd, CallReducer
from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statement_trace import FormTrace, StatementTrace
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.statement.error_policy import ErrorPolicy, Failures, Spending
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.request import Usage

CALLS = [
    make_call(make_answer()),
    make_call(make_answer(), make_answer("no"), retries=1, form=1),
    make_call(make_answer("", usage=Usage(0, 0)), is_null=True),
    make_failed_call(),
    make_failed_call(is_null=False, end=CallEnd.CANCELLED, error=None),
    make_call(is_local=True, model=""),
    make_failed_call(is_local=True, form=1),
]


def statement_entry() -> CallReducer:
    log = StatementLog(StatisticStore(now_s=0.0), ManualClock())
    return log.open(ClientInfo(user="ann"), 1, "SELECT ai_generate('x')")


REDUCERS: list[Callable[[], CallReducer]] = [
    AiStats,
    FormTrace,
    lambda: StatementTrace([0, 1]),
    statement_entry,
    lambda: Spending(ErrorPolicy()),
    lambda: Failures(ErrorPolicy(), writes=False),
    lambda: Failures(ErrorPolicy(), writes=True),
]


@pytest.mark.parametrize("make", REDUCERS)
def test_1_it_takes_each_ended_call_at_once(make: Callable[[], CallReducer]) -> None:
    reducer = make()
    assert not inspect.iscoroutinefunction(reducer.take)
    for call in CALLS:
        reducer.take(call)

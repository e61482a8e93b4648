"""A classifier answers rows of a statement: what it saves and tells, and when it is not used."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fix_cascade import JUDGED, TABLE, TasteGenerator, taste
from tierkv.dbfront.calls.row_sample import SampleSize, row_text
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import StatementResult
from tierkv.kvcore.access import EVERYTHING, NameSet, Rights, RoleRights
from tierkv.kvcore.errors import RowLevelError, SqlError, UdfArgumentError, UserError
from tierkv.sql.calls.ai_call import make_call
from tierkv.sql.calls.functions import CONTEXT

CLASSIFY = "SELECT id, ai_classify(body, ['low', 'high']) AS answer FROM judged ORDER BY id"
FILTER = "SELECT id FROM judged WHERE ai_filter('Is it low?', body) ORDER BY id"
ASKED = 0.9
SAMPLE = SampleSize.of(JUDGED, ASKED)


@pytest.fixture
def generator() -> TasteGenerator:
    return TasteGenerator()


@pytest.fixture
async def session(server: DuckDbSqlServer) -> DuckDbSession:
    session = await server.open_session(ClientInfo(user="ann"))
    for statement in [*session.split(TABLE), "SET tierkv.max_calls = 0"]:
        await session.execute(statement)
    await session.execute(f"SET tierkv.cascade = {ASKED}")
    return session


async def told(session: DuckDbSession, query: str = CLASSIFY) -> dict[str, Any]:
    """Return what EXPLAIN ANALYZE tells about the first call's cascade."""
    result = await session.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}")
    found: dict[str, Any] = json.loads(result.rows[0][1])["AI Plan"]["Calls"][0]["Cascade"]
    return found


async def lines(session: DuckDbSession, query: str = CLASSIFY) -> list[str]:
    plan = dict((await session.execute(f"EXPLAIN ANALYZE {query}")).rows)["ai_plan"]
    stripped = [line.strip() for line in str(plan).splitlines()]
    return [line for line in stripped if line.startswith(("cascade ", "answers by a classifier"))]


def notices(result: StatementResult) -> list[str]:
    return [notice.message for notice in result.notices]


def place_of(text: str) -> str:
    return "low" if taste(text) < 0 else "high"


TRUE = [(-1, None), *((n, place_of(f"row {n}")) for n in range(JUDGED))]


def agreement(rows: list[tuple[Any, ...]]) -> float:
    return sum(row == true for row, true in zip(rows, TRUE, strict=True)) / len(TRUE)


async def test_the_classifier_answers_what_the_model_is_not_asked(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    result = await session.execute(CLASSIFY)
    questions, vectors = generator.asked()
    assert SAMPLE.total <= questions < 0.7 * JUDGED
    assert vectors == JUDGED
    assert agreement(list(result.rows)) > 0.97
    assert result.rows[0] == (-1, None)
    assert notices(result) == []
    embedded = [call.prompt for call in generator.calls if call.embed]
    assert set(embedded) == {f"row {n}" for n in range(JUDGED)}


async def test_explain_analyze_tells_the_rows_of_each_and_the_agreement(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    numbers = await told(session)
    questions, vectors = generator.asked()
    assert numbers["Used"] and numbers["Asked"] == ASKED and "Not Used" not in numbers
    assert numbers["Model Rows"] == questions
    assert numbers["Model Rows"] + numbers["Classifier Rows"] == JUDGED
    assert numbers["Vectors"] == vectors == JUDGED
    assert numbers["Agreed Rows"] <= numbers["Checked Rows"] <= SAMPLE.checked
    assert ASKED <= numbers["Agreement at Least"] < 1
    one, total = await lines(session)
    assert one == (
        f"cascade 0.9: rows answered by the model {questions}, by the classifier "
        f"{JUDGED - questions}; agreement {numbers['Agreed Rows']} of {numbers['Checked Rows']} "
        f"checked rows, at least {numbers['Agreement at Least']:.3f} (95 % confidence); vectors "
        f"{JUDGED}"
    )
    assert total == (
        f"answers by a classifier {JUDGED - questions}, which are approximate; vectors {JUDGED}"
    )


async def test_statistics_count_the_answers_of_the_classifier(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute(CLASSIFY)
    classified = JUDGED - generator.asked()[0]
    query = "SELECT classified_calls FROM tierkv.stat_statements WHERE query ILIKE '%ai_classify%'"
    assert (await session.execute(query)).rows == [(classified,)]
    query = "SELECT function_name, classified_calls FROM tierkv.stat_functions ORDER BY ALL"
    counts = [("ai_classify", classified), ("ai_embed", 0)]
    assert (await session.execute(query)).rows == counts


async def test_show_says_off_as_the_setting_is_written(session: DuckDbSession) -> None:
    await session.execute("SET tierkv.cascade = 0")
    assert (await session.execute("SHOW tierkv.cascade")).rows == [("off",)]
    await session.execute("RESET tierkv.cascade")
    query = "SELECT setting FROM tierkv.settings WHERE name = 'tierkv.cascade'"
    assert (await session.execute(query)).rows == [("off",)]


async def test_a_filter_is_answered_alike(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    rows = {row[0] for row in (await session.execute(FILTER)).rows}
    assert generator.asked()[0] < 0.7 * JUDGED
    true = {n for n in range(JUDGED) if place_of(f"row {n}") == "low"}
    assert len(rows ^ true) < 0.03 * JUDGED
    numbers = await told(session, FILTER)
    assert numbers["Model Rows"] + numbers["Classifier Rows"] == JUDGED


async def test_the_same_rows_get_the_same_answers(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    generator.blur = 0.1
    first = (await session.execute(CLASSIFY)).rows
    asked = set(generator.prompts)
    generator.prompts.clear()
    await session.execute("CREATE TABLE turned AS SELECT * FROM judged ORDER BY id DESC")
    turned = CLASSIFY.replace("judged", "turned")
    assert (await session.execute(turned)).rows == first
    assert set(generator.prompts) == asked


async def test_unsure_rows_go_to_the_model(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    generator.blur = 0.3
    numbers = await told(session)
    assert numbers["Used"], numbers["Not Used"]
    assert SAMPLE.total + 100 < numbers["Model Rows"] < JUDGED - 100


async def test_two_calls_over_the_same_rows_share_vectors(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute(
        "SELECT ai_classify(body, ['a', 'b']), ai_classify(body, ['c', 'd']) FROM judged"
    )
    questions, vectors = generator.asked()
    assert vectors == JUDGED
    assert 2 * SAMPLE.total <= questions < 1.4 * JUDGED


async def test_it_is_off_unless_asked_for(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute("RESET tierkv.cascade")
    rows = (await session.execute(CLASSIFY)).rows
    assert generator.asked() == (JUDGED, 0)
    assert list(rows) == TRUE
    assert await lines(session) == []


async def test_a_call_asks_by_its_options(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute("SET tierkv.cascade = off")
    one = CLASSIFY.replace("])", "], options => '{\"cascade\": 0.9}')")
    await session.execute(one)
    assert generator.asked()[1] == JUDGED
    generator.calls.clear()
    await session.execute("SET tierkv.cascade = 0.9")
    await session.execute(one.replace("0.9", '"off"'))
    assert generator.asked() == (JUDGED, 0)


@pytest.mark.parametrize("text", ["0.5", "1", "2", "-0.9", "nan", "sometimes", "''"])
async def test_an_agreement_out_of_bounds_is_refused(session: DuckDbSession, text: str) -> None:
    with pytest.raises(UserError, match=r"tierkv\.cascade"):
        await session.execute(f"SET tierkv.cascade = {text}")
    assert (await session.execute("SHOW tierkv.cascade")).rows == [("0.9",)]
    with pytest.raises(UdfArgumentError, match=r"must be above 0\.5 and below 1, or off"):
        await session.execute("SELECT ai_filter('x', options => '{\"cascade\": 1.5}')")


async def test_the_notice_of_a_large_statement_leaves_the_cascade_out(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute(f"SET tierkv.notice_calls = {JUDGED - 1}")
    (notice,) = notices(await session.execute(CLASSIFY))
    assert notice.startswith(f"this statement without its cascade makes {JUDGED:,} AI calls: about")


# -- not used, and why


async def unused(session: DuckDbSession, generator: TasteGenerator, query: str = CLASSIFY) -> str:
    """Run a query; the model answers all rows, the notice and EXPLAIN ANALYZE say why."""
    result = await session.execute(query)
    assert generator.asked()[0] == len({call.messages for call in generator.calls} - {None})
    (notice,) = notices(result)
    numbers = await told(session, query)
    assert not numbers["Used"] and not numbers["Classifier Rows"]
    line = (await lines(session, query))[0]
    assert line == f"cascade 0.9 not used: {numbers['Not Used']}"
    before, _, reason = notice.partition(": ")
    assert before.startswith("tierkv.cascade was not used for ai_")
    assert reason == numbers["Not Used"]
    return reason


async def test_too_few_rows(session: DuckDbSession, generator: TasteGenerator) -> None:
    few = CLASSIFY.replace("ORDER", "WHERE id < 50 ORDER")
    reason = await unused(session, generator, few)
    assert reason == f"50 distinct rows, at least {SampleSize.of(50, ASKED).least_rows} are needed"
    assert generator.asked()[1] == 0


async def test_equal_texts_are_one_row(session: DuckDbSession, generator: TasteGenerator) -> None:
    query = "SELECT ai_classify('row ' || id % 7, ['low', 'high']) FROM judged WHERE id >= 0"
    assert (await unused(session, generator, query)).startswith("7 distinct rows, at least")


async def test_one_answer_for_all(session: DuckDbSession, generator: TasteGenerator) -> None:
    generator.constant = True
    reason = await unused(session, generator)
    assert reason == f"{SAMPLE.learned} sampled rows all have the answer low"
    assert generator.asked()[1] == 0


async def test_an_agreement_that_is_not_reached(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    generator.blind = True
    reason = await unused(session, generator)
    assert reason.startswith(("it agreed on", "the classifier was sure of none"))
    assert (await session.execute(CLASSIFY)).rows == TRUE
    assert generator.asked()[1] == 4 * SAMPLE.total  # A sample for each of the runs.


async def test_a_model_without_vectors(session: DuckDbSession, generator: TasteGenerator) -> None:
    generator.refuses_vectors = True
    assert await unused(session, generator) == "no vectors: model tiny provides no embeddings: none"
    assert (await session.execute(CLASSIFY)).rows == TRUE


async def test_an_unknown_model_for_vectors(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute("SET tierkv.cascade_model = nosuch")
    assert await unused(session, generator) == 'no vectors: no model "nosuch"'
    await session.execute("SET tierkv.cascade_model = other")
    assert (await told(session))["Used"]
    assert {call.model for call in generator.calls if call.embed} == {"other"}


async def test_a_user_who_may_not_embed(session: DuckDbSession, generator: TasteGenerator) -> None:
    only = NameSet(names=frozenset({"ai_classify"}))
    generator.rights.rights = Rights({"public": RoleRights(only, EVERYTHING)})
    reason = await unused(session, generator)
    assert reason == "no vectors: permission denied for function ai_embed"


async def test_vectors_count_as_calls(session: DuckDbSession, generator: TasteGenerator) -> None:
    await session.execute(f"SET tierkv.max_calls = {2 * JUDGED - 1}")
    reason = await unused(session, generator)
    assert reason == f"{JUDGED} vectors would exceed tierkv.max_calls = {2 * JUDGED - 1}"
    await session.execute(f"SET tierkv.max_calls = {2 * JUDGED}")
    assert (await told(session))["Used"]


async def test_vectors_count_as_prompt_tokens(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute("SET tierkv.max_prompt_tokens = 20000")
    with pytest.raises(SqlError, match=r"tierkv\.max_prompt_tokens allows 20000") as caught:
        await session.execute(CLASSIFY)
    assert caught.value.sqlstate == "53400"


async def test_what_differs_from_row_to_row_must_be_text(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    query = "SELECT ai_classify(body, ['low', 'x' || id]) FROM judged"
    assert await unused(session, generator, query) == (
        "argument categories differs from row to row"
    )


async def test_a_dry_run_asks_nothing(session: DuckDbSession, generator: TasteGenerator) -> None:
    await session.execute("SET tierkv.dry_run = on")
    await session.execute(CLASSIFY)
    assert generator.calls == []


# -- single rows, other statements


async def test_a_row_without_a_vector_goes_to_the_model(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    generator.unembedded = "row 17"
    result = await session.execute(CLASSIFY)
    assert result.rows[18] == TRUE[18]
    assert sum(prompt.startswith("row 17\n") for prompt in generator.prompts) == 1
    assert result.notices == ()


async def test_a_failed_row_is_not_learned_from(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    generator.failing = {f"row {n}\n": RowLevelError("no answer") for n in range(0, JUDGED, 10)}
    result = await session.execute(CLASSIFY)
    nulls = sum(answer is None for _, answer in result.rows) - 1
    assert 0 < nulls < 100
    (notice,) = notices(result)
    assert notice.startswith(f"{nulls} of {JUDGED} AI calls failed")


async def test_a_write_is_answered_alike(session: DuckDbSession, generator: TasteGenerator) -> None:
    rows = (await session.execute(CLASSIFY)).rows
    generator.calls.clear()
    await session.execute(f"CREATE TABLE kept AS {CLASSIFY}")
    assert generator.asked()[0] < 0.7 * JUDGED
    assert (await session.execute("SELECT * FROM kept ORDER BY id")).rows == rows


async def test_the_rows_of_a_client_who_reads_a_stream_are_collected_first(
    session: DuckDbSession, generator: TasteGenerator
) -> None:
    plan = await session.execute(f"EXPLAIN (FORMAT JSON) {CLASSIFY}")
    stream = await session.execute_rows("SELECT id, ai_classify(body, ['low', 'high']) FROM judged")
    assert isinstance(stream, StatementResult)
    assert generator.asked()[1] == JUDGED
    assert json.loads(plan.rows[0][1])["AI Plan"]["Executor"] == "replay"


async def test_a_cancel_stops_the_vectors(
    server: DuckDbSqlServer, session: DuckDbSession, generator: TasteGenerator
) -> None:
    await session.execute("SET tierkv.max_concurrency = 4")
    held = asyncio.Event()

    class Held(dict[str, Any]):
        """Holds every vector back, once the questions of the sample are answered."""

        def items(self) -> Any:
            if generator.calls[-1].embed:
                held.set()
                generator.gate = asyncio.Event()
            return super().items()

    generator.failing = Held()
    running = asyncio.create_task(session.execute(CLASSIFY))
    await held.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    questions, vectors = generator.asked()
    assert questions == SAMPLE.total
    assert 0 < vectors <= 8


def test_the_text_of_a_row_is_what_differs() -> None:
    values = {"input": "body", "predicate": "Is it?", CONTEXT: '{"b": "two\\nlines", "a": "1"}'}
    call = make_call("ai_filter", values)
    assert row_text(call, ("input",)) == "body"
    assert row_text(call, (CONTEXT, "input")) == "b: two\n  lines\na: 1\nbody"


@pytest.mark.parametrize(
    ("rows", "asked", "learned", "checked"),
    [
        (100, 0.6, 100, 100),
        (1_000, 0.95, 354, 354),
        (5_000, 0.95, 500, 500),
        (1_000_000, 0.95, 1_000, 1_000),
        (1_000_000, 0.99, 1_000, 1_794),
    ],
)
def test_the_size_of_a_sample(rows: int, asked: float, learned: int, checked: int) -> None:
    assert SampleSize.of(rows, asked) == SampleSize(learned, checked)

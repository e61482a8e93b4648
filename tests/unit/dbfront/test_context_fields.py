"""Contexts of real statements: what the model is asked, and that answers stay with their rows."""

from __future__ import annotations

import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.errors import UdfArgumentError

REVIEWS = (
    "CREATE TABLE reviews AS SELECT i AS id, 'text ' || i AS body, 'product ' || i % 4 AS product, "
    "'kind ' || i % 2 AS kind FROM range(40) t(i)"
)
ASK = (
    "SELECT id, ai_generate('What is it about?', "
    "context => {'body': body, 'product': product, 'kind': kind}) FROM reviews ORDER BY id"
)


async def asked(session: DuckDbSession, generator: InstantGenerator, sql: str) -> list[list[str]]:
    """Run a statement; return the lines of each prompt, in the order they were sent."""
    generator.prompts.clear()
    await session.execute(sql)
    return [prompt.split("\n") for prompt in generator.prompts]


def keys(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines[1:]]


@pytest.fixture
async def reviews(session: DuckDbSession) -> DuckDbSession:
    await session.execute(REVIEWS)
    return session


async def test_fields_that_rows_share_come_first(
    reviews: DuckDbSession, generator: InstantGenerator
) -> None:
    sent = await asked(reviews, generator, ASK)
    assert len(sent) == 40
    assert {lines[0] for lines in sent} == {"What is it about?"}
    assert [keys(lines) for lines in sent] == [["kind", "product", "body"]] * 40


async def test_off_leaves_them_as_written(
    reviews: DuckDbSession, generator: InstantGenerator
) -> None:
    await reviews.execute("SET tierkv.field_reorder = 'off'")
    assert [keys(lines) for lines in await asked(reviews, generator, ASK)] == [
        ["body", "product", "kind"]
    ] * 40


@pytest.mark.parametrize("method", ["off", "stats"])
async def test_each_row_gets_the_answer_to_its_own_fields(
    reviews: DuckDbSession, generator: InstantGenerator, method: str
) -> None:
    await reviews.execute(f"SET tierkv.field_reorder = {method}")
    result = await reviews.execute(ASK)
    by_id = {int(prompt.split("text ")[1].split("\n")[0]): prompt for prompt in generator.prompts}
    for number, answer in result.rows:
        lines = by_id[number].split("\n")
        assert sorted(lines[1:]) == [
            f"body: text {number}",
            f"kind: kind {number % 2}",
            f"product: product {number % 4}",
        ]
        assert answer == answer_text(by_id[number])


async def test_later_rounds_keep_the_order(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    """A filter under LIMIT is answered in batches; in the first, of 64 rows, ``b`` repeats most."""
    await session.execute(
        "CREATE TABLE many AS SELECT i AS id, 'a ' || i % 3 AS a, "
        "'b ' || CASE WHEN i < 64 THEN i % 2 ELSE i END AS b FROM range(190) t(i)"
    )
    sent = await asked(
        session,
        generator,
        "SELECT id FROM many WHERE ai_generate('q', context => {'id': id, 'a': a, 'b': b}) "
        "= 'never' LIMIT 1",
    )
    assert [keys(lines) for lines in sent] == [["b", "a", "id"]] * 190


async def test_many_contexts_are_written_beside_the_event_loop(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.max_calls = 0")
    sent = await asked(
        session,
        generator,
        "SELECT ai_generate('q', context => {'n': i, 'group': 'a group of rows ' || i % 3}) "
        "FROM range(300) t(i)",
    )
    assert [keys(lines) for lines in sent] == [["group", "n"]] * 300


async def test_a_null_field_is_left_out_and_equal_contexts_are_one_call(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sent = await asked(
        session,
        generator,
        "SELECT ai_generate('q', context => {'a': a, 'b': b}) "
        "FROM (VALUES (1, NULL), (1, NULL), (NULL, NULL), (2, 3)) v(a, b)",
    )
    assert sorted(sent) == [["q"], ["q", "a: 1"], ["q", "a: 2", "b: 3"]]


async def test_where_a_row_has_a_text_of_its_own_its_context_stands_before_it(
    reviews: DuckDbSession, generator: InstantGenerator
) -> None:
    """The text differs in every row, the context does not: rows share their beginnings."""
    sent = await asked(
        reviews,
        generator,
        "SELECT id, ai_classify(body, ['good', 'bad'], context => {'product': product, "
        "'kind': kind}) FROM reviews",
    )
    assert len(sent) == 40
    for lines in sent:
        kind, product, blank, body, question = lines
        assert (kind[:5], product[:8], blank, body[:5]) == ("kind:", "product:", "", "text ")
        assert question.startswith("Question: ")


async def test_only_what_stands_before_the_context_parts_rows(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    """Behind each prompt of its own no field is shared: statistics say nothing then."""
    sent = await asked(
        session,
        generator,
        "SELECT ai_generate('About ' || i, context => {'n': i, 'group': 'a group ' || i % 2}) "
        "FROM range(8) t(i)",
    )
    assert [keys(lines) for lines in sent] == [["n", "group"]] * 8


@pytest.mark.parametrize("width", [256, 257])
async def test_a_context_has_only_so_many_fields(
    session: DuckDbSession, generator: InstantGenerator, width: int
) -> None:
    fields = ", ".join(f"'f{number}': {number}" for number in range(width))
    sql = f"SELECT ai_generate('q', context => {{{fields}}})"
    if width > 256:
        with pytest.raises(UdfArgumentError, match="257 fields were given, at most 256"):
            await session.execute(sql)
    else:
        assert [len(lines) for lines in await asked(session, generator, sql)] == [1 + width]

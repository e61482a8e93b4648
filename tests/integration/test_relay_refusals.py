"""What the relay keeps from costing too much: compiled plans, prompts that are new each round."""

from __future__ import annotations

import psycopg
import pytest

from tests.fix_postgres import RunningRelay
from tests.fix_sql import InstantGenerator, answer_text

pytestmark = pytest.mark.integration


def test_the_engine_does_not_compile_what_is_run_a_few_times(ai_relay: RunningRelay) -> None:
    """A price of ``tierkv.ai_call`` above jit_above_cost made each round wait for a compiler."""
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        sql = "SELECT ai_generate(body) FROM docs WHERE ai_filter('x', body) AND ai_filter('y', id)"
        plan = connection.execute(f"EXPLAIN (FORMAT JSON) {sql}").fetchone()
        limit = connection.execute("SHOW jit_above_cost").fetchone()
        assert plan is not None
        assert limit is not None
        document = plan[0]
        [document] = document if isinstance(document, list) else [document]
        assert "JIT" not in document
        assert 0 < document["Plan"]["Total Cost"] < float(limit[0])


@pytest.mark.parametrize(
    "default", ["serial", "uuid DEFAULT gen_random_uuid()", "timestamptz DEFAULT clock_timestamp()"]
)
def test_prompts_that_are_new_in_each_round_are_noticed_early(
    ai_relay: RunningRelay, generator: InstantGenerator, default: str
) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TEMP TABLE j (id {default}, v text, w int DEFAULT 7)")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="each time") as caught:
            connection.execute(
                "INSERT INTO j(v) VALUES ('x'), ('y') RETURNING id, ai_generate('row ' || id)"
            )
        assert "make the AI calls in a SELECT" in (caught.value.diag.message_hint or "")
        assert len(generator.prompts) <= 4
        row = connection.execute(
            "INSERT INTO j(v) VALUES ('x') RETURNING w, ai_generate(ai_generate('row ' || w) || w)"
        ).fetchone()
        assert row == (7, answer_text(f"{answer_text('row 7')}7"))

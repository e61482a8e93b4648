"""Normal forms: what is the same statement, and that nothing a user wrote as data is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.kvcore import limits
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import normal_form, query_id

FORMS = {
    "SELECT ai_generate('What? ' || body) FROM t;": "SELECT ai_generate($1 || body) FROM t",
    "select 1,  2.5e3\n -- note 'x'\n , /* 'y' */ 'z'": "select $1, $2 , $3",
    "SELECT $2, 'x', $1": "SELECT $2, $3, $1",
    "SELECT ?, 'x'": "SELECT ?, $1",
    "SELECT $q$it's$q$, e'a\\'b', \"q'c\"": 'SELECT $1, $2, "q\'c"',
    "SELECT * FROM t WHERE id IN (1, 2, 3) AND a = 4": (
        "SELECT * FROM t WHERE id IN ($1 /*, ... */) AND a = $2"
    ),
    "SELECT * FROM t WHERE id IN (1, x, 3)": "SELECT * FROM t WHERE id IN ($1, x, $2)",
    "SELECT * FROM t WHERE id IN ('a')": "SELECT * FROM t WHERE id IN ($1)",
    "SELECT id IN (1, 2": "SELECT id IN ($1, $2",
    "INSERT INTO t VALUES (1, 'a'), (-2, NULL)": "INSERT INTO t VALUES ($1, $2), (-$3, NULL)",
    "SET tierkv.system_prompt = 'be brief'": "SET tierkv.system_prompt = $1",
    "SELECT $999999999999999999999999999999, 'x'": (
        "SELECT $999999999999999999999999999999, $1000000000000000000000000000000"
    ),
    "": "",
    ";;": "",
}


@pytest.mark.parametrize(("text", "form"), FORMS.items(), ids=range(len(FORMS)))
def test_normal_form(text: str, form: str) -> None:
    assert normal_form(tokenize(text)) == form


def id_of(text: str) -> int:
    return query_id(tokenize(text))


def test_the_id_is_that_of_the_shape_and_stays_the_same_in_every_release() -> None:
    assert id_of("SELECT ai_generate('a' || x) FROM t WHERE n IN (1, 2)") == id_of(
        "select AI_GENERATE($q$b$q$||x) /* c */ from t\nwhere n in (3,4,5,6);"
    )
    assert id_of("SELECT ai_generate(x) FROM t") == -5832379166992860471
    assert id_of("SELECT a") != id_of("SELECT b")
    assert id_of('SELECT "A"') != id_of('SELECT "a"')
    assert id_of("SELECT ab") != id_of("SELECT a b")


def test_the_end_of_a_long_statement_counts_though_it_is_not_shown() -> None:
    head = "SELECT " + ", ".join(f"column_{i}" for i in range(2_000))
    one, other = f"{head}, a FROM t", f"{head}, b FROM t"
    assert normal_form(tokenize(one)) == normal_form(tokenize(other))
    assert len(normal_form(tokenize(one))) == limits.MAX_NORMAL_FORM_CHARS
    assert id_of(one) != id_of(other)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(min_value=0))
def test_no_literal_is_left(prompt: str, number: int) -> None:
    literal = "'marker" + prompt.replace("'", "''") + "'"
    form = normal_form(tokenize(f"SELECT ai_generate({literal}, {number}), t.body FROM t"))
    assert form == "SELECT ai_generate($1, $2), t.body FROM t"

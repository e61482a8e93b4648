"""Planning looks at each token a bounded number of times, however many AI calls there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tierkv.sql.plan.plan import plan_statement
from tierkv.sql.text.lexer import SqlText, Token, tokenize


class CountedTokens(list[Token]):
    """Tokens that count how many of them are looked at, in copies and slices too."""

    def __init__(self, tokens: Iterable[Token], visits: Counter[str]) -> None:
        super().__init__(tokens)
        self._visits = visits

    def copy(self) -> CountedTokens:
        return CountedTokens(list.__iter__(self), self._visits)

    def __iter__(self) -> Iterator[Token]:
        for token in super().__iter__():
            self._visits["tokens"] += 1
            yield token

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            return CountedTokens(found, self._visits)
        self._visits["tokens"] += 1
        return found


def visits_per_token(calls: int, prompt_chars: int) -> float:
    words = "x" * prompt_chars
    items = ", ".join(f"ai_generate('{words} {number}') AS c{number}" for number in range(calls))
    text = f"SELECT {items} FROM t"
    visits = Counter[str]()
    tokens = tokenize(text)
    plan = plan_statement(SqlText(text, CountedTokens(tokens, visits)))
    assert len(plan.sites) == calls
    return visits["tokens"] / len(tokens)


@pytest.mark.parametrize(
    "prompt_chars", [2, pytest.param(2_000, id="too long to be parsed into a tree")]
)
def test_more_calls_need_no_more_looks_at_each_token(prompt_chars: int) -> None:
    few, many = (visits_per_token(calls, prompt_chars) for calls in (120, 480))
    assert 0.0 < many <= few * 1.1

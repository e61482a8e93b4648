"""The answers of the differential tests: md5 functions of the prompt, in three spellings.

A model (``DigestGenerator``), Python functions for DuckDB and SQL functions for PostgreSQL compute
the same answers, so a statement with AI calls can be compared with the same statement over plain
functions. The plain functions are called ``plain_generate``, ``plain_filter`` and so on in DuckDB
and ``ai_generate``, ``ai_filter`` and so on in a PostgreSQL database of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import md5

import duckdb

from tests.fix_sql import InstantGenerator
from tierkv.dbfront.contracts import PreparedCall, TextEvent

_YES_OR_NO = ("yes", "Yes", "no", "No")

POSTGRES_FUNCTIONS = r"""
CREATE FUNCTION ai_generate(prompt text) RETURNS text LANGUAGE sql IMMUTABLE
  AS $$ SELECT 'a' || left(md5(prompt), 1) $$;
CREATE FUNCTION ai_filter(predicate text, input text) RETURNS boolean LANGUAGE sql IMMUTABLE
  AS $$ SELECT left(md5(input || E'\nQuestion: ' || predicate
    || E'\nAnswer yes or no.'), 1) < '8' $$;
CREATE FUNCTION ai_classify(input text, categories text[]) RETURNS text LANGUAGE sql IMMUTABLE
  AS $$ SELECT categories[1 + strpos('0123456789abcdef', left(md5(input || E'\nQuestion: '
    || 'Which category fits best: ' || array_to_string(categories, ', ') || '?'), 1))
    % array_length(categories, 1)] $$;
"""


def digest(prompt: str) -> str:
    """Return the first hexadecimal digit of the prompt's md5."""
    return md5(prompt.encode(), usedforsecurity=False).hexdigest()[0]


def generate(prompt: str | None) -> str | None:
    """Answer ``ai_generate(prompt)``."""
    return None if prompt is None else f"a{digest(prompt)}"


def passes(predicate: str | None, text: str | None) -> bool | None:
    """Answer ``ai_filter(predicate, text)``."""
    if predicate is None or text is None:
        return None
    return digest(_filter_prompt(predicate, text)) < "8"


def classify(text: str | None, categories: Sequence[str]) -> str | None:
    """Answer ``ai_classify(text, categories)``."""
    if text is None:
        return None
    return categories[_class_of(_class_prompt(text, categories), len(categories))]


def _filter_prompt(predicate: str, text: str) -> str:
    return f"{text}\nQuestion: {predicate}\nAnswer yes or no."


def _class_prompt(text: str, categories: Sequence[str]) -> str:
    return f"{text}\nQuestion: Which category fits best: {', '.join(categories)}?"


def _class_of(prompt: str, classes: int) -> int:
    return (1 + int(digest(prompt), 16)) % classes


class DigestGenerator(InstantGenerator):
    """The model with these answers."""

    def _read_out(self, prepared: PreparedCall) -> TextEvent:
        assert prepared.call.messages is not None
        prompt = prepared.call.messages[-1].content
        labels = prepared.call.labels
        if not labels:
            return TextEvent(generate(prompt) or "")
        odds = [0.0] * len(labels)
        at = 2 * (digest(prompt) >= "8") if labels == _YES_OR_NO else _class_of(prompt, len(labels))
        odds[at] = 1.0
        return TextEvent(label_probabilities=tuple(odds))


@dataclass(slots=True)
class PlainFunctions:
    """The plain functions of one DuckDB database.

    Attributes:
        asked: distinct prompts that were evaluated since it was cleared.
    """

    asked: set[str] = field(default_factory=set)

    def register(self, root: duckdb.DuckDBPyConnection) -> None:
        """Make the functions; they are pure, so DuckDB may move and drop calls."""
        text, texts = "VARCHAR", "VARCHAR[]"
        functions: tuple[tuple[str, Callable[..., object], list[str], str], ...] = (
            ("plain_generate", self._generate, [text], text),
            ("plain_filter", self._filter, [text, text], "BOOLEAN"),
            ("plain_classify", self._classify, [text, texts], text),
        )
        for name, function, parameters, result in functions:
            root.create_function(name, function, parameters, result, null_handling="special")  # type: ignore[call-overload]

    def _generate(self, prompt: str | None) -> str | None:
        if prompt is not None:
            self.asked.add(prompt)
        return generate(prompt)

    def _filter(self, predicate: str | None, text: str | None) -> bool | None:
        if predicate is not None and text is not None:
            self.asked.add(_filter_prompt(predicate, text))
        return passes(predicate, text)

    def _classify(self, text: str | None, categories: Sequence[str]) -> str | None:
        if text is not None:
            self.asked.add(_class_prompt(text, categories))
        return classify(text, categories)


def plain(sql: str) -> str:
    """Spell a statement's AI calls as the plain functions."""
    return re.sub(r"\bai_(generate|filter|classify)\b", r"plain_\1", sql)

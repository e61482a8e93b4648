"""The rows that a model answers first: how many, which ones, and the text and answers of each.

dbfront/statement/cascade.py samples with this module. Pure. The sample depends on the rows' texts
alone, not on their order, on the question or on chance.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from tierkv.dbfront.calls.agreement import least_checked
from tierkv.dbfront.calls.field_order import render_context
from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.functions import CONTEXT

ROW_TEXT: Final = (CONTEXT, "input", "predicate")
"""Arguments that may differ from row to row; together they are a row's own text."""

_CHECKED: Final = 6
"""Rows to check, as a multiple of the fewest with which the bound can be reached: the classifier
may be unsure of many, and may disagree a few times.
"""

_LEAST_ROWS: Final = 100
"""Fewest rows to learn from, and fewest to check."""

_MOST_LEARNED: Final = 1_000
_SAMPLED_SHARE: Final = 10
"""Of many rows, one in ten is learned from and one in ten is checked, up to _MOST_LEARNED each."""

LEAST_OF_ANSWER: Final = 5
"""Learned rows that an answer needs; the classifier never gives a rarer one."""

_SHOWN_CHARS: Final = 40


class UnusedError(Exception):
    """The model answers all rows; the message says why. Caught in dbfront/statement/cascade.py."""


@dataclass(frozen=True, slots=True)
class SampleSize:
    """Rows that the model answers first: ``learned`` to fit the classifier, ``checked`` beside."""

    learned: int
    checked: int

    @property
    def total(self) -> int:
        """All sampled rows."""
        return self.learned + self.checked

    @property
    def least_rows(self) -> int:
        """Fewest rows of a cascade: with fewer, the sample would be more than half of them."""
        return 2 * self.total

    @staticmethod
    def of(rows: int, asked: float) -> SampleSize:
        """Return the sample of ``rows`` rows for an agreement of ``asked``."""
        share = min(rows // _SAMPLED_SHARE, _MOST_LEARNED)
        checked = max(_CHECKED * least_checked(asked), _LEAST_ROWS, share)
        return SampleSize(min(checked, max(_MOST_LEARNED, _LEAST_ROWS)), checked)


def row_text(call: AiCall, row_parameters: Sequence[str]) -> str:
    """Return a row's own text: its context as lines, and its input or predicate.

    Args:
        call: the row's call; its context is JSON.
        row_parameters: arguments that differ from row to row.
    """
    texts: list[str] = []
    for name in ROW_TEXT:
        if name in row_parameters and call.text(name):
            text = call.text(name)
            if name == CONTEXT:
                fields: dict[str, str] = json.loads(text)
                text = render_context(fields, fields)
            texts.append(text)
    return "\n".join(texts)


def sample_order(text: str) -> tuple[bytes, str]:
    """Return the key by which rows are sorted; the first rows are the sample."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest(), text


def known_answers(answers: Sequence[Any]) -> list[Any]:
    """Return the answers that a classifier can learn, sorted.

    Args:
        answers: the answers to the rows to learn from; None for a row without an answer.

    Raises:
        UnusedError: there are not two of them.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        raise UnusedError("the model answered none of the sampled rows")
    if len(counts) == 1:
        (only,) = counts
        shown = str(only)[:_SHOWN_CHARS]
        raise UnusedError(f"{counts[only]} sampled rows all have the answer {shown}")
    known = [answer for answer, count in counts.items() if count >= LEAST_OF_ANSWER]
    if len(known) < 2:
        raise UnusedError("all answers but one are too rare in the sample")
    return sorted(known)

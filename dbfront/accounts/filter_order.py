"""In which order the AI filters of a statement are asked: the one that saves most per cost first.

Pure: told what each filter cost and let pass, it ranks them by cost / (1 - selectivity), the
order that is cheapest when filters are independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.accounts.statistics import AiStats

_SAMPLED_ROWS: Final = 16
"""Rows that each filter is asked about before any order is chosen."""

_TOKEN_DECODED: Final = 8.0
"""What decoding a token costs, in prompt tokens: prompts are computed many tokens at a time."""


def cost_tokens(stats: AiStats) -> float:
    """Return what answers have cost so far, in prompt tokens that were computed."""
    computed = stats.prompt_tokens - stats.hit_tokens.total
    return computed + _TOKEN_DECODED * stats.completion_tokens


@dataclass(slots=True)
class FilterRecord:
    """What is known of one filter: rows it was asked about, that passed, and the tokens it took."""

    rows: int = 0
    passed: int = 0
    cost: float = 0.0

    @property
    def rank(self) -> float:
        """Cost per row that it drops; estimates are drawn to the middle while rows are few."""
        dropped = (self.rows - self.passed + 0.5) / (self.rows + 1)
        return (self.cost / self.rows if self.rows else 0.0) / dropped


class FilterOrder:
    """The filters of one statement, by number.

    Attributes:
        records: of each filter.
    """

    def __init__(self, count: int) -> None:
        self.records = [FilterRecord() for _ in range(count)]

    @property
    def measuring(self) -> bool:
        """Whether every filter is to be asked about every row, to learn what they are like."""
        return len(self.records) > 1 and any(record.rows < _SAMPLED_ROWS for record in self.records)

    def order(self) -> list[int]:
        """Return the filters' numbers, first to ask first; ties stay as written."""
        return sorted(range(len(self.records)), key=lambda number: self.records[number].rank)

    def ran(self, number: int, *, rows: int, passed: int, cost: float) -> None:
        """Note what a filter did with some rows."""
        record = self.records[number]
        record.rows += rows
        record.passed += passed
        record.cost += cost

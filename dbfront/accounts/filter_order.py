"""The order in which the AI filters of a statement are asked: largest saving per cost first.

Pure. ``ran`` records the cost and the passed rows of each filter. Filters are ranked by cost / (1 -
selectivity), the cheapest order if filters are independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.accounts.statistics import AiStats

_SAMPLED_ROWS: Final = 16
"""Number of rows each filter is asked about before an order is chosen."""

_TOKEN_DECODED: Final = 8.0
"""Cost of decoding a token, in prompt tokens. Prompt tokens are cheaper because many are computed
at once.
"""


def cost_tokens(stats: AiStats) -> float:
    """Return the cost of all answers so far, in computed prompt tokens."""
    computed = stats.prompt_tokens - stats.hit_tokens.total
    return computed + _TOKEN_DECODED * stats.completion_tokens


@dataclass(slots=True)
class FilterRecord:
    """Observations of one filter: rows asked about, rows passed, and the cost in tokens."""

    rows: int = 0
    passed: int = 0
    cost: float = 0.0

    @property
    def rank(self) -> float:
        """Cost per dropped row; with few rows the selectivity is shrunk towards one half."""
        dropped = (self.rows - self.passed + 0.5) / (self.rows + 1)
        return (self.cost / self.rows if self.rows else 0.0) / dropped


class FilterOrder:
    """The filters of one statement, by number.

    Attributes:
        records: observations of each filter.
    """

    def __init__(self, count: int) -> None:
        self.records = [FilterRecord() for _ in range(count)]

    @property
    def measuring(self) -> bool:
        """True if every filter should be asked about every row, to measure all filters."""
        return len(self.records) > 1 and any(record.rows < _SAMPLED_ROWS for record in self.records)

    def order(self) -> list[int]:
        """Return the filters' numbers in the order of asking; ties keep the written order."""
        return sorted(range(len(self.records)), key=lambda number: self.records[number].rank)

    def ran(self, number: int, *, rows: int, passed: int, cost: float) -> None:
        """Record the result of a filter on some rows."""
        record = self.records[number]
        record.rows += rows
        record.passed += passed
        record.cost += cost

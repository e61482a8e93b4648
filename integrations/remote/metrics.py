"""Numbers from a page in Prometheus' text format, as far as engines use the format.

Pure. Unreadable lines are skipped, because pages come from many versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: labels and value."""

    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """The samples of a page, by name."""

    def __init__(self, text: str) -> None:
        """Parse a page; O(length of the page)."""
        self._samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            found = _LINE.match(line)
            if found is None:
                continue
            name, labels, value = found.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                sample = Sample(dict(_LABEL.findall(labels or "")), number)
                self._samples.setdefault(name, []).append(sample)

    def total(self, name: str) -> float:
        """Return the sum of a metric over all labels (ranks, models); 0.0 for an unknown metric."""
        return math.fsum(sample.value for sample in self._samples.get(name, ()))

    def most(self, name: str) -> float:
        """Return the largest value of a metric; 0.0 for an unknown metric."""
        return max((sample.value for sample in self._samples.get(name, ())), default=0.0)

    def labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a metric's first sample; empty for an unknown metric."""
        samples = self._samples.get(name)
        return samples[0].labels if samples else {}

"""Nothing is decided otherwise than when tests/golden/cost_decisions.json was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.costing.decision_grid import Decision, grid

RECORDED: dict[str, list[Decision]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "cost_decisions.json").read_text(encoding="utf-8")
)
DECIDED = grid(len(RECORDED["depth"]))


@pytest.mark.parametrize("kind", RECORDED)
def test_decisions_are_those_that_were_recorded(kind: str) -> None:
    assert set(DECIDED) == set(RECORDED)
    for number, (got, want) in enumerate(zip(DECIDED[kind], RECORDED[kind], strict=True)):
        assert _numbers(got) == pytest.approx(_numbers(want), rel=1e-7), f"{kind} {number}"
        assert _words(got) == _words(want), f"{kind} {number}"


def _words(decision: Decision) -> list[Any]:
    return [part for part in decision if not isinstance(part, float)]


def _numbers(decision: Decision) -> list[float]:
    return [part for part in decision if isinstance(part, float)]

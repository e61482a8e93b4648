"""The benchmark of policies: its made-up traces, its tables, and where they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import policies
from bench.policies import Rows, Table, hint_lines, statements, tenants
from bench.report import Report
from tierkv.kvcore.block import Expectation
from tierkv.simulator.cache_replay import NO_HINTS


def test_traces_are_the_same_for_a_seed_and_in_order() -> None:
    trace = tenants(3, 200)
    assert trace == tenants(3, 200) != tenants(4, 200)
    assert [r.timestamp_s for r in trace] == sorted(r.timestamp_s for r in trace)
    parents: dict[int, int | None] = {}
    for request in trace:
        for before, block in zip((None, *request.block_ids), request.block_ids, strict=False):
            assert parents.setdefault(block, before) == before


def test_rows_are_pending_until_the_last_question() -> None:
    asked = [r for r in statements(1, 1, documents=2, questions=2) if r.session_id is not None]
    assert len(asked) == 4
    said = [hint.expectation for hint in Rows(2).of(asked)]
    assert said == [Expectation.ROWS] * 2 + [Expectation.NONE] * 2


def test_a_table_has_all_policies_between_nothing_and_the_optimum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, table = Report("policies"), Table("made up", tenants(1, 150), seed=1)
    lines = table.lines([0.1], report)
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    best = report.metrics["made up_10pct_belady_block_hit_pct"]
    assert 0 < best <= 100
    assert all(0 <= value <= best for name, value in report.metrics.items() if "_block_" in name)
    lines = hint_lines("title", table, {"none": NO_HINTS}, [0.1], report)
    assert lines[-2].startswith("| none | ")
    assert "belady" in capsys.readouterr().err


def test_all_tables_go_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "tenants", lambda seed, requests: tenants(seed, 60))
    monkeypatch.setattr(policies, "QUICK_CAPACITIES", (0.2,))
    page = tmp_path / "tables.md"
    policies.main(["--quick", "--out", str(page)])
    text = page.read_text()
    assert text.startswith("**tenants**: 60 requests, ") and "\n| 20 % | **" in text
    assert "\n| rows are pending | " in text

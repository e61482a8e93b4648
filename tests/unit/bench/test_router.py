"""The benchmarks of routers and sizes, on a trace of a few sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import router, sizing
from bench.router import Cell, draw, measure, quick_scene, table
from bench.synthetic_trace import agents
from tierkv.simulator.options import RouterName

SCENE = replace(quick_scene(1), requests=agents(6, seed=1), speeds=(1.0, 2.0, 4.0))
TWO = (RouterName.TIERKV, RouterName.RANDOM)


def test_every_router_is_measured_under_every_load_with_and_without_pool(tmp_path: Path) -> None:
    cells = measure(SCENE, TWO)
    assert {(c.router, c.pool, c.load) for c in cells} == {
        (name, pool, load) for name in TWO for pool in (False, True) for load in range(3)
    }
    assert all(0.0 < cell.p50_s <= cell.p99_s and 0.0 <= cell.attained <= 1.0 for cell in cells)
    lines = table(SCENE, cells).splitlines()
    assert len(lines) == 2 + len(TWO)
    assert all(line.count("|") == 8 for line in lines)
    draw([SCENE], cells, tmp_path / "routers.svg")
    assert "<svg" in (tmp_path / "routers.svg").read_text()


def test_docs_are_changed_between_the_markers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        Cell(SCENE.name, name, pool, load, 1.0, 0.5, 123.4, 0.9, 0.98)
        for name in TWO
        for pool in (False, True)
        for load in range(3)
    ]
    file = tmp_path / "performance.md"
    file.write_text(f"before\n{router.BEGIN}\nold\n{router.END}\nafter\n")
    monkeypatch.setattr(router, "DOCS", tmp_path)
    router.write_docs([SCENE], cells)
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| tierkv | 1.00 / 123 |" in text


def test_sizes_are_tried_one_at_a_time(tmp_path: Path) -> None:
    plan = replace(sizing.quick_plan(1), requests=agents(6, seed=1))
    lab = sizing.Lab(plan)
    tables = {
        "local": lab.local_size(),
        "bandwidth": lab.bandwidth(),
        "pool": lab.pool_size(),
        "gate": lab.gates(),
        "scale": lab.scale(),
    }
    assert [len(t.rows) for t in tables.values()] == [1, 2, 1, 5, 1]
    assert tables["scale"].column("nodes, pool")[0] >= 1
    sizing.write_tables(plan, tables, tmp_path / "new")
    text = (tmp_path / "new/sizing-synthetic.md").read_text()
    assert all(f"**{table.title}**" in text for table in tables.values())
    assert (tmp_path / "new/sizing-synthetic.svg").exists()

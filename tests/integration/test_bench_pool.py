"""The pool benchmark runs, verifies the bytes it moves and reports every metric; none is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.bench, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    picture = tmp_path_factory.mktemp("pool") / "pool.svg"
    done = subprocess.run(
        [sys.executable, "-m", "bench.pool", "--quick", "--no-peers", "--format", "json",
         "--sizes", "64,256", "--threads", "1,2", "--rounds", "1", "--seconds", "0.01",
         "--plot", str(picture)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "not measured" not in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer, picture


@pytest.mark.parametrize("op", ["get", "put"])
@pytest.mark.parametrize("contender", ["raw", "stripped", "memcpy", "tcp", "shm"])
def test_every_cell_of_a_contender_has_throughput_and_latency(
    run: tuple[dict[str, Any], Path], contender: str, op: str
) -> None:
    metrics, _ = run
    for size in ("64KiB", "256KiB"):
        for shape in ("single_t1", "single_t2", "batch16_t1", "batch16_t2"):
            name = f"{contender}_{op}_{size}_{shape}"
            assert metrics[f"{name}_gb_per_s"] > 0
            assert 0 < metrics[f"{name}_p50_us"] <= metrics[f"{name}_p99_us"]


def test_ratios_aims_and_machine_are_reported(run: tuple[dict[str, Any], Path]) -> None:
    metrics, _ = run
    assert metrics["tcp_of_raw_get_64KiB_single_t1"] > 0
    assert metrics["shm_of_memcpy_put_256KiB_batch16_t2"] > 0
    assert metrics["machine"]["cores"] >= 1
    assert any(name.startswith("aim ") for name in metrics)


def test_picture_shows_a_line_per_measured_contender(run: tuple[dict[str, Any], Path]) -> None:
    texts = {text for element in ElementTree.parse(run[1]).iter() if (text := element.text)}
    assert {"get, one value, one thread: GB/s", "put, one value, one thread: GB/s"} <= texts
    assert {"memcpy", "raw socket", "TierKV tcp", "TierKV shm"} <= texts
    assert not texts & {"Redis", "Mooncake TCP"}, "not measured here"

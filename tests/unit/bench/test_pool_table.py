"""Ratios, aims and tables of the pool benchmark, from rounds made by hand."""

from __future__ import annotations

import pytest

from bench import pool_table
from bench.pool_cell import Cell, Round
from bench.pool_run import Results

GET = Cell("get", 1 << 20, 1, 1)
PUT = Cell("put", 1 << 20, 16, 4)


def rounds(*speeds: float) -> list[Round]:
    return [Round(speed, p50_s=1 / speed, p99_s=2 / speed, operations=1) for speed in speeds]


@pytest.fixture
def results() -> Results:
    return Results(
        {
            GET: {"raw": rounds(4e9, 2e9, 1e9), "tcp": rounds(2e9, 2e9, 2e9)},
            PUT: {
                "raw": rounds(2e9),
                "tcp": rounds(1.9e9),
                "redis": rounds(1e9),
                "redis_pipe": rounds(2e9),
            },
        }
    )


def test_a_ratio_compares_round_with_round(results: Results) -> None:
    assert results.speed(GET, "raw") == 2e9
    assert results.ratio(GET, "tcp", "raw") == 1.0
    assert results.ratio(GET, "tcp", "redis") is None


def test_an_aim_counts_cells_and_names_the_worst(results: Results) -> None:
    raw, mooncake, redis, *_ = pool_table.aims(results)
    assert (raw.met, raw.worst) == (2, PUT)
    assert raw.verdict() == "met: 2 of 2 cells; worst 0.95 at put_1MiB_batch16_t4"
    assert mooncake.verdict() == "not measured"
    assert redis.values == {PUT: 0.95}  # Against the faster way to use it.
    assert redis.verdict().startswith("missed: 0 of 1 cells")


def test_a_cell_in_which_we_fail_misses_the_aim(results: Results) -> None:
    failed = Cell("put", 4 << 20, 1, 1)
    results.rounds[failed] = {"raw": rounds(1e9)}
    raw = pool_table.aims(results)[0]
    assert raw.verdict() == "missed: 2 of 3 cells; failed at put_4MiB_single_t1"
    assert dict(pool_table.metrics(results))[f"aim {raw.text}: cells"] == 3


def test_cells_of_the_disk_stay_out_of_the_memory_table(results: Results) -> None:
    disk = Cell("get", 4 << 20, 1, 1)
    results.rounds[disk] = {"fio": rounds(1e9), "l4": rounds(0.95e9)}
    assert "4MiB" not in pool_table.throughput_table(results)
    assert "| get 4MiB | 1 | 0.95 | 0.95 |" in pool_table.disk_table(results)


def test_metrics_name_contender_cell_and_unit(results: Results) -> None:
    metrics = dict(pool_table.metrics(results))
    assert metrics["tcp_put_1MiB_batch16_t4_gb_per_s"] == 1.9
    assert metrics["tcp_of_redis_pipe_put_1MiB_batch16_t4"] == 0.95
    assert metrics["raw_get_1MiB_single_t1_p50_us"] == pytest.approx(5e-4)

"""The table of ratios: which metrics are ratios, and to whom."""

from __future__ import annotations

import pytest

from bench import peers
from bench.peers import Compared


def test_ratios_to_peers_and_floors_are_found_by_name() -> None:
    metrics = {
        "tcp_of_redis_pipe_put_4KiB_batch16_t4": 0.18,
        "tcp_of_raw_get_1MiB_single_t1": 0.93,
        "1M_counted_1000_of_redis_mget": 1.4,
        "decode_batch_8_times_faster_than_transformers": 1.5,
        "relay_pgbench_simple_1_of_direct": 0.69,
        "simple_1_relay_of_pgbouncer": 0.88,
        "worst_auto_of_better": 1.0,
        "tcp_get_1MiB_gb_per_s": 2.0,
    }
    assert list(peers.compared("pool", metrics)) == [
        Compared("pool", "tcp_put_4KiB_batch16_t4", "redis_pipe", 0.18),
        Compared("pool", "tcp_get_1MiB_single_t1", "raw", 0.93),
        Compared("pool", "1M_counted_1000", "redis_mget", 1.4),
        Compared("pool", "decode_batch_8", "transformers", 1.5),
        Compared("pool", "relay_pgbench_simple_1", "direct", 0.69),
        Compared("pool", "simple_1_relay", "pgbouncer", 0.88),
    ]


def test_peers_stand_before_floors_and_old_ratios_beside_new_ones() -> None:
    rows = [Compared("pool", "a", "raw", 0.5), Compared("meta", "b", "redis_mget", 2.0)]
    page = "text\n<!-- peers:begin -->\nanything\n<!-- peers:end -->\nmore"
    page = peers.put_into(page, rows)
    new = [Compared("pool", "a", "raw", 0.75), Compared("pool", "c", "raw", 1.0)]
    assert peers.put_into(page, new).splitlines() == [
        "text",
        "<!-- peers:begin -->",
        "| bench | figure | of | before | ratio |",
        "|---|---|---|--:|--:|",
        "| `bench.pool` | a | raw (floor) | 0.5 | 0.75 |",
        "| `bench.pool` | c | raw (floor) |  | 1 |",
        "| `bench.meta` | b | redis_mget |  | 2 |",
        "<!-- peers:end -->",
        "more",
    ]
    with pytest.raises(ValueError, match="marks"):
        peers.put_into("text", rows)

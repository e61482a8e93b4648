"""``tierkv simulate`` on small files: its answers, its pictures, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard
from typer.testing import CliRunner

from tierkv.cli import app
from tierkv.kvcore.errors import ConfigError, TierKVError, UserError


def line(at_ms: int, blocks: list[int]) -> str:
    tokens = 512 * len(blocks) + 5
    row = {"timestamp": at_ms, "input_length": tokens, "output_length": 4, "hash_ids": blocks}
    return json.dumps(row)


LINES = [line(1_000 * n, [0, 1 + n % 3, 10 + n % 6]) for n in range(30)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl.zst"
    file.write_bytes(zstandard.compress("\n".join(LINES).encode()))
    return file


def simulate(*arguments: object) -> str:
    """Run the command and return what it printed."""
    done = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    if isinstance(done.exception, TierKVError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_one_cache(trace: Path) -> None:
    told = json.loads(
        simulate(trace, "--policy", "lru", "--capacity-blocks", 100, "--format", "json")
    )
    assert told["block_hit_rate"] == pytest.approx((3 * 30 - 10) / 90)
    assert 0.0 < told["token_hit_rate"] < 1.0
    assert (told["requests"], told["block_references"], told["unique_blocks"]) == (30, 90, 10)
    tiny = json.loads(
        simulate(trace, "--policy", "lru", "--capacity-blocks", 1, "--format", "json")
    )
    assert tiny["block_hit_rate"] < told["block_hit_rate"]


def test_a_cluster_says_the_same_twice(trace: Path) -> None:
    asked = (trace, "--nodes", 2, "--router", "tierkv", "--pool-gb", 10, "--pool-gbps", 5)
    first = simulate(*asked, "--slo", 1, "--format", "json")
    assert first == simulate(*asked, "--slo", 1, "--format", "json")
    told = json.loads(first)
    assert {"ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_mean_s"} <= set(told)
    assert told["slo_attainment"] == 1.0
    reused = told["local_hit_tokens"] + told["pool_hit_tokens"]
    assert reused + told["computed_tokens"] == told["prompt_tokens"] == 30 * (3 * 512 + 5)
    assert told["pool_write_bytes"] == 10 * 512 * 320 * 1024
    assert json.loads(simulate(*asked, "--format", "json"))["slo_attainment"] is None


def test_text_is_one_number_a_line(trace: Path) -> None:
    text = simulate(trace, "--nodes", 1)
    assert text.startswith("router")
    assert "\nttft_p99_s" in text
    assert "\nslo_attainment            -\n" in text


def test_what_a_pool_costs(trace: Path) -> None:
    asked = (trace, "--cost", "--slo", 5, "--pool-gb", 100, "--pool-gbps", 5)
    told = json.loads(simulate(*asked, "--region", "Hong Kong", "--format", "json"))
    assert (told["nodes_without_pool"], told["nodes_with_pool"], told["nodes_saved"]) == (1, 1, 0)
    assert told["pool_per_month_hong_kong"] == pytest.approx(1320.0)
    assert told["per_node_saved_hong_kong"] is None
    assert "ttft_p50_s" not in told


@pytest.mark.parametrize("arguments", [("--nodes", 2), ("--capacity-blocks", 8)])
def test_pictures_are_drawn_the_same_twice(
    trace: Path, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for file in (one, two):
        simulate(trace, *arguments, "--plot", file)
    assert one.read_text() == two.read_text()
    assert "<svg" in one.read_text()


def test_bad_lines_are_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join([*LINES, '{"timestamp": 1}', "nonsense"]))
    told = CliRunner().invoke(app, ["simulate", str(file), "--nodes", "1", "--format", "json"])
    assert json.loads(told.stdout)["refused_lines"] == 2
    assert "note: 2 lines were refused: line 31: " in told.stderr


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello\n" * 20)
    with pytest.raises(UserError, match="are no requests"):
        simulate(file, "--nodes", 1)
    with pytest.raises(UserError, match="can't be read"):
        simulate(tmp_path / "none.jsonl", "--nodes", 1)


def test_refusals_come_before_the_work(trace: Path, tmp_path: Path) -> None:
    pool = ("--pool-gb", 1, "--pool-gbps", 1)
    for arguments, says in [
        ((), "say what to simulate"),
        (("--nodes", 2, "--capacity-blocks", 3), "has no --nodes"),
        (("--nodes", 2, "--plot", tmp_path / "a.doc"), "is no picture format"),
        (("--nodes", 2, "--model", "gpt"), "unknown model 'gpt'"),
        (("--cost", "--slo", 1, *pool, "--plot", "a.svg"), "add --nodes"),
    ]:
        with pytest.raises(ConfigError, match=says):
            simulate(trace, *arguments)


def test_help_teaches_with_examples() -> None:
    told = simulate("--help")
    assert told.count("tierkv simulate trace.jsonl.zst") == 3
    assert "--closed-loop" in told


def test_a_trace_that_is_not_there_is_said_before_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        simulate(tmp_path / "nothing")

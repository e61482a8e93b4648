"""A damaged and a full disk under running processes: answers stay those without a cache.

Rows 16 and 17 of docs/faults.md. Memory holds few of the blocks, so answers need the disk; the
front's database lies on the same disk.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fix_cluster import wait_for
from tests.fix_roles import Roles
from tests.fix_small_disk import fill
from tests.integration.test_cluster import make_prompts

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(300)]
PROMPTS = make_prompts(72)
PAGE = 4096

Damage = Callable[[list[Path]], object]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of its own where one may be mounted, else a folder."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=192m", "none", str(folder)]
    mounted = not subprocess.run(command, capture_output=True).returncode
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[Roles]:
    pool = (f"dmp.disk_path={disk}", "dmp.disk_capacity=99MiB", "dmp.demote_above=0")
    more = {
        "dmp-0": pool,
        "front": (f"front.database={disk / 'front.duckdb'}",),
    }
    roles = Roles(tmp_path_factory.mktemp("roles"), more)
    try:
        roles.start("meta")
        roles.start("dmp-0", "compute-0", "compute-1", "front")
        roles.wait_whole()
        yield roles
    finally:
        roles.stop()


@pytest.fixture(scope="module")
def expected(cluster: Roles) -> list[str]:
    return [cluster.complete(prompt, use_cache=False) for prompt in PROMPTS]


def answers(cluster: Roles) -> list[str]:
    cluster.drop_caches()
    return ask(cluster, PROMPTS)


def ask(cluster: Roles, prompts: list[list[int]], **options: bool) -> list[str]:
    return [cluster.complete(prompt, **options) for prompt in prompts]


def stat(cluster: Roles, column: str, tier: str = "L4") -> str:
    """Return a figure of the pool node's tier, as text."""
    where = f"node_id = 'dmp-0' AND tier = '{tier}'"
    rows = cluster.query(f"SELECT {column} FROM tierkv.stat_kvcache_node WHERE {where}")
    return str(rows[0][0]) if rows else ""


def segments(disk: Path) -> list[Path]:
    return sorted((disk / "dmp-0").glob("segment-*.l4"))


def flip_bits(files: list[Path]) -> None:
    """Flip a bit in every page."""
    for file in files:
        data = bytearray(file.read_bytes())
        for at in range(99, len(data), PAGE):
            data[at] ^= 4
        with file.open("r+b") as out:
            out.write(data)


def tear(files: list[Path]) -> None:
    """Cut every file after the first pages of its first record."""
    for file in files:
        with file.open("r+b") as out:
            out.truncate(4 * PAGE)


def delete(files: list[Path]) -> None:
    for file in files:
        file.unlink()


def lose_memory(cluster: Roles, disk: Path, damage: Damage = list) -> None:
    """Restart the pool node without its memory; the disk is damaged meanwhile."""
    cluster.lose_machine("dmp-0")
    damage(segments(disk))
    cluster.start("dmp-0")
    cluster.wait_whole()


def on_disk(cluster: Roles) -> int:
    return int(stat(cluster, "blocks_used") or 0)


@pytest.mark.parametrize(
    ("damage", "told"),
    [(flip_bits, "bad bytes on disk"), (tear, "bad bytes on disk"), (delete, "were deleted")],
)
def test_a_disk_tier_damaged_under_a_node(
    cluster: Roles, expected: list[str], disk: Path, damage: Damage, told: str
) -> None:
    assert answers(cluster) == expected
    wait_for(lambda: on_disk(cluster), what="blocks are on disk")
    lose_memory(cluster, disk)
    damage(segments(disk))
    before = len(cluster.said(told))
    assert answers(cluster) == expected
    wait_for(
        lambda: len(cluster.said(told)) > before or told in stat(cluster, "medium"),
        what="the damage is told",
    )
    lose_memory(cluster, disk, damage)
    assert answers(cluster) == expected
    wait_for(lambda: on_disk(cluster), what="the disk is used again")


def test_a_disk_that_fills_up_under_pool_and_tables(
    cluster: Roles, expected: list[str], disk: Path
) -> None:
    """Whoever fills the disk has cut the pool's files, too: else their space is taken for good."""
    if not disk.is_mount():
        pytest.skip("mounting a small tmpfs needs root")
    cluster.query("CREATE TABLE t AS SELECT md5(i::text) a FROM range(1000) r(i)")
    assert answers(cluster) == expected
    wait_for(lambda: on_disk(cluster), what="blocks are on disk")
    lose_memory(cluster, disk)
    tear(segments(disk))
    filler = fill(disk)
    assert answers(cluster) == expected
    assert ask(cluster, make_prompts(73)) == ask(cluster, make_prompts(73), use_cache=False)
    wait_for(lambda: "No space left" in stat(cluster, "medium"), what="the full disk is told")
    refused_writes_and_right_reads(cluster)
    cluster.kill("front")
    cluster.start("front")
    assert ask(cluster, PROMPTS) == expected
    refused_writes_and_right_reads(cluster)
    filler.unlink()
    cluster.query("CREATE TABLE u AS SELECT a FROM t")
    lose_memory(cluster, disk)
    assert answers(cluster) == expected
    wait_for(lambda: on_disk(cluster), what="the disk is used again")


def refused_writes_and_right_reads(cluster: Roles) -> None:
    with pytest.raises(psycopg.errors.DiskFull):
        cluster.query("CREATE TABLE u AS SELECT md5(i::text) FROM range(300000) r(i)")
    asked = "SELECT ai_classify('Say ' || a, ARRAY['yes', 'no']) IS NOT NULL FROM t LIMIT 2"
    assert cluster.query(asked) == [(True,), (True,)]

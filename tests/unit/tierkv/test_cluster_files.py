"""Memory that stopped clusters left: named and freed; and room is asked for before a start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_dmp import Rig, store
from tierkv.config import load_config
from tierkv.dmp.segment.segment_place import memory_available
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.errors import ConfigError
from tierkv.processes.cluster_files import (
    clean,
    kept_text,
    left_segments,
    orphans_text,
    require_memory,
    segment_prefix,
)
from tierkv.settings import Settings

MakeRig = Callable[..., Rig]


def of_cluster(tmp_path: Path, name: str) -> Settings:
    """Settings of a cluster whose folder exists."""
    (tmp_path / name).mkdir()
    flags = {"dmp.segment_dir": str(tmp_path), "cluster.run_dir": str(tmp_path / name)}
    return load_config(flags=flags, environ={}).settings


def segment_of(settings: Settings, make_rig: MakeRig) -> Path:
    """Run a pool node of a cluster, store a block, stop it; return its segment."""
    run_dir = settings.cluster.run_dir
    path = Path(settings.dmp.segment_dir) / f"{segment_prefix(run_dir)}dmp-0.seg"
    rig = make_rig(segment_path=str(path), owner_folder=str(run_dir))
    store(InprocPoolNode(rig.node), "a")
    assert path not in [left.path for left in left_segments(settings)], "it is in use"
    rig.stop()
    return path


def test_memory_of_a_cluster_that_is_gone_is_named_and_freed(
    make_rig: MakeRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, gone, other = (of_cluster(tmp_path, name) for name in ("mine", "gone", "other"))
    paths = [segment_of(settings, make_rig) for settings in (mine, gone, other)]
    assert orphans_text(mine) == ""
    gone.cluster.run_dir.rmdir()
    assert paths[1].name in orphans_text(mine)
    assert paths[0].name not in orphans_text(mine)
    kept = kept_text(mine)
    assert (str(paths[0]) in kept, "tierkv pool clean" in kept) == (True, True)
    clean(mine)
    assert [path.exists() for path in paths] == [False, False, True]
    said = capsys.readouterr().out
    assert f"removed {paths[1]}" in said and f"of {other.cluster.run_dir}" in said
    assert kept_text(mine) == "no KV stays in memory"


def test_a_start_that_memory_can_not_hold_is_refused_with_both_numbers(tmp_path: Path) -> None:
    flags = {"dmp.segment_dir": "/dev/shm", "cluster.run_dir": str(tmp_path)}
    wanted = load_config(flags=flags | {"dmp.capacity": "1000TiB"}, environ={}).settings
    with pytest.raises(
        ConfigError, match=r"may need 1048576000 MiB more, but only \d+ MiB"
    ) as caught:
        require_memory(wanted, 1)
    assert "tierkv pool clean" in (caught.value.hint or "")
    require_memory(wanted, 0)


def test_a_control_group_s_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert memory_available(tmp_path, tmp_path / "groups") == 5000 << 10
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "groups/a"
    (group / "b").mkdir(parents=True)
    (group / "memory.max").write_text("4000\n")
    (group / "memory.current").write_text("3500\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 100\n")
    (group / "b/memory.max").write_text("max\n")
    assert memory_available(tmp_path, tmp_path / "groups") == 600

"""What ``tierkv doctor`` says about the ways KV bytes can take."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from tierkv.commands.doctor import check_disk, check_rdma, check_shm, check_tcp, judge_rdma
from tierkv.config import load_config
from tierkv.dmp.transport.verbs.device import Discovery, RdmaPort
from tierkv.processes.cluster_files import segment_prefix
from tierkv.settings import Settings

GIB = 1 << 30
PORT = RdmaPort("rxe0", 1, 1, "::ffff:10.0.0.1", 0, 3, 16)


def settings(**flags: object) -> Settings:
    values = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(flags=values, environ={}).settings


def judged(found: Discovery, memlock_bytes: int = -1) -> tuple[str, str, str]:
    finding = judge_rdma(found, memlock_bytes=memlock_bytes, capacity_bytes=GIB)
    return finding.state, finding.found, finding.cure


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("no RDMA: this machine has no RDMA device", "card"),
        ("no RDMA: pyverbs is not installed", "apt-get install python3-pyverbs"),
        ("no RDMA: rxe0 has no active port with an IPv4 RoCE v2 address", "IPv4 address"),
        ("no RDMA: something else", "docs/rdma.md"),
    ],
)
def test_a_machine_without_rdma_hears_why_and_what_to_do(reason: str, cure: str) -> None:
    state, found, advice = judged(Discovery((), reason))
    assert (state, cure in advice) == ("optional", True)
    assert found == f"{reason.removeprefix('no RDMA: ')}; other machines: TCP"


def test_rdma_wants_locked_memory() -> None:
    assert judged(Discovery((PORT,))) == ("ok", "rxe0 (::ffff:10.0.0.1)", "")
    assert judged(Discovery((PORT,)), GIB)[0] == "ok"
    state, found, cure = judged(Discovery((PORT,)), 8 << 20)
    assert (state, "ulimit -l is 8 MiB and the segment has 1024 MiB" in found) == ("optional", True)
    assert "LimitMEMLOCK" in cure


def test_rdma_can_be_off() -> None:
    assert check_rdma(settings(dmp__rdma="off")).found == "dmp.rdma is off"
    assert check_rdma(settings()).subject == "path rdma"


def test_shared_memory_needs_room(tmp_path: Path) -> None:
    assert check_shm(settings(dmp__segment_dir=str(tmp_path), dmp__capacity="1MiB")).state == "ok"
    none = check_shm(settings(dmp__segment_dir=str(tmp_path / "none")))
    assert (none.state, "tmpfs" in none.cure) == ("missing", True)
    full = check_shm(settings(dmp__segment_dir=str(tmp_path), dmp__capacity="1000TiB"))
    assert (full.state, "remount" in full.cure) == ("missing", True)


def test_a_segment_of_this_cluster_counts_as_room(tmp_path: Path) -> None:
    room = shutil.disk_usage(tmp_path).free + (1 << 20)
    flags = {"dmp__segment_dir": str(tmp_path), "cluster__run_dir": str(tmp_path / "run")}
    wanted = settings(**flags, dmp__capacity=room)
    assert check_shm(wanted).state == "missing"
    segment = tmp_path / f"{segment_prefix(wanted.cluster.run_dir)}dmp-0.seg"
    segment.write_bytes(bytes(1 << 20))
    assert "hold 1 MiB" in check_shm(wanted).found


def test_a_disk_pool_needs_room_and_may_be_none(tmp_path: Path) -> None:
    none = check_disk(settings())
    assert (none.state, "dmp.disk_path" in none.cure) == ("optional", True)
    folder = str(tmp_path / "not-yet" / "disk")
    assert check_disk(settings(dmp__disk_path=folder, dmp__disk_capacity="1MiB")).state == "ok"
    full = check_disk(settings(dmp__disk_path=folder, dmp__disk_capacity="1000TiB"))
    assert (full.state, "lower dmp.disk_capacity" in full.cure) == ("missing", True)


def test_tcp_says_who_can_reach_it() -> None:
    assert "this machine only" in check_tcp(settings()).found
    assert check_tcp(settings(dmp__bind="0.0.0.0")).cure == "set cluster.token"
    assert check_tcp(settings(dmp__bind="0.0.0.0", cluster__token="t")).state == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use" in check_tcp(settings(dmp__port=port)).found

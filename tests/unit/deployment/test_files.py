"""Compose and systemd: files that their own tools accept, and folders that are not ours."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tierkv.commands.deploy import write_files
from tierkv.commands.options import DeployTarget
from tierkv.config import load_config
from tierkv.deployment.files import ROLES
from tierkv.kvcore.errors import ConfigError, UserError

COUNTS = {"meta": 1, "compute": 2, "front": 1}


def write(target: DeployTarget, out: Path, **flags: Any) -> None:
    loaded = load_config(flags=flags, environ={})
    write_files(loaded, target, out, counts=COUNTS, image="here/kv:7", roles=ROLES)


def test_compose_runs_each_role_and_shares_the_pools_memory(tmp_path: Path) -> None:
    write(DeployTarget.COMPOSE, tmp_path / "c", **{"dmp.capacity": "2GiB", "front.drain_s": 20})
    services = yaml.safe_load((tmp_path / "c/compose.yaml").read_text())["services"]
    assert set(services) == {"meta", "dmp", "compute", "compute-1", "front"}
    assert {each["image"] for each in services.values()} == {"here/kv:7"}
    assert services["compute-1"]["ipc"] == services["compute"]["ipc"] == "service:dmp"
    assert services["dmp"]["shm_size"] > 2 << 30
    assert services["front"]["stop_grace_period"] == "50s"
    environment = services["compute-1"]["environment"]
    assert environment["TIERKV_CLUSTER_META_ADDRESS"] == "meta:7400"
    assert environment["TIERKV_CLUSTER_ADVERTISE"] == "compute-1"
    settings = load_config(tmp_path / "c/tierkv.toml", environ=environment).settings
    assert settings.front.users and settings.front.api_keys and settings.cluster.token


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    write(DeployTarget.SYSTEMD, tmp_path / "s", **{"cluster.meta_address": "10.0.0.1:7400"})
    units = [*sorted((tmp_path / "s").glob("*.service")), tmp_path / "s/tierkv.target"]
    assert len(units) == 5
    analyze = shutil.which("systemd-analyze")
    assert analyze, "no systemd-analyze: run deploy/install-test-packages.sh"
    for unit in units:
        # Programs exist in tests' environment only; the account is made by sysusers.d.
        checked = subprocess.run(
            [analyze, "verify", "--man=no", unit], capture_output=True, text=True
        )
        told = [line for line in checked.stderr.splitlines() if str(unit.name) in line]
        assert checked.returncode == 0 and not told, checked.stderr
    front = (tmp_path / "s/tierkv-front.service").read_text()
    assert "TIERKV_CLUSTER_META_ADDRESS=10.0.0.1:7400" in front
    assert "TimeoutStopSec=35" in front


def test_no_password_stands_outside_the_settings_file(tmp_path: Path) -> None:
    url = "postgresql://kv:s3cret$HOME@db/kv"
    for target in (DeployTarget.COMPOSE, DeployTarget.SYSTEMD):
        out = tmp_path / target
        write(target, out, **{"meta.database": url, "front.postgres": url, "dmp.disk_path": "/kv"})
        holders = [path.name for path in out.rglob("*") if path.is_file()
                   and "s3cret" in path.read_text()]  # fmt: skip
        assert holders == ["tierkv.toml"]
        assert (out / "tierkv.toml").stat().st_mode & 0o077 == 0
    unit = (tmp_path / "systemd/tierkv-dmp.service").read_text()
    assert "ReadWritePaths=/dev/shm /kv\n" in unit


def test_a_token_file_needs_no_token(tmp_path: Path) -> None:
    write(DeployTarget.SYSTEMD, tmp_path / "s", **{"cluster.token_file": "/etc/tierkv/tokens"})
    assert "\ntoken =" not in (tmp_path / "s/tierkv.toml").read_text()


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty") as caught:
        write(DeployTarget.COMPOSE, tmp_path)
    assert caught.value.hint == "Give another --out FOLDER."
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("flags", "counts", "said"),
    [
        ({"meta.database": "/m.sqlite"}, {"meta": 3}, "can't share a SQLite file"),
        ({}, {"front": 2}, "only in PostgreSQL"),
        ({"compute.more_models": ["/b"]}, {}, "one model"),
    ],
)
def test_what_can_not_work_is_refused(
    tmp_path: Path, flags: dict[str, Any], counts: dict[str, int], said: str
) -> None:
    loaded = load_config(flags=flags, environ={})
    with pytest.raises(ConfigError, match=said):
        write_files(
            loaded, DeployTarget.HELM, tmp_path / "h", counts=COUNTS | counts, image="", roles=ROLES
        )
    assert not (tmp_path / "h").exists()


def test_an_unknown_role_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'dpm'"):
        write_files(
            load_config(environ={}), DeployTarget.SYSTEMD, tmp_path / "s", counts=COUNTS, image="",
            roles=["dpm"],
        )  # fmt: skip

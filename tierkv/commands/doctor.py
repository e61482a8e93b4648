"""What is missing on this machine, and how to get it.

Each check is a function that answers a Finding; ``tierkv doctor`` prints them and exits with 1 when
something needed is missing. Checks look, they never change anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from tierkv.commands.doctor_paths import (
    check_disk,
    check_left,
    check_memory,
    check_rdma,
    check_shm,
    check_tcp,
)
from tierkv.commands.finding import MISSING, OK, OPTIONAL, Finding
from tierkv.config import LoadedConfig
from tierkv.kvcore.errors import ConfigError, ModelFolderError
from tierkv.processes.descriptors import raise_descriptor_limit
from tierkv.settings import Settings

COLOURS = {OK: "green", MISSING: "red", OPTIONAL: "yellow"}


def print_report(loaded: LoadedConfig) -> int:
    """Print all findings; 1 when something needed is missing, else 0."""
    findings = [check(loaded.settings) for check in CHECKS]
    for finding in findings:
        typer.secho(f"{finding.state:<9}", fg=COLOURS[finding.state], nl=False)
        typer.echo(f"{finding.subject}: {finding.found}")
        if finding.cure:
            typer.echo(f"{'':<9}  -> {finding.cure}")
    return 1 if any(finding.state == MISSING for finding in findings) else 0


def check_python(settings: Settings) -> Finding:
    """Which Python runs (the package itself refuses versions before 3.11)."""
    return Finding("python", OK, ".".join(map(str, sys.version_info[:3])))


def check_torch(settings: Settings) -> Finding:
    """Torch, for hosts that compute."""
    if importlib.util.find_spec("torch") is None:
        return Finding(
            "torch",
            OPTIONAL,
            "not installed; this host can run front, meta and dmp",
            "pip install 'tierkv[compute]' to run compute nodes, `tierkv sql` and `tierkv demo`",
        )
    return Finding("torch", OK, importlib.metadata.version("torch"))


def check_gpu(settings: Settings) -> Finding:
    """A CUDA device; without one compute runs on the CPU."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if devices:
        return Finding("gpu", OK, ", ".join(device.name for device in devices))
    return Finding("gpu", OPTIONAL, "no NVIDIA device; compute nodes use the CPU")


def check_ports(settings: Settings) -> Finding:
    """The front's two ports are free, or a cluster of ours is using them."""
    taken = [
        port
        for port in (settings.front.pg_port, settings.front.http_port)
        if port and not _is_free(settings.front.bind, port)
    ]
    if not taken:
        return Finding("ports", OK, f"{settings.front.pg_port}, {settings.front.http_port} free")
    cure = "a running cluster? (`tierkv status`) Else use other --pg-port and --http-port"
    return Finding("ports", OPTIONAL, f"in use: {', '.join(map(str, taken))}", cure)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def check_psql(settings: Settings) -> Finding:
    """The psql client, for people."""
    found = shutil.which("psql")
    if found:
        return Finding("psql", OK, found)
    return Finding("psql", OPTIONAL, "not installed", "apt-get install postgresql-client")


def check_files(settings: Settings) -> Finding:
    """Enough file descriptors for many connections."""
    limit = raise_descriptor_limit()  # as every role does at start
    if limit >= 4096:
        return Finding("open files", OK, str(limit))
    return Finding("open files", OPTIONAL, str(limit), "ulimit -Hn 65536; systemd: LimitNOFILE")


def check_run_dir(settings: Settings) -> Finding:
    """A place for logs and databases."""
    folder = settings.cluster.run_dir.expanduser()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(parent, os.W_OK):
        return Finding("run_dir", OK, str(folder))
    cure = "set cluster.run_dir to a folder you may write"
    return Finding("run_dir", MISSING, f"{folder} can't be written", cure)


def check_model(settings: Settings) -> Finding:
    """Model folders that can be read, under different names."""
    from tierkv.parts.shipped_model import model_folder, split_by_model
    from tierkv.storage.modelfiles.model_folder import inspect_model_folder

    found = []
    try:
        for each in split_by_model(settings.compute):
            folder = model_folder(each)
            found.append(f"{folder} (revision {inspect_model_folder(folder).revision[:12]})")
    except (ModelFolderError, ConfigError) as error:
        return Finding("model", MISSING, error.message, error.hint or "set compute.model")
    return Finding("model", OK, ", ".join(found))


CHECKS: tuple[Callable[[Settings], Finding], ...] = (
    check_python,
    check_torch,
    check_gpu,
    check_memory,
    check_shm,
    check_left,
    check_rdma,
    check_tcp,
    check_disk,
    check_ports,
    check_psql,
    check_files,
    check_run_dir,
    check_model,
)

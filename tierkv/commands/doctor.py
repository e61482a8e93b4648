"""Missing parts of this machine, their cures, and the available paths for KV bytes.

Called by ``tierkv doctor``. Each check returns a Finding and changes nothing. The command exits
with status 1 if a required part is missing. The view ``tierkv.nodes`` and ``tierkv status`` show
the paths in use by running nodes.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from tierkv.config import LoadedConfig, name_list
from tierkv.dmp.segment.segment_place import is_memory, memory_available
from tierkv.kvcore.errors import ConfigError, ModelFolderError
from tierkv.processes.cluster_files import CURE, orphans_text, segment_prefix
from tierkv.processes.own_process import raise_descriptor_limit
from tierkv.settings import Settings

if TYPE_CHECKING:
    from tierkv.dmp.transport.verbs.device import Discovery

OK, MISSING, OPTIONAL = "ok", "missing", "optional"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``cure`` is the advice unless ``state`` is ok."""

    subject: str
    state: str
    found: str
    cure: str = ""


LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def check_shm(settings: Settings) -> Finding:
    """Check the room for the pool's segment file, which processes on the host map."""
    folder, wanted = settings.dmp.segment_dir, int(settings.dmp.capacity)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        cure = "set dmp.segment_dir to a folder on tmpfs"
        return Finding("path shm", MISSING, f"{folder}: {error.strerror}", cure)
    text = f"{folder} has {free >> 20} MiB free, dmp.capacity is {wanted >> 20} MiB"
    held = _held_bytes(Path(folder), segment_prefix(settings.cluster.run_dir))
    if held:
        text += f", this cluster's segments hold {held >> 20} MiB"
    if free + held >= wanted:
        return Finding("path shm", OK, text)
    cure = (
        f"mount -o remount,size={(wanted >> 20) + 1024}m {folder}, or lower dmp.capacity "
        f"(in a container: --shm-size)"
    )
    return Finding("path shm", MISSING, text, cure)


def _held_bytes(folder: Path, prefix: str) -> int:
    """Return the memory of existing segments, which a start attaches without further memory."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob(f"{prefix}*.seg"))


def check_left(settings: Settings) -> Finding:
    """Find memory left by clusters whose folder is gone."""
    orphans = orphans_text(settings)
    if orphans:
        return Finding("memory left behind", OPTIONAL, orphans, CURE)
    return Finding("memory left behind", OK, "none")


def check_memory(settings: Settings) -> Finding:
    """Check the memory for the pool, which free room in the folder does not guarantee."""
    available = memory_available()
    if available is None:
        return Finding("memory", OPTIONAL, "the system does not report the available memory")
    wanted = int(settings.dmp.capacity)
    held = _held_bytes(Path(settings.dmp.segment_dir), segment_prefix(settings.cluster.run_dir))
    text = f"{available >> 20} MiB available, dmp.capacity is {wanted >> 20} MiB"
    if available + held >= wanted or not is_memory(Path(settings.dmp.segment_dir)):
        return Finding("memory", OK, text)
    return Finding("memory", MISSING, text, f"lower dmp.capacity, or {CURE}")


def check_disk(settings: Settings) -> Finding:
    """Check the room for the disk pool, and the library for its archive."""
    wanted = int(settings.dmp.disk_capacity)
    if not settings.dmp.disk_path:
        cure = "set dmp.disk_path to a folder on a local disk"
        return Finding("disk pool", OPTIONAL, "none; evicted blocks are recomputed", cure)
    folder = Path(settings.dmp.disk_path).expanduser()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        return Finding("disk pool", MISSING, f"{folder} can't be written", "set dmp.disk_path")
    if settings.dmp.archive_url and importlib.util.find_spec("obstore") is None:
        text = f"{settings.dmp.archive_url} needs the package obstore"
        return Finding("disk pool", MISSING, text, "pip install 'tierkv[s3]'")
    free = shutil.disk_usage(parent).free
    held = sum(path.stat().st_blocks * 512 for path in folder.glob("*/segment-*.l4"))
    text = f"{folder} has {free >> 20} MiB free, dmp.disk_capacity is {wanted >> 20} MiB"
    if held:
        text += f", disk pools there hold {held >> 20} MiB"
    if free + held >= wanted:
        return Finding("disk pool", OK, text)
    return Finding("disk pool", MISSING, text, "free disk space, or lower dmp.disk_capacity")


def check_rdma(settings: Settings) -> Finding:
    """Check RDMA devices, pyverbs and locked memory; the alternative between machines is TCP."""
    if settings.dmp.rdma == "off":
        return Finding("path rdma", OPTIONAL, "dmp.rdma is off", "set dmp.rdma to auto")
    # Imported here because the module needs numpy, which `tierkv --help` must not wait for.
    from tierkv.dmp.transport.verbs.device import discover

    return judge_rdma(
        discover(name_list(settings.dmp.rdma_devices)),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        capacity_bytes=int(settings.dmp.capacity),
    )


def judge_rdma(found: Discovery, *, memlock_bytes: int, capacity_bytes: int) -> Finding:
    """Return what RDMA lacks here; pure.

    Args:
        found: ports, or the reason why no port was found.
        memlock_bytes: ``ulimit -l`` in bytes; negative for no limit.
        capacity_bytes: size of the segment, which RDMA locks in memory.
    """
    if not found.ports:
        reason = found.reason.removeprefix("no RDMA: ")
        return Finding("path rdma", OPTIONAL, f"{reason}; other machines: TCP", _rdma_cure(reason))
    names = ", ".join(f"{port.device} ({port.gid})" for port in found.ports)
    if 0 <= memlock_bytes < capacity_bytes:
        text = (
            f"{names}, but ulimit -l is {memlock_bytes >> 20} MiB and the segment has "
            f"{capacity_bytes >> 20} MiB"
        )
        cure = "set ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)"
        return Finding("path rdma", OPTIONAL, text, cure)
    return Finding("path rdma", OK, names)


def _rdma_cure(reason: str) -> str:
    if "pyverbs" in reason:
        return "apt-get install python3-pyverbs, or deploy/install-pyverbs.sh"
    if "no active port" in reason:
        return "bring the device's network interface up and give it an IPv4 address"
    if "no RDMA device" in reason:
        return (
            "RDMA needs a RoCE or InfiniBand card; to try: rdma link add rxe0 type rxe netdev eth0"
        )
    return "see docs/rdma.md"


def check_tcp(settings: Settings) -> Finding:
    """Check that the data plane's address can be bound, and report its reach."""
    bind, port = settings.dmp.bind, settings.dmp.port
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            cure = "if no dmp node of yours runs here (`tierkv status`), set dmp.bind and dmp.port"
            return Finding("path tcp", OPTIONAL, f"{bind}:{port}: {error.strerror}", cure)
    if bind in LOOPBACK:
        return Finding("path tcp", OK, f"{bind}, this machine only (dmp.bind)")
    if not settings.cluster.token and not settings.cluster.token_file:
        return Finding("path tcp", MISSING, f"{bind} without a token", "set cluster.token")
    return Finding("path tcp", OK, f"{bind}:{port or 'any'}")


COLOURS = {OK: "green", MISSING: "red", OPTIONAL: "yellow"}


def print_report(loaded: LoadedConfig) -> int:
    """Print all findings; return 1 if a required part is missing, else 0."""
    findings = [check(loaded.settings) for check in CHECKS]
    for finding in findings:
        typer.secho(f"{finding.state:<9}", fg=COLOURS[finding.state], nl=False)
        typer.echo(f"{finding.subject}: {finding.found}")
        if finding.cure:
            typer.echo(f"{'':<9}  -> {finding.cure}")
    return 1 if any(finding.state == MISSING for finding in findings) else 0


def check_python(settings: Settings) -> Finding:
    """Report the version of Python (the package itself refuses versions before 3.11)."""
    return Finding("python", OK, ".".join(map(str, sys.version_info[:3])))


def check_torch(settings: Settings) -> Finding:
    """Check torch, for hosts that compute."""
    if importlib.util.find_spec("torch") is None:
        return Finding(
            "torch",
            OPTIONAL,
            "not installed; this host can run front, meta and dmp",
            "pip install 'tierkv[compute]' to run compute nodes, `tierkv sql` and `tierkv demo`",
        )
    from importlib import metadata  # Imports the email package.

    return Finding("torch", OK, metadata.version("torch"))


def check_gpu(settings: Settings) -> Finding:
    """Check for a CUDA device; without a device compute nodes use the CPU."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if devices:
        return Finding("gpu", OK, ", ".join(device.name for device in devices))
    return Finding("gpu", OPTIONAL, "no NVIDIA device; compute nodes use the CPU")


def check_ports(settings: Settings) -> Finding:
    """Check the front's two ports: free, or used by a cluster of TierKV."""
    taken = [
        port
        for port in (settings.front.pg_port, settings.front.http_port)
        if port and not _is_free(settings.front.bind, port)
    ]
    if not taken:
        return Finding("ports", OK, f"{settings.front.pg_port}, {settings.front.http_port} free")
    cure = "if no cluster of yours runs (`tierkv status`), use other --pg-port and --http-port"
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
    """Check the psql client, for people."""
    found = shutil.which("psql")
    if found:
        return Finding("psql", OK, found)
    return Finding("psql", OPTIONAL, "not installed", "apt-get install postgresql-client")


def check_files(settings: Settings) -> Finding:
    """Check the limit of file descriptors, for many connections."""
    limit = raise_descriptor_limit()  # as every role does at start
    if limit >= 4096:
        return Finding("open files", OK, str(limit))
    cure = "set ulimit -Hn 65536 (systemd: LimitNOFILE)"
    return Finding("open files", OPTIONAL, str(limit), cure)


def check_run_dir(settings: Settings) -> Finding:
    """Check the folder for logs and databases."""
    folder = settings.cluster.run_dir.expanduser()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(parent, os.W_OK):
        return Finding("run_dir", OK, str(folder))
    cure = "set cluster.run_dir to a folder that you may write to"
    return Finding("run_dir", MISSING, f"{folder} can't be written", cure)


def check_model(settings: Settings) -> Finding:
    """Check the model folders: readable, and with different names."""
    from tierkv.parts.served_models import model_folder, split_by_model
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

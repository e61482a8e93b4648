"""A real Ray of several local nodes, each at a loopback address of its own, as if on a machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fix_cluster import free_port, wait_for

RAY = Path(sys.executable).with_name("ray")
_STORE_BYTES = 80_000_000
_ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


class LocalRay:
    """Ray nodes at 127.0.0.2, 127.0.0.3, ...; the first is the head.

    Attributes:
        address: of the head, for drivers.
    """

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus
        # Ray's sockets lie in this folder, and their paths are short.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.2:{free_port()}"

    def start(self, host: str, *, zone: str = "") -> None:
        """Start a node at an address, perhaps in a zone, and wait until it is there."""
        where = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        where.append(f"--temp-dir={self._folder}")
        if self._nodes:
            where = [f"--address={self.address}"]
        if zone:
            where.append(f"--labels=ray.io/availability-zone={zone}")
        log = Path(self._folder) / f"{host}-{len(self._nodes)}.out"
        with log.open("wb") as out:
            self._nodes[host] = subprocess.Popen(
                [
                    str(RAY), "start", *where, f"--node-ip-address={host}", "--block",
                    f"--num-cpus={self._cpus}", f"--object-store-memory={_STORE_BYTES}",
                    "--disable-usage-stats",
                ],
                stdout=out, stderr=out, env=_ENVIRONMENT, start_new_session=True,
            )  # fmt: skip
        wait_for(lambda: b"runtime started" in log.read_bytes(), what=f"Ray runs at {host}")

    def lose(self, host: str) -> None:
        """Kill -9 all processes of a node."""
        process = self._nodes.pop(host)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    def stop(self) -> None:
        """End all nodes, the head last."""
        for process in reversed(self._nodes.values()):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)

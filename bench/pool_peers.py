"""The environment of bench.pool's peers: a virtual environment under the user's cache folder.

Called by bench.pool and by the peers' workers. An error about a missing program contains the cure;
nothing is installed into the project's environment or the system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

PACKAGES: Final = {
    "redis": ("redis==8.1.0", "hiredis==3.5.0", "numpy"),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),
}
START_S: Final = 30.0


class PeerMissingError(Exception):
    """A peer can't run here; the message says why."""


def cache_folder() -> Path:
    """Return the benchmark's own folder, on a disk."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tierkv-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def peer_python(peer: str, *, timeout_s: float) -> Path:
    """Return the interpreter with a peer's client; create the environment if necessary.

    Raises:
        PeerMissingError: no server program, or the packages can't be installed in time.
    """
    if peer == "redis":
        redis_server()
    folder = cache_folder() / f"{peer}-py{sys.version_info[0]}.{sys.version_info[1]}"
    python = folder / "bin" / "python"
    done = folder / "installed"
    wanted = " ".join(PACKAGES[peer])
    if done.exists() and done.read_text() == wanted:
        return python
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], timeout_s)
        _run([str(python), "-m", "pip", "install", "-q", *PACKAGES[peer]], timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerMissingError(f"{wanted} can't be installed: {_why(error)}") from error
    done.write_text(wanted)
    return python


def redis_server() -> str:
    """Return the path of a Redis or Valkey server.

    Raises:
        PeerMissingError: no server is installed.
    """
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    raise PeerMissingError("no valkey-server or redis-server; try: apt-get install redis-server")


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process listens on a port.

    Raises:
        TimeoutError: no process listens in time, or the process ended.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
            return
        time.sleep(0.05)
    raise TimeoutError(f"{process.args!r} does not listen on port {port}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a server."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(command: list[str], timeout_s: float) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=timeout_s)


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else str(error)
    return str(error)

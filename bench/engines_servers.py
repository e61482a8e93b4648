"""The servers of bench.engines as processes: plain vLLM, vLLM with connectors, and our engine.

Each contender answers ``/v1/completions`` on its own port. A restart of a contender keeps all state
outside of the engine: our pool, or the folder of the example connector. vLLM runs unchanged in a
separate virtual environment, with this checkout on the Python path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from bench.engines_process import ROOT, Process, ServerError
from bench.pool_peers import free_port

VENV: Final = ROOT / ".venv-vllm"
MODEL: Final = "bench"
CAPACITY: Final = "3GiB"
VLLM_BLOCK: Final = 128
"""Tokens per block that vLLM chooses on a CPU. On a CPU, vLLM rounds bytes of cache up to whole
GiB, so the size of the cache is given in blocks."""
_VLLM: Final = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings common to all contenders.

    Attributes:
        venv: folder of the virtual environment with vLLM.
        model: folder of the model.
        cache: tokens of KV inside an engine, in whole vLLM blocks.
        token_bytes: bytes of one token's KV.
        context: longest prompt with answer, in tokens.
        folder: folder for logs and files.
        threads: threads of each engine.
        sequences: most requests that an engine answers at once.
    """

    venv: Path
    model: Path
    cache: int
    token_bytes: int
    context: int
    folder: Path
    threads: int
    sequences: int = 8


def vllm_env(threads: int) -> dict[str, str]:
    """Return the variables to add to the environment of vLLM's processes."""
    return _VLLM | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}


def find_venv(given: Path | None) -> Path:
    """Return the virtual environment with vLLM.

    Args:
        given: folder of the environment; None selects the folder of ``make test-engines``.

    Raises:
        ServerError: the environment is missing; the message says how to make the environment.
    """
    folder = given or VENV
    if any(folder.glob("lib/python3*/site-packages/vllm/version.py")):
        return folder.absolute()
    raise ServerError(f"no vLLM in {folder}; make test-engines makes it, or say --venv FOLDER")


class Contender(Protocol):
    """A server that answers requests and restarts without losing state outside of the engine."""

    name: str
    port: int

    def start(self) -> None:
        """Start the server and wait until it answers."""

    def restart(self) -> None:
        """Stop the engine and start it again."""

    def stop(self) -> None:
        """End all processes of the server."""


class Vllm:
    """``vllm serve`` on the CPU, with a connector or without."""

    def __init__(self, name: str, setup: Setup, connector: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.port = free_port()
        self._setup = setup
        self._connector = connector
        self._process: Process | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        setup = self._setup
        # Not `vllm serve`, which looks up its version under a package name missing on a CPU.
        command = [
            str(setup.venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
            "--host=127.0.0.1", f"--port={self.port}", f"--model={setup.model}",
            f"--served-model-name={MODEL}", "--dtype=float32", "--enforce-eager",
            f"--max-model-len={setup.context}", f"--max-num-batched-tokens={setup.context}",
            f"--max-num-seqs={setup.sequences}",
            f"--num-gpu-blocks-override={setup.cache // VLLM_BLOCK}",
            "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if self._connector is not None:
            command.append(f"--kv-transfer-config={json.dumps(self._connector)}")
        self._process = Process(self.name, command, setup.folder, vllm_env(setup.threads))
        self._process.await_http(self.port, "/health")

    def restart(self) -> None:
        """Stop the engine and start it again."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End all processes of the server."""
        if self._process is not None:
            self._process.stop()
            self._process = None


class Pool:
    """A meta server and a pool node, which outlive an engine.

    Attributes:
        meta: address of the meta server.
        address: address of the pool node.
    """

    def __init__(self, folder: Path) -> None:
        self.meta, self.address = "", ""
        self._folder = folder
        self._processes: list[Process] = []

    def start(self) -> None:
        """Start both and wait for both addresses."""
        self.meta = self.serve("meta")
        capacity = f"dmp.capacity={CAPACITY}"
        self.address = self.serve(
            "dmp", "dmp.segment_dir=/dev/shm", capacity, "dmp.remove_on_stop=true"
        )

    def serve(self, role: str, *settings: str) -> str:
        """Start a role that lives as long as the pool; return the role's address."""
        process = self.start_role(role, *settings)
        self._processes.append(process)
        answer = process.ready_line()
        address: str = answer.get("http") or answer["address"]
        return address

    def start_role(self, role: str, *settings: str) -> Process:
        """Start ``tierkv serve ROLE``; the caller waits for the process and stops the process."""
        shared = [f"cluster.run_dir={self._folder}", f"cluster.secret={'s' * 32}"]
        if self.meta:
            shared.append(f"cluster.meta_address={self.meta}")
        command = [sys.executable, "-m", "tierkv", "serve", role]
        for setting in (*shared, *settings):
            command += ["--set", setting]
        return Process(role, command, self._folder)

    def stop(self) -> None:
        """End all processes, in reverse order of start."""
        while self._processes:
            self._processes.pop().stop()


class OurEngine:
    """Our own compute node behind our own front, on a pool that other contenders may share."""

    name = "tierkv"

    def __init__(self, setup: Setup, pool: Pool) -> None:
        self.port = 0
        self._setup = setup
        self._pool = pool
        self._compute: Process | None = None

    def start(self) -> None:
        """Start compute node and front and wait for both."""
        self._start_compute()
        address = self._pool.serve("front", "front.http_port=0", "front.pg_port=0")
        self.port = int(address.rpartition(":")[2])

    def _start_compute(self) -> None:
        self._compute = self._pool.start_role(
            "compute", f"compute.model={self._setup.model}", f"compute.model_name={MODEL}",
            f"compute.l1_capacity={self._setup.cache * self._setup.token_bytes}",
            "compute.dtype=float32", f"compute.threads={self._setup.threads}",
        )  # fmt: skip
        self._compute.ready_line()

    def restart(self) -> None:
        """Restart the compute node; the front stays."""
        self.stop()
        self._start_compute()

    def stop(self) -> None:
        """End the compute node."""
        if self._compute is not None:
            self._compute.stop()
            self._compute = None

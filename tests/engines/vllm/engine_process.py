"""Real vLLM engines in processes of their own, and the model they serve, for the tests here.

``EngineProcess`` starts engine_child.py and speaks with it; killing it is killing an engine. Pool
nodes and other servers come from server_rig.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.server_rig import ROOT, wait_for

BLOCK = 128
"""Tokens of a block of vLLM on a CPU."""

VOCABULARY = 512
_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
}


def write_model(folder: Path, *, window: int | None = None) -> str:
    """Write a tiny model whose next tokens are never nearly equally likely.

    Args:
        folder: where.
        window: tokens that attention looks back; None: all, as Llama.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

    torch.manual_seed(7)
    kind = LlamaConfig if window is None else MistralConfig
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8_192,
        initializer_range=0.4,
        tie_word_embeddings=False,
        dtype="float32",
        **({} if window is None else {"sliding_window": window}),
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return str(folder)


def prompt(name: str, tokens: int) -> list[int]:
    """Make up a prompt; equal names make equal beginnings."""
    numbers = random.Random(name)
    return [numbers.randrange(2, VOCABULARY) for _ in range(tokens)]


def connector(pool: str = "", *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Configure ours as a user does."""
    reach = {"pool": pool} if pool else {}
    return {
        "kv_connector": "TierKvConnector",
        "kv_connector_module_path": "tierkv.integrations.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        # A busy machine answers late, and computes so small a model faster than it loads: what that
        # costs is tested by itself.
        "kv_connector_extra_config": reach
        | {"lookup_timeout_ms": 30_000, "handoff_timeout_ms": 30_000, "load_policy": "always"}
        | extra,
    }


class EngineProcess:
    """One engine; ``do`` calls a method of engine_child.Child."""

    def __init__(self, log: Path, model: str, transfer: dict[str, Any] | None, **more: Any) -> None:
        arguments = {
            "model": model, "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
            "max_model_len": 2_048, "max_num_seqs": 8, "num_gpu_blocks_override": 24, "seed": 0,
        }  # fmt: skip
        arguments |= more
        if transfer is not None:
            arguments["kv_transfer_config"] = transfer
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm.engine_child"],
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._say(arguments)

    def ready(self) -> EngineProcess:
        """Wait for the engine, and for its door where it has one."""
        assert self._hear() == "ready"
        return self

    def reach_pool(self) -> EngineProcess:
        wait_for(lambda: self.do("up"), what="the engine reaches the pool")
        return self

    def do(self, method: str, **arguments: Any) -> Any:
        self._say({"do": method} | arguments)
        return self._hear()

    def generate(
        self,
        prompts: list[list[int]],
        *,
        tokens: int = 8,
        salts: list[str | None] | None = None,
        params: Any = None,
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.do(
            "generate",
            prompts=prompts,
            max_tokens=tokens,
            salts=salts or [None] * len(prompts),
            params=params,
        )
        return found

    def settle(self) -> None:
        """Wait until nothing is on its way to the pool, all blocks are free and none is pinned."""
        free = self.do("idle")
        assert free == self.do("blocks") - 1, "some blocks are never given back"
        wait_for(lambda: self.do("held") == 0, what="nothing is held in the pool")

    def count(self, name: str) -> int:
        """Sum a counter over both halves."""
        return sum(counts.get(name, 0) for counts in self.do("counts").values())

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-4_000:]
        return json.loads(line)


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    """Return what was generated."""
    return [answer["tokens"] for answer in answers]


def cached_of(answers: list[dict[str, Any]]) -> list[int]:
    """Return how many tokens of each prompt were not computed."""
    return [answer["cached"] for answer in answers]

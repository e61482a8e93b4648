"""Real pool nodes, and vLLM's own tiering manager with our tier below it, for the tests here.

The manager is made by vLLM's own spec and factory from the configuration a user writes. Only the
GPU is missing: a test writes a chunk into vLLM's CPU memory where a GPU worker would, and reads it
from there. Servers run in TierKV's environment, whatever environment the tests run in.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

from tierkv.integrations.vllm import tier_core

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
OURS = ROOT / ".venv" / "bin" / "python"
CHUNK_BYTES = 64 << 10
BLOCK_TOKENS = 16
REVISION = "0123456789abcdef" * 2 + "01234567"
"""A commit: the model of these tests has no weights."""


def wait_for(condition: Callable[[], T], *, what: str, deadline_s: float = 60.0) -> T:
    """Return the first true value of ``condition``; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s} s: {what}")
        time.sleep(0.002)
    return value


def free_port() -> int:
    """Return a port nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One ``tierkv serve`` process, killed and started again by tests on the same port."""

    def __init__(self, folder: Path, role: str, *arguments: str) -> None:
        self.folder, self.role, self.arguments = folder, role, arguments
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        python = str(OURS) if OURS.exists() else sys.executable
        command = [python, "-m", "tierkv", "serve", self.role, "--port", str(self.port)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with (self.folder / f"{self.role}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line and json.loads(line), (self.folder / f"{self.role}.log").read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None and self.process.stdout is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        self.process.wait(30)
        self.process.stdout.close()


def pool_node(folder: Path, *arguments: str, capacity: str = "64MiB") -> Server:
    return Server(
        folder, "dmp", "--capacity", capacity, "--set", f"dmp.segment_dir={folder}", *arguments
    )


def offloading_config(extra: dict[str, Any], **changes: Any) -> OffloadingConfig:
    """Make what vLLM's connector makes of its configuration."""
    parallel = {
        "rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1,
        "data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }  # fmt: skip
    names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(2))
    world = changes.get("world_size", 1)
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK_TOKENS, names, 0),),
        worker_kv_bytes_per_block=changes.get("chunk_bytes", CHUNK_BYTES) // world,
        enable_kv_cache_events=changes.get("events", False),
        extra_config=extra,
        engine_id=changes.get("engine_id", f"tierkv-test-{uuid.uuid4()}"),
        model=OffloadingModelConfig(
            changes.get("model", "test/model"), changes.get("dtype", "bfloat16")
        ),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
        parallel=OffloadingParallelConfig(
            **parallel | {k: v for k, v in changes.items() if k in parallel}
        ),
        kv_cache_layout="LBNHC",
    )


def content(key: bytes, size: int = CHUNK_BYTES) -> bytes:
    """Make up the bytes of a chunk: others for each key."""
    return np.random.default_rng(list(key)).bytes(size)


class Engine:
    """vLLM's side of offloading: manager, CPU memory and requests, with our tier.

    Attributes:
        manager: vLLM's ``TieringOffloadingManager``.
        tier: ours.
    """

    def __init__(
        self, chunks: int = 8, *, tier: dict[str, Any], wait: bool = True, **changes: Any
    ) -> None:
        entry = {
            "type": "TierKvTier",
            "module_path": "tierkv.integrations.vllm.tier",
            "revision": REVISION,
        }
        extra = {
            "cpu_bytes_to_use": chunks * changes.get("chunk_bytes", CHUNK_BYTES),
            "secondary_tiers": [entry | {"timeout_ms": 2_000} | tier],
        }
        self.spec = TieringOffloadingSpec(offloading_config(extra, **changes))
        self.manager: Any = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.memory = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self.size = self.tier.block_size_bytes
        self.wrong: list[bytes] = []
        if wait:
            wait_for(lambda: self.door.up, what=f"the door is up: {self.door.why_down}")

    @property
    def door(self) -> Any:
        return self.tier.door

    def request(self, name: str = "") -> ReqContext:
        context = ReqContext(req_id=name or str(uuid.uuid4()))
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def step(self, new: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))

    def begin_store(self, keys: Iterable[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Have the GPU's chunks copied to CPU memory, and on to the tiers."""
        output = self.manager.prepare_store(list(keys), context)
        if output is None or not output.keys_to_store:
            return []
        for key, chunk in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            start = int(chunk) * self.size
            self.memory[start : start + self.size] = content(key, self.size)
        self.manager.complete_store(output.keys_to_store, context)
        return list(output.keys_to_store)

    def store(self, keys: Iterable[OffloadKey], context: ReqContext | None = None) -> None:
        """Store chunks and wait for the tiers."""
        own = context or self.request()
        self.begin_store(keys, own)
        self.settle()
        if context is None:
            self.finish(own)

    def settle(self) -> None:
        """Let the engine step until no copy is under way."""

        def done() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_for(done, what="all copies are over")

    def hits(self, keys: Sequence[OffloadKey], context: ReqContext) -> int:
        """Look chunks up as vLLM does for a prompt: how many from the first on can be loaded."""

        def look() -> tuple[int] | None:
            count, again = 0, False
            for key in keys:
                found = self.manager.lookup(key, context)
                if found is LookupResult.MISS:
                    break
                again |= found in (LookupResult.RETRY, LookupResult.HIT_PENDING)
                count += 1
            if again:
                self.step()
                return None
            return (count,)

        return wait_for(look, what="all lookups are answered")[0]

    def read(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[bytes]:
        """Read chunks out of CPU memory as a GPU would."""
        spec = self.manager.prepare_load(list(keys), context)
        starts = [int(chunk) * self.size for chunk in spec.block_ids]
        found = [bytes(self.memory[start : start + self.size]) for start in starts]
        self.manager.complete_load(list(keys), context)
        return found

    def check(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> int:
        """Look up, load and compare; returns how many chunks were there."""
        own = context or self.request()
        count = self.hits(keys, own)
        assert self.read(keys[:count], own) == [content(key, self.size) for key in keys[:count]]
        self.step(new=[own.req_id])
        if context is None:
            self.finish(own)
        return count

    def push_out(self, count: int) -> None:
        """Have other chunks take the place of those in CPU memory."""
        self.store(keys_of(f"filler-{uuid.uuid4()}", count))

    def counts(self) -> dict[str, int]:
        return dict(self.door.counts())

    def pinned(self) -> int:
        """Return how many values the pool keeps for this engine."""
        pinned: int = self.door.submit(lambda pool: pool.stats().pinned, -1, name="test").result(30)
        return pinned

    def close(self) -> None:
        self.memory.release()
        self.manager.shutdown()


MakeEngine = Callable[..., Engine]


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tier wait as long as a busy machine takes, so that no test is about speed."""
    monkeypatch.setattr(tier_core, "PATIENCE_S", 60.0)
    monkeypatch.setattr(tier_core, "LOAD_WAIT_S", 60.0)


def flip_bits(folder: Path) -> int:
    """Flip a bit in every page of pool nodes' memory that looks like chunks; how many."""
    flipped = 0
    for path in folder.glob("*.seg*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for start in range(0, len(memory), 4096):
                if len(set(memory[start : start + 4096])) > 200:
                    memory[start + 2048] ^= 0x10
                    flipped += 1
    return flipped


def keys_of(prompt: str, count: int, *, salt: str | None = None) -> list[OffloadKey]:
    """Name the chunks of a prompt by vLLM's own hashes."""
    numbers = random.Random(prompt)
    request = Request(
        request_id=prompt,
        prompt_token_ids=[numbers.randrange(1000) for _ in range(count * BLOCK_TOKENS)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    return [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]


init_none_hash(sha256)

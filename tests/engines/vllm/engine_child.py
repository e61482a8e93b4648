"""A vLLM engine in a process of its own, told what to do line by line.

Started by engine_process.py with the environment of vLLM. Its first line says that it is ready;
each line of JSON that it reads is answered by one. Standard output is for these lines alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


class Child:
    """Carries out commands, each a method, on one engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.llm = LLM(**arguments)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.preempted = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def generate(
        self, prompts: list[list[int]], max_tokens: int, salts: list[str | None], params: Any
    ) -> list[dict[str, Any]]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        asked = [
            {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt is not None else {})
            for ids, salt in zip(prompts, salts, strict=True)
        ]
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "finish": out.outputs[0].finish_reason,
                "params": out.kv_transfer_params,
            }
            for out in outputs
        ]

    def abort(self, prompts: list[list[int]], steps: int) -> int:
        """Begin requests, take some steps, and abort them; how many were aborted."""
        engine = self.llm.llm_engine
        sampling = SamplingParams(
            temperature=0.0, max_tokens=500, ignore_eos=True, detokenize=False
        )
        names = [f"abort-{i}" for i in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names, internal=False)
        self.idle()
        return len(names)

    def idle(self) -> int:
        """Step until nothing is left to do, as a server's engine does by itself; free blocks."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.engine_core.get_output()
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def blocks(self) -> int:
        """Blocks of the engine, one of which is never used."""
        return int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def counts(self) -> dict[str, dict[str, int]]:
        found = {}
        connector = self.scheduler.get_kv_connector()
        if connector is not None and connector.door is not None:
            found["scheduler"] = connector.door.counts()
        if has_kv_transfer_group() and get_kv_transfer_group().door is not None:
            found["worker"] = get_kv_transfer_group().door.counts()
        return found

    def up(self) -> bool:
        """Whether both halves reach the pool."""
        connector = self.scheduler.get_kv_connector()
        doors = [connector.door, get_kv_transfer_group().door]
        return all(door is not None and door.up for door in doors)

    def held(self) -> int:
        """Blocks pinned in the pool by the scheduler's half."""
        door = self.scheduler.get_kv_connector().door
        held = door.submit(lambda pool: pool.stats().pinned, -1, name="test")
        return int(held.result())

    def preemptions(self) -> int:
        return self.preempted

    def reset_prefix_cache(self, connector: bool) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_connector=connector))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    child = Child(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        answer = getattr(child, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()

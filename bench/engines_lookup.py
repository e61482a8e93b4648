"""Cost of our connector for vLLM's scheduler: every call, timed in the process.

``measure`` is called by bench.engines and runs this file with vLLM's own Python. In the child
process an ``LLM`` with its scheduler in the same process answers, twice, more prompts than the
cache holds. Meanwhile another request decodes, because an engine with nothing to compute would wait
for our answers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

Times = dict[str, list[float]]
CALLS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
_TIMEOUT_S: Final = 300.0
_ANSWER: Final = 4


def measure(python: Path, env: Mapping[str, str], log: Path, spec: Mapping[str, Any]) -> Times:
    """Run prompts through an engine in one process.

    Args:
        python: vLLM's interpreter.
        env: additional environment variables.
        log: file for the output of the process.
        spec: ``engine`` (arguments of ``LLM``) and ``prompts`` (number of prompts, each asked
            twice).

    Returns:
        The microseconds of every call, by name; ``hit_tokens`` of each second answer.

    Raises:
        RuntimeError: the process failed.
    """
    with log.open("ab") as file:
        done = subprocess.run(
            [str(python), "-m", "bench.engines_lookup", json.dumps(dict(spec))],
            env=os.environ | dict(env), stdout=subprocess.PIPE, stderr=file, timeout=_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the lookup measurement failed: {log.read_text()[-1_500:]}")
    told: Times = json.loads(done.stdout.splitlines()[-1])
    return told


def time_connector(engine: Mapping[str, Any], prompts: int) -> Times:
    """Answer long prompts twice, one after the other; return the times of the scheduler's calls."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams  # Only this process has vLLM; takes ten seconds.

    llm = LLM(**engine)
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    took: Times = {name: [] for name in CALLS}
    for name in CALLS:
        setattr(connector, name, _timed(getattr(connector, name), took[name]))
    rng = random.Random(1)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    length = engine["max_model_len"] - _ANSWER
    sampling = SamplingParams(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True)
    endless = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    company = _Company(llm.llm_engine, endless)
    asked = [
        {"prompt_token_ids": [rng.randrange(10, vocabulary) for _ in range(length)]}
        for _ in range(prompts)
    ]
    hits = []
    for prompt in asked * 2:
        hits.append(float(company.answer(prompt, sampling).num_cached_tokens or 0))
    return took | {"hit_tokens": hits[prompts:]}


class _Company:
    """An engine in which a request decodes during every further request."""

    def __init__(self, engine: Any, endless: Any) -> None:
        self._engine = engine
        self._endless = endless
        self._count = 0
        self._decoding = ""

    def answer(self, prompt: Any, sampling: Any) -> Any:
        """Return the answer to a prompt."""
        while not self._decoding:
            self._decoding = self._add({"prompt_token_ids": [1, 2, 3]}, self._endless)
            self._step()
        wanted = self._add(prompt, sampling)
        while (answer := self._step().get(wanted)) is None:
            pass
        return answer

    def _add(self, prompt: Any, sampling: Any) -> str:
        self._count += 1
        self._engine.add_request(str(self._count), prompt, sampling)
        return str(self._count)

    def _step(self) -> dict[str, Any]:
        over = {out.request_id: out for out in self._engine.step() if out.finished}
        if self._decoding in over:
            self._decoding = ""
        return over


def _timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            times.append(1e6 * (time.perf_counter() - began))

    return timed


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to standard output too.
    asked = json.loads(sys.argv[1])
    times = time_connector(asked["engine"], asked["prompts"])
    print(json.dumps(times), file=answers, flush=True)
    answers.close()
    os._exit(0)  # Threads of engines may still wait for their queues.

"""Prefill and decoding of our engine beside vLLM's on the CPU, without reuse of KV.

Run ``python -m bench.engines_speed``. Both engines run as servers, with the same random Llama of
132 M parameters in float32 and the same number of threads, one number after the other. Every prompt
is new, so no cache helps. The engines take turns. Measured are the time to the first token of long
prompts, and tokens per second of requests with short prompts that decode at once. vLLM runs in the
environment of ``make test-engines``; ``--without-vllm`` measures only our engine.
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench.engines_chats import all_at_once
from bench.engines_client import Answer, ask
from bench.engines_model import FIRST_TOKEN, LARGE, TINY, ModelSize, write_model
from bench.engines_process import ServerError
from bench.engines_servers import MODEL, Contender, OurEngine, Pool, Setup, Vllm, find_venv
from bench.report import Report, finish, make_parser

_BATCHES = (1, 8, 32)
_DECODE_PROMPT = 16
_CACHE = 16_384


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--venv", type=Path, help="virtual environment with vLLM")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of each engine")
    parser.add_argument("--without-vllm", action="store_true", help="measure only our engine")
    arguments = parser.parse_args(argv)
    quick: bool = arguments.quick
    report = Report("engines speed")
    # Servers run in separate sessions, so the end of this process must also end the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        venv = Path() if arguments.without_vllm else find_venv(arguments.venv)
        for threads in arguments.threads[: 1 if quick else None]:
            measure(report, TINY if quick else LARGE, venv, threads, quick, arguments.seed)
    except ServerError as error:
        sys.exit(f"bench.engines_speed: {error}")
    report.note("ratios are ours to vLLM's, medians of the rounds; 1 and more is faster")
    finish(report, arguments.format)


def measure(
    report: Report, size: ModelSize, venv: Path, threads: int, quick: bool, seed: int
) -> None:
    """Start both engines with some threads, measure in turn, and stop both."""
    rng = random.Random(seed)
    prompts, rounds, new_tokens = ((512,), 2, 8) if quick else ((512, 2_048), 3, 32)
    name = f"{size.name}_{threads}_threads"
    with tempfile.TemporaryDirectory(prefix="tierkv-engines-") as folder, ExitStack() as stack:
        setup = Setup(
            venv, Path(folder) / "model", _CACHE, size.kv_bytes_per_token, 4_096, Path(folder),
            threads, sequences=max(_BATCHES),
        )  # fmt: skip
        write_model(size, setup.model, seed=seed)
        pool = Pool(setup.folder)
        stack.callback(pool.stop)
        pool.start()
        contenders: list[Contender] = [OurEngine(setup, pool)]
        if venv != Path():
            contenders.append(Vllm("vllm", setup))
        for contender in contenders:
            stack.callback(contender.stop)
        all_at_once(contenders, "start")
        for tokens in prompts:
            found = _in_turn(contenders, rng, size, rounds, batch=1, prompt=tokens, new=1)
            speeds = {who: [tokens / r[0].ttft_s for r in each] for who, each in found.items()}
            _report(report, f"{name}_prefill_{tokens}", speeds)
        for batch in _BATCHES:
            found = _in_turn(
                contenders, rng, size, rounds, batch=batch, prompt=_DECODE_PROMPT, new=new_tokens
            )
            speeds = {who: [_decoded_per_s(r) for r in each] for who, each in found.items()}
            _report(report, f"{name}_decode_{batch}", speeds)


def _in_turn(
    contenders: Sequence[Contender],
    rng: random.Random,
    size: ModelSize,
    rounds: int,
    *,
    batch: int,
    prompt: int,
    new: int,
) -> dict[str, list[list[Answer]]]:
    """Ask all the same in changing order; a first round does not count."""
    found: dict[str, list[list[Answer]]] = {each.name: [] for each in contenders}
    for number in range(rounds + 1):
        prompts = [
            [rng.randrange(FIRST_TOKEN, size.vocabulary) for _ in range(prompt)]
            for _ in range(batch)
        ]
        order = contenders if number % 2 else contenders[::-1]
        for each in order:
            with ThreadPoolExecutor(batch) as threads:
                asked = [threads.submit(ask, each.port, MODEL, p, new) for p in prompts]
                answers = [one.result() for one in asked]
            if number:
                found[each.name].append(answers)
    return found


def _decoded_per_s(answers: Sequence[Answer]) -> float:
    """Return tokens per second of requests sent at once, with their short prompts."""
    return sum(len(each.tokens) for each in answers) / max(each.total_s for each in answers)


def _report(report: Report, name: str, speeds: dict[str, list[float]]) -> None:
    for who, each in speeds.items():
        report.add(f"{name}_{who}_tokens_per_s", statistics.median(each))
    if "vllm" in speeds:
        pairs = zip(speeds[OurEngine.name], speeds["vllm"], strict=True)
        report.add(f"{name}_of_vllm", statistics.median(ours / theirs for ours, theirs in pairs))


if __name__ == "__main__":
    main()

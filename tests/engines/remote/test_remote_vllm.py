"""A real vLLM behind a compute node of a real cluster: SQL and REST, cancels, tenants, losses.

Runs in TierKV's own environment; vLLM is started in the one that tests/engines/make-venvs makes.
Two vLLM servers of one model; no connector, no events: those have suites of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psycopg
import pytest

from tests.fix_cluster import ROOT, Cluster, wait_for
from tests.fix_engine_model import BLOCK_TOKENS, VllmServer, copy_demo_model
from tests.fix_engine_nodes import ServedNode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

KEY = "key-of-vllm"
NOTE = "Mia bought a kettle on Monday. She paid 30 euros and was happy with it."
QUESTIONS = [
    f"{NOTE} Question: What did she buy?",
    f"{NOTE} Question: When did she buy it?",
    "Ben bought a lamp. Question: What did he buy?",
]
CALLS = [
    *(f"ai_generate('{question}')" for question in QUESTIONS),
    f"ai_filter('{NOTE} Did she buy a kettle?')",
    f"ai_classify('{NOTE}', ['kitchen', 'garden', 'gardening tools'])",
    "ai_generate_json('Mia bought a kettle. Question: What?', '{\"enum\": [\"kettle\", 7]}')",
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = copy_demo_model(folder / "model")
    json_form = '{"backend": "guidance", "disable_any_whitespace": true}'
    servers = [
        VllmServer(
            model, folder / f"{i}.log", "--structured-outputs-config", json_form, "--api-key", KEY
        )
        for i in range(2)
    ]  # fmt: skip
    for server in servers:
        server.wait()
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def oracle(start_cluster: Callable[..., Cluster]) -> Cluster:
    """The same model on our own engine, in the engines' number format."""
    return start_cluster("--set", "compute.dtype=float32")


@pytest.fixture(scope="module")
def cluster(
    start_cluster: Callable[..., Cluster],
    engines: list[VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """A cluster without compute nodes of our own; two vLLM servers compute."""
    folder = tmp_path_factory.mktemp("nodes")
    keys = folder / "keys.toml"
    keys.write_text('[front.api_keys]\nkey-ann = "ann"\nkey-bob = "bob"\n')
    started = start_cluster("--compute", "0", "--config", str(keys))
    key_file = folder / "key"
    key_file.write_text(f"{KEY}\n")
    nodes = [
        ServedNode(
            folder / f"{i}.log", "compute", "--node-id", f"vllm-{i}", "--port", "0",
            "--config", str(started.run_dir / "cluster.toml"),
            "--engine", "vllm", "--url", engine.url, "--api-key-file", str(key_file),
            "--set", "engine.dtype=float32", "--set", "engine.events_url=off",
        )
        for i, engine in enumerate(engines)
    ]  # fmt: skip
    wait_for(lambda: alive(started) == 2, what="the front sees both nodes")
    yield started
    for node in nodes:
        node.stop()


def alive(cluster: Cluster) -> int:
    sql = "SELECT count(*) FROM tierkv.node_costs WHERE state = 'alive'"
    ((count,),) = cluster.query(sql)
    return int(count)


def one(cluster: Cluster, sql: str) -> Any:
    ((value,),) = cluster.query(sql)
    return value


def ask(engine: VllmServer, **body: Any) -> dict[str, Any]:
    """Ask vLLM itself for a completion."""
    request = urllib.request.Request(
        f"{engine.url}/v1/completions",
        json.dumps({"model": "tierkv-demo", "temperature": 0} | body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def rest(cluster: Cluster, key: str = "key-ann") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key=key)


@pytest.mark.parametrize("call", CALLS)
def test_sql_is_answered_as_by_our_own_engine(cluster: Cluster, oracle: Cluster, call: str) -> None:
    ours = one(oracle, f"SELECT {call}")
    assert ours is not None and one(cluster, f"SELECT {call}") == ours


def test_scores_are_exact(cluster: Cluster, oracle: Cluster) -> None:
    call = f"SELECT ai_score('{NOTE} How happy was she?')"
    assert one(cluster, call) == pytest.approx(one(oracle, call), abs=2e-4)
    many = ", ".join(f"'{word}'" for word in ("tea", "lamp", *(f"kind {i}" for i in range(40))))
    call = f"SELECT ai_classify('{NOTE}', [{many}])"
    assert one(cluster, call) == one(oracle, call)


def test_tokens_are_those_vllm_gives_itself(cluster: Cluster, engines: list[VllmServer]) -> None:
    prompt = list(range(3, 90))
    theirs = ask(engines[0], prompt=prompt, max_tokens=24, return_token_ids=True, ignore_eos=True)
    with rest(cluster) as client:
        ours = client.completions.create(
            model="tierkv-demo", prompt=prompt, max_tokens=24, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    assert ours.choices[0].text.strip() == theirs["choices"][0]["text"].strip()
    assert ours.usage is not None and ours.usage.completion_tokens == 24
    assert ours.usage.prompt_tokens == len(prompt)


def test_tenants_share_nothing_and_each_finds_its_own(cluster: Cluster) -> None:
    prompt = list(range(200, 200 + 3 * BLOCK_TOKENS + 5))

    def cached(key: str) -> int:
        with rest(cluster, key) as client:
            session = {"session_id": f"s-{key}"}
            answer = client.completions.create(
                model="tierkv-demo", prompt=prompt, max_tokens=1, temperature=0, extra_body=session
            )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("key-ann") == 0
    assert cached("key-bob") == 0
    # An equal request goes to either server; the third must meet one of the first two.
    again = [cached("key-ann") for _ in range(3)]
    assert max(again) == 3 * BLOCK_TOKENS


def test_an_embedding_is_refused(cluster: Cluster) -> None:
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="provides no embeddings"):
        cluster.query("SELECT ai_embed('abc')")


def test_a_node_without_the_key_ends_and_says_so(
    cluster: Cluster, engines: list[VllmServer]
) -> None:
    ended = subprocess.run(
        [
            sys.executable, "-m", "tierkv", "serve", "compute", "--port", "0",
            "--config", str(cluster.run_dir / "cluster.toml"),
            "--engine", "vllm", "--url", engines[0].url,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Unauthorized" in ended.stderr and "--api-key-file" in ended.stderr


def test_who_leaves_ends_the_request_in_vllm(cluster: Cluster, engines: list[VllmServer]) -> None:
    with rest(cluster) as client:
        talk: Any = [{"role": "user", "content": QUESTIONS[0]}]
        stream = client.chat.completions.create(
            model="tierkv-demo", messages=talk, stream=True, temperature=0, max_tokens=1900,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        assert sum(running(engine) for engine in engines) == 1
        stream.close()
    wait_for(lambda: not any(map(running, engines)), what="vLLM aborted the request")


def running(engine: VllmServer) -> int:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("vllm:num_requests_running{")
    )


def test_nodes_say_who_answers(cluster: Cluster, engines: list[VllmServer]) -> None:
    rows = cluster.query("SELECT paths FROM tierkv.nodes WHERE node_id LIKE 'vllm-%' ORDER BY 1")
    assert sorted(p for (p,) in rows) == sorted(f"http: vllm 0.32.0 at {e.url}" for e in engines)
    costs = "SELECT max(prefill_token_s) FROM tierkv.node_costs"
    wait_for(lambda: one(cluster, costs), what="a node knows what a token costs")


def test_a_killed_vllm_is_replaced_in_the_middle_of_answers(
    cluster: Cluster, engines: list[VllmServer]
) -> None:
    prompts = [list(range(5 + i, 60 + i)) for i in range(4)]

    def generate(i: int, seen: list[str], begun: threading.Semaphore) -> None:
        with rest(cluster) as client:
            stream = client.completions.create(
                model="tierkv-demo", prompt=prompts[i], max_tokens=600, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for chunk in stream:
                if not seen:
                    begun.release()
                seen.append(chunk.choices[0].text if chunk.choices else "")

    def run(*, kill: bool) -> list[str]:
        parts: list[list[str]] = [[] for _ in prompts]
        begun = threading.Semaphore(0)
        threads = [
            threading.Thread(target=generate, args=(i, parts[i], begun)) for i in range(len(parts))
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=60)
        if kill:
            busy = max(engines, key=running)
            busy.kill()
        for thread in threads:
            thread.join(timeout=300)
            assert not thread.is_alive()
        return ["".join(texts) for texts in parts]

    want = run(kill=False)
    assert run(kill=True) == want
    wait_for(lambda: alive(cluster) == 1, what="the front sees that a node left")
    dead = next(engine for engine in engines if engine.process.poll() is not None)
    incarnations = "SELECT max(incarnation) FROM tierkv.nodes WHERE node_id LIKE 'vllm-%'"
    before = one(cluster, incarnations)
    dead.start()
    dead.wait()
    wait_for(lambda: alive(cluster) == 2, what="the node is back with its engine")
    assert one(cluster, incarnations) > before
    assert one(cluster, f"SELECT ai_generate('{QUESTIONS[0]}')") == "kettle"

"""``--engine openai`` against a real server of that API: a front's own REST door, over processes.

One cluster: its model answers as ``tierkv-demo``, and again, by text over REST, as ``text``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psycopg
import pytest

from tests.fix_cluster import ROOT, Cluster, free_port, wait_for
from tests.fix_engine_nodes import ServedNode

pytestmark = pytest.mark.integration

PROMPT = "Mia bought a kettle. Question: What did she buy?"
SCHEMA = '{"enum": ["kettle", "lamp", 7]}'


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster()


@pytest.fixture(scope="module")
def node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """A compute node that asks the front's REST door."""
    started = ServedNode(
        tmp_path_factory.mktemp("node") / "log", "compute", "--node-id", "text-1",
        "--config", str(cluster.run_dir / "cluster.toml"), "--port", "0",
        "--engine", "openai", "--url", f"http://127.0.0.1:{cluster.http_port}/v1",
        "--set", "engine.served_model=tierkv-demo", "--set", "engine.model_name=text",
    )  # fmt: skip
    served = "SELECT 1 FROM tierkv.models WHERE model_name = 'text'"
    wait_for(lambda: cluster.query(served), what="the front sees the node")
    yield started
    assert started.stop() == 0


def rest(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="none")


def one(cluster: Cluster, sql: str) -> Any:
    ((value,),) = cluster.query(sql)
    return value


def test_it_is_a_node_like_any_other(cluster: Cluster, node: ServedNode) -> None:
    assert node.ready["model"] == "text" and node.ready["engine"] == "openai"
    ((role, state, models, paths),) = cluster.query(
        "SELECT role, state, models, paths FROM tierkv.nodes WHERE node_id = 'text-1'"
    )
    assert (role, state, models) == ("compute", "alive", "text")
    assert paths == f"http: openai at http://127.0.0.1:{cluster.http_port}/v1"


@pytest.mark.parametrize(
    "call",
    [
        f"ai_generate('{PROMPT}', model => '$MODEL')",
        "ai_classify('Mia bought a kettle', ['kitchen', 'garden'], model => '$MODEL')",
        f"ai_generate_json('{PROMPT}', '{SCHEMA}', model => '$MODEL')",
        "ai_generate('Größe \"\\n\" 漢字 🙂? Say it.', model => '$MODEL')",
    ],
)
def test_calls_answer_as_the_engine_itself_does(
    cluster: Cluster, node: ServedNode, call: str
) -> None:
    theirs = one(cluster, f"SELECT {call.replace('$MODEL', 'text')}")
    ours = one(cluster, f"SELECT {call.replace('$MODEL', 'tierkv-demo')}")
    assert theirs is not None and str(theirs).strip() == str(ours).strip()


def test_labels_are_what_the_engine_writes(cluster: Cluster, node: ServedNode) -> None:
    kettle = "SELECT ai_filter('Mia bought a kettle. Did she buy a kettle?', model => 'text')"
    assert one(cluster, kettle) in (True, False)
    score = one(cluster, "SELECT ai_score('Mia likes it. How good?', model => 'text')")
    assert round(9 * score, 4) in range(10)


def test_tokens_are_counted_by_the_engine(cluster: Cluster, node: ServedNode) -> None:
    sql = "SELECT ai_generate_detail('{}', model => '{}')"
    theirs, ours = (one(cluster, sql.format(PROMPT, m)) for m in ("text", "tierkv-demo"))
    for counted in ("prompt_tokens", "completion_tokens", "finish_reason"):
        assert theirs[counted] == ours[counted]


def test_what_an_engine_of_text_has_not_is_refused(cluster: Cluster, node: ServedNode) -> None:
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="provides no embeddings"):
        cluster.query("SELECT ai_embed('abc', model => 'text')")
    with rest(cluster) as client, pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="text", prompt="word " * 6_000)
    assert refused.value.code == "context_length_exceeded"


def test_chats_stream_and_end_when_the_client_leaves(cluster: Cluster, node: ServedNode) -> None:
    with rest(cluster) as client:
        talk: Any = [{"role": "user", "content": PROMPT}]
        chunks = list(
            client.chat.completions.create(
                model="text", messages=talk, stream=True, temperature=0,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text.strip() == "kettle" and chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens < len(text.encode())
        stream = client.completions.create(
            model="text", prompt="a b c d", max_tokens=3000, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
    wait_for(lambda: running(cluster) == 0, what="the engine ended what nobody reads")


def running(cluster: Cluster) -> int:
    """Requests that any node still answers."""
    rows = cluster.query("SELECT requests_running FROM tierkv.stat_kvcache_node")
    return sum(row[0] for row in rows)


def test_a_server_that_is_not_there_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    late = ServedNode(
        tmp_path / "log", "compute", "--node-id", "late-1",
        "--config", str(cluster.run_dir / "cluster.toml"), "--port", "0",
        "--engine", "openai", "--url", f"http://127.0.0.1:{free_port()}",
    )  # fmt: skip
    try:
        assert late.ready["model"] == "" and "is waiting for its engine" in late.text()
        assert not cluster.query("SELECT 1 FROM tierkv.nodes WHERE node_id = 'late-1'")
    finally:
        assert late.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "openai"), "needs the engine's address"),
        (("--engine", "openai", "--url", "ftp://x"), "engine.url 'ftp://x' can't be used"),
        (("--engine", "openai", "--url", "http://x", "--api-key-file", "/nope"), "can't be read"),
        (("--url", "http://x"), "need --engine"),
        (
            ("--engine", "openai", "--url", "http://x", "--model", "gpt"),
            "models with --set engine.served_model=NAME",
        ),
    ],
)
def test_settings_that_can_not_work_are_told(
    cluster: Cluster, arguments: tuple[str, ...], words: str
) -> None:
    ended = subprocess.run(
        [
            sys.executable, "-m", "tierkv", "serve", "compute", "--port", "0",
            "--config", str(cluster.run_dir / "cluster.toml"), *arguments,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode != 0
    assert words in " ".join(ended.stderr.split())


def test_a_model_the_server_has_not_ends_the_process(cluster: Cluster) -> None:
    ended = subprocess.run(
        [
            sys.executable, "-m", "tierkv", "serve", "compute", "--port", "0",
            "--config", str(cluster.run_dir / "cluster.toml"), "--engine", "openai",
            "--url", f"http://127.0.0.1:{cluster.http_port}", "--set", "engine.served_model=nope",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1 and "serves no model 'nope'" in ended.stderr
    assert "The engine serves " in ended.stderr and "tierkv-demo" in ended.stderr

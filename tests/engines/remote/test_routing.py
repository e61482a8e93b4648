"""Two vLLM servers that publish KV events: prompts go to the one whose own cache has their prefix.

The model is large enough that computing a prompt costs more than a busy machine's noise: where
computing costs nothing, the scheduler is right not to care where a prefix is. What routing decided
is read from ``tierkv.routing_log``, as a user would.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for
from tests.fix_engine_model import BLOCK_TOKENS, DEMO, VllmServer, copy_demo_model
from tests.fix_engine_nodes import ServedNode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NODES = ("vllm-0", "vllm-1")
EVENTS_HEARD = "events:rank0 zmq"
ATTEMPTS = 5


def write_model(folder: Path) -> Path:
    """Write a model of random weights that the demo model's tokenizer fits, 20 million of them."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    copy_demo_model(folder)
    (folder / "model.safetensors").unlink()
    shape = json.loads((DEMO / "config.json").read_text())
    shape |= {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "dtype": "float32"}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(LlamaConfig(**shape)).float().save_pretrained(folder)
    return folder


def publishing(model: Path, folder: Path, name: str) -> tuple[VllmServer, list[str]]:
    """Start a server that publishes; return it and what its node has to be told."""
    events, replay = (f"ipc://{folder}/{name}-{what}" for what in ("e", "r"))
    publish = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events,
        "replay_endpoint": replay,
    }
    more = ("--num-gpu-blocks-override", "640")  # Nothing of these tests is evicted.
    log = folder / f"{name}.log"
    server = VllmServer(model, log, "--kv-events-config", json.dumps(publish), *more)
    told = [f"engine.events_url={events}", f"engine.events_replay_url={replay}"]
    return server, [word for setting in told for word in ("--set", setting)]


class UnheardError(Exception):
    """The directory was too busy to answer in time, so a known prompt went to any engine."""


def asked_anew(test: Callable[[Rig], None]) -> Callable[[Rig], None]:
    """Have a test begin again with other prompts when the directory was late for one.

    A front does not wait long for it; then hits don't count, which is no matter of these tests.
    """

    @wraps(test)
    def until_heard(rig: Rig) -> None:
        for _ in range(ATTEMPTS):
            with suppress(UnheardError):
                return test(rig)
        pytest.fail(f"no known prompt was found by the front in {ATTEMPTS} attempts")

    return until_heard


def whole_blocks(prompt: list[int]) -> int:
    """Return how many tokens of a prompt vLLM takes from its cache: it computes the last one."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass
class Rig:
    """A cluster whose only compute nodes stand for two vLLM servers."""

    cluster: Cluster
    servers: dict[str, VllmServer]
    nodes: dict[str, ServedNode]
    lengths: Iterator[int] = field(default_factory=lambda: iter(range(1_000, 2_000, 3)))

    def heard(self) -> set[str]:
        """Return the nodes that hear their engine and that the front's scheduler can choose."""
        rows = self.cluster.query(
            "SELECT node_id, paths FROM tierkv.nodes WHERE role = 'compute' AND state = 'alive'"
        )
        listed = {node for node, paths in rows if EVENTS_HEARD in paths}
        rows = self.cluster.query("SELECT node_id FROM tierkv.node_costs WHERE state = 'alive'")
        return listed & {row[0] for row in rows}

    def prompt(self, name: str) -> list[int]:
        """Make up a prompt; no two have the same length, which is how the log knows them."""
        length = next(self.lengths)
        numbers = random.Random(f"{name} {length}")
        return [numbers.randrange(10, 2_000) for _ in range(length)]

    def ask(self, prompt: list[int]) -> tuple[str, int]:
        """Have the front complete a prompt; return the node that did, and its cached tokens."""
        answer = self.cluster.complete(prompt, max_tokens=1)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return self.routed(len(prompt))[-1][0], int(cached)

    def ask_again(self, prompt: list[int]) -> tuple[str, int]:
        """Have the front complete a prompt that it can know to be in an engine's cache.

        Raises:
            UnheardError: the front was not told.
        """
        before = self.counts()
        node, cached = self.ask(prompt)
        self.check_heard(len(prompt), cached, before)
        return node, cached

    def check_heard(self, tokens: int, cached: int, before: dict[str, int]) -> None:
        """Raise UnheardError if the last prompt of a length was sent without any known hit.

        What its engine computed because of that is known first, so that later counts are right.
        """
        node, weighed = self.routed(tokens)[-1]
        if any(one["reused_blocks"] for one in json.loads(weighed)):
            return
        if not cached:
            self.until_blocks(node, before[node] + tokens // BLOCK_TOKENS)
        raise UnheardError

    def counts(self) -> dict[str, int]:
        """Return how many blocks each node is known to have in its engine's cache."""
        return {node: self.blocks(node) for node in NODES}

    def routed(self, tokens: int) -> list[tuple[str, Any]]:
        """Return the choices for prompts of a length, oldest first, with what was weighed."""
        rows = self.cluster.query(
            "SELECT node_id, candidates FROM tierkv.routing_log "
            f"WHERE prompt_tokens = {tokens} ORDER BY decided_at"
        )
        assert rows
        return [(row[0], row[1]) for row in rows]

    def blocks(self, node: str) -> int:
        """Return how many blocks a node is known to have in its engine's cache."""
        ((count,),) = self.cluster.query(
            f"SELECT count(*) FROM tierkv.kvcache_blocks WHERE tier = 'L1' AND node_id = '{node}'"
        )
        return int(count)

    def scopes(self) -> dict[str, int]:
        """Return how many blocks of each tenant are known to be in an engine's cache."""
        rows = self.cluster.query(
            "SELECT cache_scope, count(*) FROM tierkv.kvcache_blocks WHERE tier = 'L1' GROUP BY 1"
        )
        return {scope: int(count) for scope, count in rows}

    def learn(self, prompt: list[int]) -> str:
        """Ask a new prompt, wherever the scheduler likes; return where it is known to be then."""
        before = self.counts()
        node, cached = self.ask(prompt)
        assert cached == 0
        self.until_blocks(node, before[node] + len(prompt) // BLOCK_TOKENS)
        return node

    def until_blocks(self, node: str, count: int) -> None:
        """Wait until a node is known to have so many blocks, and nothing to do."""
        wait_for(lambda: self.blocks(node) == count, what=f"{node} has {count} blocks")
        wait_for(self.idle, what="the front sees idle nodes")

    def idle(self) -> bool:
        """Whether the front knows of no prompt that waits anywhere."""
        ((requests, tokens),) = self.cluster.query(
            "SELECT sum(requests), sum(waiting_tokens) FROM tierkv.node_costs"
        )
        return not requests and not tokens

    def dsn(self, user: str) -> str:
        return f"host=127.0.0.1 port={self.cluster.pg_port} user={user} dbname=main"


@pytest.fixture(scope="module")
def rig(
    start_cluster: Callable[..., Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("routing")
    model = write_model(folder / "model")
    started = {name: publishing(model, folder, name) for name in NODES}
    nodes: dict[str, ServedNode] = {}
    try:
        cluster = start_cluster("--compute", "0")
        for name, (server, told) in started.items():
            server.wait()
            nodes[name] = ServedNode(
                folder / f"node-{name}.log", "compute", "--node-id", name, "--port", "0",
                "--config", str(cluster.run_dir / "cluster.toml"), "--engine", "vllm",
                "--url", server.url, "--set", "engine.dtype=float32", *told,
            )  # fmt: skip
        made = Rig(cluster, {name: server for name, (server, _) in started.items()}, nodes)
        wait_for(lambda: made.heard() == set(NODES), what="both engines are heard")
        yield made
    finally:
        for node in nodes.values():
            node.stop()
        for server, _ in started.values():
            server.kill()


@asked_anew
def test_every_prompt_goes_back_to_the_engine_that_has_it(rig: Rig) -> None:
    prompts = [rig.prompt(f"first {number}") for number in range(4)]
    homes = [rig.learn(prompt) for prompt in prompts]
    for _ in range(3):
        for prompt, home in zip(prompts, homes, strict=True):
            assert rig.ask_again(prompt) == (home, whole_blocks(prompt)), rig.routed(len(prompt))
    for prompt, home in zip(prompts, homes, strict=True):
        for node, candidates in rig.routed(len(prompt))[1:]:
            reused = {one["node"]: one["reused_blocks"] for one in json.loads(candidates)}
            others = {name: {} for name in NODES if name != home}
            assert node == home
            assert reused == {home: {"L1": whole_blocks(prompt) // BLOCK_TOKENS}} | others


@asked_anew
def test_a_longer_prompt_follows_its_beginning(rig: Rig) -> None:
    prompt = rig.prompt("chat")
    home = rig.learn(prompt)
    for turn in range(3):
        known, held = rig.blocks(home), len(prompt) // BLOCK_TOKENS
        prompt = [*prompt, *random.Random(turn).choices(range(10, 2_000), k=40)]
        assert rig.ask_again(prompt) == (home, held * BLOCK_TOKENS), rig.routed(len(prompt))
        rig.until_blocks(home, known + len(prompt) // BLOCK_TOKENS - held)


@asked_anew
def test_prompts_of_a_killed_engine_are_learned_again(rig: Rig) -> None:
    prompt, meanwhile = rig.prompt("killed"), rig.prompt("meanwhile")
    lost = rig.learn(prompt)
    (other,) = (name for name in NODES if name != lost)
    rig.servers[lost].kill()
    wait_for(lambda: rig.heard() == {other}, what=f"{lost} left")
    assert rig.learn(meanwhile) == other
    told = rig.blocks(other)
    rig.servers[lost].start()
    rig.servers[lost].wait()
    wait_for(lambda: rig.heard() == set(NODES), what=f"{lost} is heard again")
    assert rig.blocks(lost) == 0
    # With the other one's node away, it must be asked what it has no more.
    rig.nodes[other].stop()
    wait_for(lambda: rig.heard() == {lost}, what=f"{other} left")
    assert rig.learn(prompt) == lost
    rig.nodes[other].start()
    wait_for(lambda: rig.heard() == set(NODES), what=f"{other} is heard again")
    rig.until_blocks(other, told)
    for _ in range(2):
        for known, home in ((prompt, lost), (meanwhile, other)):
            assert rig.ask_again(known) == (home, whole_blocks(known)), rig.routed(len(known))


@asked_anew
def test_tenants_share_no_cached_token_over_sql(rig: Rig) -> None:
    made = next(rig.lengths)
    words = random.Random(made).choices(["tea", "lamp", "red", "Mia", "bought"], k=600)
    text, ann, bob = " ".join(words), f"ann{made}", f"bob{made}"
    sql = "SELECT ai_generate(%s, options => {'max_tokens': 1})"

    def ask(user: str) -> tuple[int, int]:
        """Ask as a user; return prompt tokens and, of these, cached ones."""
        with psycopg.connect(rig.dsn(user), autocommit=True) as connection:
            before = usage(connection, user)
            connection.execute(sql, [text])
            after = usage(connection, user)
        return after[0] - before[0], after[1] - before[1]

    first, second = ask(ann), ask(bob)
    tokens = first[0]
    assert first == second == (tokens, 0) and tokens > 500
    wanted = dict.fromkeys((ann, bob), tokens // BLOCK_TOKENS).items()
    wait_for(lambda: rig.scopes().items() >= wanted and rig.idle(), what="both are known")
    for user in (ann, bob, ann):
        before, got = rig.counts(), ask(user)
        rig.check_heard(tokens, got[1], before)
        assert got == (tokens, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert ask(f"eve{made}") == (tokens, 0)


def usage(connection: psycopg.Connection[Any], user: str) -> tuple[int, int]:
    """Return a user's prompt tokens so far and how many of them were cached."""
    row = connection.execute(
        "SELECT coalesce(sum(prompt_tokens), 0), coalesce(sum(cached_tokens), 0) "
        "FROM tierkv.usage_history WHERE user_name = %s",
        [user],
    ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])

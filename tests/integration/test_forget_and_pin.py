"""A prompt is forgotten everywhere, and a pin outlives every process, on a real cluster."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import Cluster, wait_for
from tierkv.dmp.client.pool import Pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SHARED = "You answer questions about shipping. " * 12
DOC = SHARED + "Parcel nine was lost in a river near the old mill. " * 12
OTHER = SHARED + "Parcel ten waits for a signature at the station. " * 12
PINS = "SELECT prompt FROM tierkv.pins"
QUESTIONS = ("Where is it?", "Who signs for it?", "What was lost?")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("archive")


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster], folders: tuple[Path, Path]) -> Cluster:
    disk, archive = folders
    return start_cluster(
        "--dmp", "2", "--compute", "2",
        "--set", "dmp.capacity=64MiB",
        "--set", f"dmp.disk_path={disk}", "--set", "dmp.disk_capacity=100MiB",
        "--set", "dmp.demote_above=0", "--set", f"dmp.archive_url=file://{archive}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pinning(start_cluster: Callable[..., Cluster]) -> Cluster:
    always = ("--set", "compute.load_policy=always")
    return start_cluster("--dmp", "2", "--compute", "2", "--set", "dmp.capacity=64MiB", *always)


def one(cluster: Cluster, sql: str, *values: object) -> Any:
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(sql.encode(), values).fetchone()
        assert row is not None
        return row[0]


def told(cluster: Cluster, sql: str, *values: object) -> dict[str, Any]:
    answer = one(cluster, sql, *values)
    return dict(answer if isinstance(answer, dict) else json.loads(answer))


def answers(cluster: Cluster, text: str, *, cache: bool = True) -> list[str]:
    options = json.dumps({"max_tokens": 12, "cache": cache})
    return [
        one(cluster, "SELECT ai_generate(%s || %s, options => %s)", text, question, options)
        for question in QUESTIONS
    ]


def cached(cluster: Cluster, text: str) -> int:
    detail = "SELECT (d).cached_tokens FROM (SELECT ai_generate_detail(%s, options => %s) d) t"
    return int(one(cluster, detail, text, '{"max_tokens": 1}'))


def blocks(cluster: Cluster) -> set[str]:
    return {
        row[0] for row in cluster.query("SELECT DISTINCT block_hash FROM tierkv.kvcache_blocks")
    }


def _settled(cluster: Cluster) -> set[str]:
    """Return the blocks, once all of them are in memory and on a disk of the pool."""
    rows = cluster.query("SELECT block_hash, list(tier) FROM tierkv.kvcache_blocks GROUP BY 1")
    whole = {row[0] for row in rows if {"L2", "L4"} <= set(row[1])}
    return whole if len(whole) == len(rows) else set()


def segments(cluster: Cluster) -> list[Path]:
    rows = cluster.query("SELECT paths FROM tierkv.nodes WHERE role = 'dmp'")
    return [Path(row[0].partition("shm: ")[2].partition(";")[0]) for row in rows]


def samples(cluster: Cluster, keys: set[str]) -> list[bytes]:
    """Return the last token's bytes of each block that is in a pool node's memory."""
    rows = cluster.query("SELECT data_address FROM tierkv.nodes WHERE role = 'dmp'")
    token = (cluster.run_dir / "cluster.token").read_text().strip()
    with Pool.connect([row[0] for row in rows], token=token) as pool:
        found = [pool.get(bytes.fromhex(key)) for key in sorted(keys)]
    return [bytes(value[-128:]) for value in found if value is not None]


def stored(cluster: Cluster, folders: tuple[Path, Path]) -> bytes:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in (*segments(cluster), *files))


def test_a_forgotten_prompt_leaves_no_byte_and_other_prompts_stay(
    cluster: Cluster, folders: tuple[Path, Path]
) -> None:
    expected = answers(cluster, DOC, cache=False)
    assert one(cluster, "SELECT tierkv.warm(%s)", OTHER) > 300
    other_tokens = wait_for(lambda: cached(cluster, OTHER), what="the other prompt is cached")
    others = wait_for(lambda: _settled(cluster), what="the other prompt is in the directory")
    assert answers(cluster, DOC) == expected
    assert cached(cluster, DOC + QUESTIONS[0]) > other_tokens // 2
    mine = wait_for(lambda: blocks(cluster) - others, what="the prompt is in the directory")
    found = samples(cluster, mine)
    assert len(found) > 10 and len(set(found)) == len(found)

    def everywhere() -> bool:
        raw = stored(cluster, folders)
        return all(raw.count(sample) >= 2 for sample in found)

    wait_for(everywhere, what="memory and disk both have each block")
    gone = told(cluster, "SELECT tierkv.forget(%s)", DOC)
    assert gone["l1_bytes"] and gone["memory_bytes"] and gone["disk_bytes"]
    assert 0 < gone["shared_tokens"] < gone["tokens"]
    raw = stored(cluster, folders)
    assert not any(sample in raw for sample in found)
    wait_for(lambda: not mine & blocks(cluster), what="the directory has forgotten, too")
    assert cached(cluster, OTHER) == other_tokens, "the other prompt is as it was"
    assert answers(cluster, DOC) == expected, "and the prompt is computed again"
    assert told(cluster, "SELECT ai_forget(%s)", DOC)["blocks"] > 0
    nothing = told(cluster, "SELECT ai_forget(%s)", "Never asked: " + "a b c d e f g h. " * 20)
    assert nothing["blocks"] == nothing["bytes"] == 0


def test_a_pin_outlives_processes_and_pressure(pinning: Cluster) -> None:
    cluster = pinning
    pinned = told(cluster, "SELECT tierkv.pin(%s, '1 hour')", DOC)
    assert pinned["outcome"] == "accepted" and pinned["tokens"] > 300
    row = "SELECT tokens, in_memory_tokens, seconds_left > 3500 FROM tierkv.pins"
    assert cluster.query(row) == [(pinned["tokens"], pinned["tokens"], True)]
    for name in ("front", "meta", "dmp-0", "dmp-1"):
        cluster.kill(name)

        def is_kept() -> bool:
            try:
                return cluster.query(row) == [(pinned["tokens"], pinned["tokens"], True)]
            except psycopg.Error:
                return False

        wait_for(is_kept, what=f"the pin is kept after the loss of {name}")
    cluster.kill("compute-0")
    cluster.kill("compute-1")
    filler = (
        "SELECT count(ai_warm('Filler ' || i || repeat(' and ' || i, 300))) "
        "FROM generate_series(1, 60) t(i)"
    )
    wait_for(lambda: _answered(cluster, filler), what="the pool was filled")
    assert cached(cluster, DOC + QUESTIONS[0]) >= pinned["tokens"]
    assert told(cluster, "SELECT tierkv.pin(%s, '0 s')", DOC)["outcome"] == "ended"
    assert told(cluster, "SELECT tierkv.pin(%s, '0 s')", DOC)["outcome"] == "missing"
    assert cluster.query("SELECT * FROM tierkv.pins") == []
    assert told(cluster, "SELECT tierkv.pin('short', '1 h')")["outcome"] == "rejected"


def _answered(cluster: Cluster, sql: str) -> bool:
    try:
        return bool(cluster.query(sql))
    except psycopg.Error:
        return False


def test_pins_count_against_the_quota_and_forgetting_ends_them(pinning: Cluster) -> None:
    cluster = pinning
    pin = "SELECT tierkv.pin(%s, INTERVAL '1 day')"
    # Deferred: the first blocks of a new cluster may reach the pool later than the pin.
    wait_for(lambda: told(cluster, pin, OTHER)["outcome"] == "accepted", what="the pin")
    size = int(cluster.query("SELECT size_bytes FROM tierkv.pins")[0][0])
    dsn = f"host=127.0.0.1 port={cluster.pg_port} user=tierkv dbname=main"
    with psycopg.connect(dsn, autocommit=True) as connection:
        few = f"CREATE KV NAMESPACE pinned WITH (tenants = 'tierkv', capacity = '{size - 1}')"
        with pytest.raises(psycopg.errors.DiskFull, match=f"{size} bytes of namespace pinned"):
            connection.execute(few.encode())
        connection.execute(few.replace(str(size - 1), str(size + 1000)).encode())
        more = told(cluster, "SELECT tierkv.pin(%s, '1 day')", "More " * 300)
        assert more["outcome"] == "rejected" and "may still pin" in more["reason"]
        connection.execute("DROP KV NAMESPACE pinned")  # The pin is of the KV outside of it.
        assert told(cluster, "SELECT tierkv.pin(%s, '0 s')", OTHER)["outcome"] == "ended"
        connection.execute(few.replace(str(size - 1), str(size + 1000)).encode())
        # Pins of one statement are asked for together; all have the length of the first.
        together = (
            "SELECT count(*) FILTER (told ->> 'outcome' {}) FROM (SELECT tierkv.pin("
            "i || ' ' || %s, '{}') AS told FROM generate_series(1, 5) t(i))"
        )
        assert one(cluster, together.format("<> 'rejected'", "1 day"), OTHER) == 1
        assert one(cluster, together.format("= 'ended'", "0 s"), OTHER) == 1
        connection.execute("DROP KV NAMESPACE pinned")
    assert told(cluster, "SELECT tierkv.forget(%s)", OTHER)["blocks"] > 0
    assert cluster.query("SELECT * FROM tierkv.pins") == []


def test_a_prompt_that_only_pages_have_is_pinned_in_the_pool(pinning: Cluster) -> None:
    asked = "Only the pages of a node have these words. " * 20
    assert one(pinning, "SELECT tierkv.warm(%s)", asked) > 150

    def in_memory() -> int:
        return int(told(pinning, "SELECT tierkv.kv_locate(%s)", asked)["memory_tokens"])

    wait_for(in_memory, what="the prompt is in the pool")
    filler = (
        "SELECT count(ai_warm('More ' || i || ' {}' || repeat(' and ' || i, 300))) "
        "FROM generate_series(1, 15) t(i)"
    )
    for number in range(40):  # Until the pool has evicted the prompt, which stays in pages.
        if not in_memory():
            break
        pinning.query(filler.format(number))
        assert one(pinning, "SELECT tierkv.warm(%s)", asked) > 150
    before = told(pinning, "SELECT tierkv.kv_locate(%s)", asked)
    assert not before["memory_tokens"] and before["l1_tokens"] > 150, before
    pin = "SELECT tierkv.pin(%s, INTERVAL '1 hour')"
    wait_for(lambda: told(pinning, pin, asked)["outcome"] == "accepted", what="the pin")
    assert in_memory() >= 150
    assert told(pinning, "SELECT tierkv.pin(%s, '0 s')", asked)["outcome"] == "ended"
    assert told(pinning, "SELECT tierkv.forget(%s)", asked)["blocks"] > 0


def test_a_rest_client_steers_the_same_kv(pinning: Cluster) -> None:
    text = "A client of REST asks about this text. " * 20
    messages = [{"role": "user", "content": text}]
    warmed = post(pinning, "kv/prefetch", messages=messages)
    assert warmed["object"] == "kv.warm" and warmed["tokens"] > 200
    # The other node may be chosen before the directory has heard of the blocks.
    wait_for(lambda: chat_cached(pinning, text + "Why?") > 180, what="the prompt is warm")
    pinned = post(pinning, "kv/pin", messages=messages, keep_s=60)
    assert (pinned["outcome"], pinned["tokens"] > 180) == ("accepted", True)
    assert post(pinning, "kv/pin", messages=messages, keep_s=0)["outcome"] == "ended"
    gone = post(pinning, "kv/forget", messages=messages)
    assert gone["memory_bytes"] > 0 and gone["l1_bytes"] > 0
    assert chat_cached(pinning, text + "Why?") < 20
    ids = list(range(100, 180))
    assert post(pinning, "kv/prefetch", token_ids=ids)["tokens"] == 80
    assert post(pinning, "kv/forget", token_ids=ids)["memory_bytes"] > 0
    assert post(pinning, "kv/forget", token_ids=ids)["blocks"] == 0
    for wrong in ({}, {"prompt": "a", "token_ids": [1]}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(pinning, "kv/forget", **wrong)
        assert refused.value.code == 400 and b"send one of" in refused.value.read()


def test_a_demoted_prompt_leaves_the_pages_and_comes_back_from_the_pool(pinning: Cluster) -> None:
    text = "A client demotes what it has read. " * 20
    messages = [{"role": "user", "content": text}]
    ask = [{"role": "user", "content": text + "Why?"}]
    want = post(pinning, "chat/completions", messages=ask, max_tokens=6, temperature=0)["choices"]

    def located() -> dict[str, Any]:
        return post(pinning, "kv/locate", messages=messages)

    # The directory hears of pages a little later than the client of the answer.
    wait_for(lambda: located()["l1_tokens"] >= 128, what="the prompt's pages are known")
    before = located()
    assert before["object"] == "kv.locate", before
    assert before["l1_bytes"] > 0 and before["outcome"] in ("accepted", "clipped")
    told = post(pinning, "kv/demote", messages=messages)
    assert told["object"] == "kv.demote" and told["l1_bytes"] > 0, told
    assert told["outcome"] in ("accepted", "clipped") and told["tokens"] >= 128
    assert post(pinning, "kv/demote", messages=messages)["outcome"] == "missing"
    used = "SELECT sum(hits), sum(leases) FROM tierkv.kvcache_blocks"
    counted = pinning.query(used)
    after = post(pinning, "kv/locate", messages=messages)
    assert (after["l1_tokens"], after["l1_bytes"]) == (0, 0) and after["memory_bytes"] > 0
    assert after["memory_tokens"] >= told["tokens"] and after["disk_tokens"] == 0
    assert pinning.query(used) == counted, "to locate is no use"
    tiers = pinning.query("SELECT DISTINCT tier FROM tierkv.kvcache_blocks")
    assert ("L2",) in [tuple(row) for row in tiers]
    again = post(pinning, "chat/completions", messages=ask, max_tokens=6, temperature=0)
    assert again["choices"] == want
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    nothing = [{"role": "user", "content": "Nobody has ever asked this. " * 20}]
    assert post(pinning, "kv/demote", messages=nothing)["outcome"] == "missing"
    absent = post(pinning, "kv/locate", messages=nothing)
    assert absent["outcome"] == "missing" and absent["tokens"] > 100
    assert absent["memory_tokens"] == absent["l1_bytes"] == absent["disk_bytes"] == 0


def test_a_kept_conversation_is_steered_by_its_id(pinning: Cluster) -> None:
    kept = post(pinning, "conversations")["id"]
    text = "We speak about parcels and rivers. " * 20
    first = post(pinning, "responses", conversation=kept, input=text, max_output_tokens=4)
    for name in (kept, first["id"]):
        warmed = post(pinning, "kv/prefetch", conversation=name)
        assert warmed["tokens"] > 200 and warmed["model"] == "tierkv-demo"
    assert post(pinning, "kv/pin", conversation=kept, keep_s=60)["outcome"] == "accepted"
    gone = post(pinning, "kv/forget", conversation=kept)
    assert gone["memory_bytes"] > 0 and pinning.query("SELECT * FROM tierkv.pins") == []
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(pinning, "kv/forget", conversation="conv_unknown")
    assert refused.value.code == 404 and b"conv_unknown" in refused.value.read()


def test_stored_tokens_are_told_by_lifetime(pinning: Cluster) -> None:
    def marked(text: str, ttl: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}

    for number, (first, second) in enumerate((("1h", "1h"), ("5m", "5m"), ("1h", "5m"))):
        system = [marked(f"{number} is the number of this talk about lifetimes. " * 20, first)]
        talk = [{"role": "user", "content": [marked("How is the weather in Rome? " * 20, second)]}]
        asked = {"system": system, "messages": talk, "max_tokens": 1}
        usage = post(pinning, "messages", **asked)["usage"]
        told = usage["cache_creation"]
        hour, short = told["ephemeral_1h_input_tokens"], told["ephemeral_5m_input_tokens"]
        assert hour + short == usage["cache_creation_input_tokens"] > 200
        assert (hour > 100, short > 100) == (first == "1h", second == "5m")
        pins = 1 + (first != second)
        wait_for(lambda n=pins: len(pinning.query(PINS)) == n, what="the prompt is retained")
        post(pinning, "kv/forget", messages=[{"role": "system", "content": system[0]["text"]}])
        assert pinning.query(PINS) == []


def test_retained_prompts_take_a_share_of_the_pool_and_no_more(pinning: Cluster) -> None:
    text = "A client of Anthropic asks about this text. " * 20
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ask = [{"role": "user", "content": "Why?"}]
    post(pinning, "messages", system=[block], messages=ask, max_tokens=1)
    seconds = "SELECT seconds_left FROM tierkv.pins"
    wait_for(lambda: pinning.query(seconds), what="the mark of the request retains its prompt")
    assert 3_000 < pinning.query(seconds)[0][0] <= 3_600
    outcomes = []
    for number in range(6):
        prompt = {"prompt": f"Number {number}. " + "A very long text about ships. " * 300}
        post(pinning, "kv/prefetch", **prompt)
        outcomes.append(post(pinning, "kv/retain", **prompt, keep_s=60))
    assert outcomes[0]["outcome"] in ("accepted", "clipped"), outcomes
    assert outcomes[-1]["outcome"] == "rejected" and "is pinned already" in outcomes[-1]["reason"]
    kept = sum(row[0] for row in pinning.query("SELECT size_bytes FROM tierkv.pins"))
    assert kept <= 2 * (64 << 20) / 4
    for number in range(6):
        prompt = f"Number {number}. " + "A very long text about ships. " * 300
        post(pinning, "kv/forget", prompt=prompt)
    post(pinning, "kv/forget", messages=[{"role": "system", "content": text}])
    assert pinning.query(PINS) == []


def chat_cached(cluster: Cluster, text: str) -> int:
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    usage = post(cluster, "chat/completions", **asked)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def post(cluster: Cluster, path: str, **body: object) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.http_port}/v1/{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))

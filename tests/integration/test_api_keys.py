"""REST keys made by ``tierkv key create``: what they open, whom they are, and their end."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import ROOT, wait_for
from tests.fix_roles import Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
PROMPT = {"prompt": "Mia bought a kettle.", "max_tokens": 2, "temperature": 0}


class Keyed(Roles):
    """Roles and the ``tierkv key`` command."""

    def key(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        return subprocess.run(
            [sys.executable, "-m", "tierkv", "key", *words, "--set",
             f"cluster.meta_address=127.0.0.1:{self._ports['meta']}", "--set",
             "cluster.token=roles"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def post(
        self, path: str, body: dict[str, Any] | None = None, key: str = "", method: str = "POST"
    ) -> tuple[int, Any]:
        """Send a request; return the status and the body."""
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}{path}",
            None if body is None else json.dumps(body).encode(),
            headers,
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=40) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keys")
    lasting = (
        f"front.database={folder / 'main.duckdb'}", f"front.sessions={folder / 'sessions'}",
        "front.queue_claim_s=1",
    )  # fmt: skip
    roles = Keyed(folder, {"front": lasting})
    try:
        roles.start("meta")
        roles.start("dmp-0", "compute-0", "front")
        yield roles
    finally:
        roles.stop()


def test_keys_are_made_used_limited_and_revoked(cluster: Keyed) -> None:
    assert cluster.post("/v1/completions", PROMPT)[0] == 200  # Open: there is no key.
    made = cluster.key("create", "crm", "--tenant", "sales")
    key = made.stdout.strip()
    assert key.startswith("tk-") and "only its hash is stored" in made.stderr, made.stderr
    wait_for(lambda: cluster.post("/v1/completions", PROMPT)[0] == 401, what="the door needs a key")
    assert cluster.post("/v1/completions", PROMPT, "tk-" + "x" * 43)[0] == 401
    assert cluster.post("/v1/completions", PROMPT, key)[0] == 200

    listed = cluster.key("list")
    assert "crm" in listed.stdout and "sales" in listed.stdout and key not in listed.stdout
    again = cluster.key("create", "crm")
    assert again.returncode == 1 and "tierkv key revoke crm" in again.stderr

    status, told = cluster.post("/v1/sql", {"sql": "SELECT current_user AS who"}, key)
    assert (status, told["rows"]) == (200, [["sales"]])
    port = cluster.pg_port
    with psycopg.connect(f"host=127.0.0.1 port={port} user=dba", autocommit=True) as session:
        with pytest.raises(psycopg.errors.UndefinedObject, match="does not exist"):
            session.execute("ALTER AI KEY nobody SET AI LIMIT (requests = '2/day')")
        session.execute("ALTER AI KEY crm SET AI LIMIT (requests = '2/day')")
        assert cluster.post("/v1/completions", PROMPT, key)[0] == 200
        call = {"sql": "SELECT ai_generate('Hello', options => '{\"max_tokens\": 1}')"}
        assert cluster.post("/v1/sql", call, key)[0] == 200
        status, told = cluster.post("/v1/completions", PROMPT, key)
        assert status == 429 and "key crm has used its limit" in told["error"]["message"]
        (left,) = session.execute(
            "SELECT remaining FROM tierkv.call_limits WHERE subject = 'crm'"
        ).fetchall()
        assert left[0] == pytest.approx(0.0, abs=0.1)
    mine = cluster.post("/v1/sql", {"sql": "SELECT subject FROM tierkv.my_limits"}, key)[1]
    assert mine["rows"] == [["crm"]]

    assert cluster.key("revoke", "crm").returncode == 0
    wait_for(lambda: cluster.post("/v1/completions", PROMPT)[0] == 200, what="the last key is gone")
    with psycopg.connect(f"host=127.0.0.1 port={port} user=dba", autocommit=True) as session:
        log = session.execute(
            "SELECT action, subject, outcome, detail, who FROM tierkv.audit_log "
            "WHERE subject = 'key crm' ORDER BY happened_at"
        ).fetchall()
        kept = "SELECT subject FROM tierkv.call_limits"
        wait_for(lambda: not session.execute(kept).fetchall(), what="its limits end with the key")
    assert [line[:4] for line in log if line[0] != "AI call"] == [
        ("tierkv key create", "key crm", "done", "tenant = sales"),
        ("ALTER AI LIMIT", "key crm", "done", "requests = 2/day"),
        ("tierkv key revoke", "key crm", "done", ""),
    ]
    assert log[0][4].endswith(f"@{platform.node()}") and log[1][4] == "dba"
    assert not any(key in str(line) for line in log)
    gone = cluster.key("revoke", "crn")
    assert gone.returncode == 1 and "there is no key 'crn'" in gone.stderr
    wait_for(lambda: cluster.post("/v1/completions", PROMPT)[0] == 200, what="the last key is gone")


def test_a_stream_whose_key_is_revoked_ends_whole(cluster: Keyed) -> None:
    key = cluster.key("create", "short").stdout.strip()
    wait_for(lambda: cluster.post("/v1/completions", PROMPT)[0] == 401, what="the key is known")
    body = {"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.http_port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert stream.readline()
        assert cluster.key("revoke", "short").returncode == 0
        wait_for(lambda: cluster.post("/v1/completions", PROMPT)[0] == 200, what="it is gone")
        lines = [line for line in stream if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"


def test_a_queued_response_of_a_revoked_key_is_not_answered(cluster: Keyed) -> None:
    keys = {
        name: cluster.key("create", name, "--tenant", "sales").stdout.strip()
        for name in ("gone", "stays")
    }

    def knows(key: str) -> bool:
        return bool(cluster.post("/v1/completions", PROMPT, key)[0] == 200)

    wait_for(lambda: all(map(knows, keys.values())), what="the keys are known")
    body = {"input": "Once", "background": True, "max_output_tokens": 2000, "ignore_eos": True}
    status, told = cluster.post("/v1/responses", body, keys["gone"])
    assert (status, told["status"]) == (200, "queued")
    cluster.kill("front")
    assert cluster.key("revoke", "gone").returncode == 0
    cluster.key("create", "gone", "--tenant", "another")
    cluster.start("front")

    def response() -> dict[str, Any]:
        path = f"/v1/responses/{told['id']}"
        found: dict[str, Any] = cluster.post(path, None, keys["stays"], method="GET")[1]
        return found

    wait_for(lambda: response().get("status") == "failed", what="the response failed")
    assert response()["error"]["code"] == "invalid_api_key"
    assert "API key" in response()["error"]["message"]
    query = {"sql": "SELECT dead FROM tierkv.queues WHERE queue = 'responses'"}
    assert cluster.post("/v1/sql", query, keys["stays"])[1]["rows"] == [[0]]
    for name in keys:
        assert cluster.key("revoke", name).returncode == 0
    wait_for(lambda: knows(""), what="the last key is gone")


def test_namespaces_are_managed_over_rest(cluster: Keyed) -> None:
    path = "/v1/admin/namespaces/red"
    status, told = cluster.post(path, method="GET")
    assert status == 404 and "no namespace 'red'" in told["error"]["message"], told
    assert "no such endpoint" in cluster.post("/v1/admin/no", method="GET")[1]["error"]["message"]
    options = {"tenants": ["ann", "bob"], "capacity": "4GiB", "blend": True, "ttl": 60}
    status, made = cluster.post(path, options, method="PUT")
    assert status == 201 and (made["capacity_bytes"], made["ttl_s"]) == (4 << 30, 60.0)
    assert (made["tenants"], made["blend"]) == ("ann, bob", True)
    status, changed = cluster.post(path, {"on_full": "refuse"}, method="PUT")
    assert status == 200 and (changed["on_full"], changed["capacity_bytes"]) == ("refuse", 4 << 30)
    for body, says in (({"capacty": 1}, "Did you mean capacity?"), ({"ttl": "soon"}, "duration")):
        status, told = cluster.post(path, body, method="PUT")
        assert status == 400 and says in told["error"]["message"], told
    status, told = cluster.post(path, {"ttl": {"a": 1}}, method="PUT")
    assert status == 400, told
    described = cluster.post("/openapi.json", method="GET")[1]["paths"]
    assert {"get", "put", "delete"} <= set(described["/v1/admin/namespaces/{name}"])
    everything = cluster.post("/v1/admin/namespaces", method="GET")[1]["namespaces"]
    assert [each["name"] for each in everything] == ["red"]
    assert cluster.post(path, method="DELETE") == (204, None)
    assert cluster.post(path, method="DELETE")[0] == 404
    assert cluster.post("/v1/admin/namespaces/a%20b", {}, method="PUT")[0] == 400


def test_the_next_call_obeys_a_changed_namespace(cluster: Keyed) -> None:
    body = PROMPT | {"prompt": "Mia bought a kettle. " * 30}

    def cached() -> int:
        told = cluster.post("/v1/completions", body)[1]
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    path = "/v1/admin/namespaces/default"
    cached()
    assert cached() > 0
    assert cluster.post(path, {"cache": False}, method="PUT")[0] == 201
    assert cached() == 0
    assert cluster.post(path, {"cache": True}, method="PUT")[0] == 200
    assert cached() > 0
    assert cluster.post(path, method="DELETE")[0] == 204


@pytest.mark.parametrize(("name", "tenant"), [("a b", "x"), ("x", "a b"), ("", "x")])
def test_names_are_checked_before_a_key_is_made(cluster: Keyed, name: str, tenant: str) -> None:
    refused = cluster.key("create", name, "--tenant", tenant)
    assert refused.returncode == 1 and "is no name of a" in refused.stderr
    assert "tk-" not in refused.stdout

"""A namespace of a model whose nodes are gone for good: all surfaces answer, and say the cure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from safetensors.torch import load_file, save_file

from tests.fix_cluster import ROOT, wait_for
from tests.fix_roles import Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
DEMO = ROOT / "compute" / "demo_model" / "weights"
ASK = (
    "SELECT ai_generate('Customer: Mia. Product: lamp. ' || repeat('City: Oslo. ', 20), "
    "model => '{}', options => '{{\"max_tokens\": 2}}')"
)
KEPT = "SELECT model_name, blocks > 0, used_bytes > 0 FROM tierkv.namespaces WHERE name = 'lost'"
FREED = "SELECT used_bytes, evicted_for_version > 0 FROM tierkv.namespaces WHERE name = 'lost'"


class TwoModels(Roles):
    """Roles whose second compute node serves a model of its own."""

    def __init__(self, folder: Path, other: Path) -> None:
        super().__init__(folder, {"compute-1": [f"compute.model={other}"]})

    def sql(self, user: str, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement as a user."""
        dsn = f"host=127.0.0.1 port={self.pg_port} user={user} dbname=main"
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def shown(self) -> dict[str, Any]:
        """Return the namespace over REST."""
        url = f"http://127.0.0.1:{self.http_port}/v1/admin/namespaces/lost"
        with urllib.request.urlopen(url, timeout=30) as response:
            row: dict[str, Any] = json.load(response)
            return row

    def listed(self) -> str:
        """Return what ``tierkv namespace list`` prints."""
        where = f"cluster.meta_address=127.0.0.1:{self._ports['meta']}"
        return subprocess.run(
            [sys.executable, "-m", "tierkv", "namespace", "list",
             "--set", where, "--set", "cluster.token=roles"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    folder = tmp_path_factory.mktemp("lost")
    other = folder / "other"
    shutil.copytree(DEMO, other, ignore=shutil.ignore_patterns("kv_calibration*"))
    weights = load_file(other / "model.safetensors")
    for name, tensor in weights.items():
        if "down_proj" in name:
            weights[name] = tensor.flip(0).contiguous()
    save_file(weights, other / "model.safetensors")
    roles = TwoModels(folder, other)
    try:
        roles.start("meta", "dmp-0", "compute-0", "compute-1", "front")
        models = "SELECT model_name FROM tierkv.models"
        wait_for(lambda: len(roles.query(models)) == 2, what="the front knows both models")
        yield roles
    finally:
        roles.stop()


def _namespace_of_a_lost_model(cluster: TwoModels) -> None:
    cluster.sql(
        "boss",
        "CREATE KV NAMESPACE lost WITH (tenants = 'carl', model = 'other', capacity = '8MiB')",
    )
    cluster.sql("carl", ASK.format("other"))
    wait_for(lambda: cluster.sql("boss", KEPT) == [("other", True, True)], what="the KV is counted")
    cluster.kill("compute-1")


def test_a_namespace_without_its_model_answers_can_be_altered_and_dropped(
    cluster: TwoModels,
) -> None:
    _namespace_of_a_lost_model(cluster)
    cluster.end("front")
    cluster.start("front")
    with pytest.raises(psycopg.OperationalError, match="model other") as told:
        cluster.sql("carl", ASK.format("other"))
    assert told.value.sqlstate in ("08006", "57P03")
    assert "start a compute node with other" in (told.value.diag.message_hint or "")
    assert cluster.sql("carl", ASK.format("tierkv-demo"))
    assert cluster.sql("boss", KEPT) == [("other", True, True)]
    assert cluster.shown()["model_name"] == "other" and "other" in cluster.listed()
    cluster.sql("boss", "ALTER KV NAMESPACE lost SET (capacity = '4MiB')")
    cluster.sql("boss", "ALTER KV NAMESPACE lost SET VERSION 'r2'")
    wait_for(lambda: cluster.sql("boss", FREED) == [(0, True)], what="the KV is gone, counted")
    cluster.sql("boss", "ALTER KV NAMESPACE lost SET (model = 'tierkv-demo')")
    wait_for(
        lambda: (
            cluster.sql("carl", ASK.format("tierkv-demo"))
            and cluster.sql("boss", KEPT) == [("tierkv-demo", True, True)]
        ),
        what="the namespace counts its new model's KV",
    )
    cluster.sql("boss", "DROP KV NAMESPACE lost")
    assert cluster.sql("boss", KEPT) == []

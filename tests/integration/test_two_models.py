"""Two models in one cluster of real processes: each answers as it does alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import openai
import psycopg
import pytest
from safetensors.torch import load_file, save_file

import tierkv
from tests.fix_cluster import ROOT, Cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
DEMO = ROOT / "compute" / "demo_model" / "weights"
ASKED = "Customer: Mia Brandt. Product: lamp. City: Oslo. " * 4 + "Question: where does she live?"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like the shipped one that says something else."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("kv_calibration*"))
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "down_proj" in name:
            weights[name] = tensor.flip(0).contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster], other_model: Path) -> Cluster:
    return start_cluster("--model", str(DEMO), "--model", str(other_model))


def test_each_answers_as_it_does_alone(cluster: Cluster, other_model: Path) -> None:
    """KV of one is never the other's, whoever asks first."""
    alone = {}
    for model in (DEMO, other_model):
        with tierkv.connect(model=str(model)) as database:
            cursor = database.cursor()
            cursor.execute("SELECT ai_generate(?, options => '{\"max_tokens\": 12}')", [ASKED])
            alone[model] = str(cursor.fetchall()[0][0])
    assert alone[DEMO] != alone[other_model]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="none")
    names = [model.id for model in client.models.list()]
    assert sorted(names) == ["other", "weights"]
    for _ in range(2):
        for name, model in (("weights", DEMO), ("other", other_model), ("weights", DEMO)):
            text = ASKED.replace("'", "''")
            asked = f"SELECT ai_generate('{text}', '{name}', options => '{{\"max_tokens\": 12}}')"
            assert cluster.query(asked) == [(alone[model],)]
            chat = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": ASKED}],
                max_tokens=12,
                temperature=0,
            )
            assert chat.choices[0].message.content == alone[model]
    (default,) = cluster.query(
        f"SELECT ai_generate('{ASKED}', options => '{{\"max_tokens\": 12}}')"
    )
    assert default == (alone[DEMO],)


def test_a_model_that_nobody_serves_is_told_with_those_there_are(cluster: Cluster) -> None:
    with pytest.raises(psycopg.Error, match="weights") as refused:
        cluster.query("SELECT ai_generate('x', 'third')")
    assert "other" in str(refused.value)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="none")
    with pytest.raises(openai.NotFoundError, match="weights"):
        client.chat.completions.create(
            model="third", messages=[{"role": "user", "content": "x"}], max_tokens=1
        )

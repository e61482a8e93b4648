"""Which children a cluster shape means."""

from __future__ import annotations

import shlex
from pathlib import Path

import psycopg.conninfo
import pytest

from tierkv.commands.up import ClusterShape, _own, _tell_ready, dialable, plan_nodes, sql_words
from tierkv.config import load_config
from tierkv.kvcore.errors import ConfigError
from tierkv.parts.served_models import model_name, split_by_model, with_default_model
from tierkv.settings import ComputeSettings, Settings


def test_one_host_keeps_its_name() -> None:
    plans = plan_nodes(ClusterShape(), "box", [ComputeSettings()])
    assert [(p.role, p.node_id, p.overrides) for p in plans] == [
        ("dmp", "dmp-0", ("cluster.host=box",)),
        ("compute", "compute-0", ("cluster.host=box",)),
    ]


def test_several_dmp_nodes_act_as_hosts_and_compute_is_dealt_out() -> None:
    plans = plan_nodes(
        ClusterShape(dmp=2, compute=0, prefill=1, decode=2), "box", [ComputeSettings()]
    )
    assert [(p.node_id, p.overrides[0].partition("=")[2]) for p in plans] == [
        ("dmp-0", "box-0"),
        ("dmp-1", "box-1"),
        ("prefill-0", "box-0"),
        ("decode-0", "box-1"),
        ("decode-1", "box-0"),
    ]


def test_each_model_has_nodes_of_its_own() -> None:
    config = load_config(
        flags={"compute.model": "/m/llama", "compute.more_models": ["tierkv-demo"]}, environ={}
    )
    models = split_by_model(config.settings.compute)
    plans = plan_nodes(ClusterShape(compute=2), "box", models)
    assert [(p.node_id, p.overrides[1:]) for p in plans[1:]] == [
        ("compute-0", ("compute.model=/m/llama", "compute.model_name=llama")),
        ("compute-1", ("compute.model=/m/llama", "compute.model_name=llama")),
        ("compute-2", ("compute.model=tierkv-demo", "compute.model_name=tierkv-demo")),
        ("compute-3", ("compute.model=tierkv-demo", "compute.model_name=tierkv-demo")),
    ]
    assert with_default_model(config).settings.front.default_model == "llama"
    chosen = load_config(
        flags={"compute.more_models": ["/m/a"], "front.default_model": "a"}, environ={}
    )
    assert with_default_model(chosen).settings.front.default_model == "a"


def test_two_models_of_one_name_are_refused() -> None:
    compute = ComputeSettings(model="/a/weights", more_models=("/b/weights",))
    with pytest.raises(ConfigError, match="two models have the name 'weights'"):
        split_by_model(compute)
    named = compute.model_copy(update={"model_name": "a"})
    assert [model_name(each) for each in split_by_model(named)] == ["a", "weights"]


def test_the_next_command_dials_what_a_client_here_can_reach() -> None:
    assert dialable("0.0.0.0:5433") == ("127.0.0.1", "5433")
    assert dialable("[::]:5433") == ("[::1]", "5433")
    assert dialable("10.1.2.3:5433") == ("10.1.2.3", "5433")


def test_the_printed_login_works_when_pasted_and_shows_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings.model_validate(
        {"front": {"users": {"ann": "p:w"}}, "cluster": {"run_dir": str(tmp_path)}}
    )
    folder = tmp_path / "a folder"
    front = {"pg": "127.0.0.1:5433", "http": "127.0.0.1:8000"}
    _tell_ready(settings, {"front": front, "compute-0": {}}, folder)
    out = capsys.readouterr().out
    assert "p:w" not in out
    url = next(word for word in out.split() if word.startswith("postgresql://"))
    given = psycopg.conninfo.conninfo_to_dict(url)
    assert given["user"] == "ann"
    file = Path(str(given["passfile"]))
    assert (file.parent, file.read_text()) == (folder, "*:*:*:ann:p\\:w\n")
    assert file.stat().st_mode & 0o077 == 0
    assert f"PGPASSFILE='{file}' psql" in out


@pytest.mark.parametrize(
    ("nodes", "offers"), [(["compute-0"], True), (["prefill-0"], True), ([], False)]
)
def test_a_cluster_without_a_model_says_how_to_add_one(
    nodes: list[str], offers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front = {"pg": "127.0.0.1:5433", "http": "127.0.0.1:8000"}
    _tell_ready(Settings(), {"front": front, "dmp-0": {}} | {name: {} for name in nodes}, tmp_path)
    out = capsys.readouterr().out
    assert ("ai_generate" in out) is offers
    assert (f"tierkv serve compute --config {tmp_path}/cluster.toml\n" in out) is not offers


@pytest.mark.parametrize("place", ["file", "file/inside", "folder/taken"])
def test_a_run_dir_that_cannot_be_used_is_told_with_the_cure(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder/taken/lock").mkdir(parents=True)
    run_dir = tmp_path / place
    message = f"cluster.run_dir {run_dir} can't be used"
    with pytest.raises(ConfigError, match=message) as told, _own(run_dir):
        pytest.fail("it can't be held")
    assert "--set cluster.run_dir=FOLDER" in told.value.hint


@pytest.mark.parametrize("name", ["tierkv", "ann lee", "o'neil", "a:b@c/d", "$HOME `x`", "ä?&"])
@pytest.mark.parametrize("folder", [None, Path("/tmp/of ann's/run")])
def test_printed_words_reach_any_user_and_database(name: str, folder: Path | None) -> None:
    file = folder / "passwords" if folder else None
    url, line = sql_words(name, f"{name}s", ("127.0.0.1", "5433"), file)
    given = psycopg.conninfo.conninfo_to_dict(url)
    assert (given["user"], given["dbname"]) == (name, f"{name}s")
    assert given.get("passfile") == (str(file) if file else None)
    words = shlex.split(line)
    assert words[-7:] == ["-h", "127.0.0.1", "-p", "5433", "-U", name, f"{name}s"]
    assert words[:-7] == ([f"PGPASSFILE={file}"] if file else []) + ["psql"]

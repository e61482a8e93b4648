"""Bad input at the command line: each has its own message that names the cure, and no traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tierkv
from tierkv import dbapi
from tierkv.compute.demo_model import data as demo_data

ROOT = Path(__file__).parents[2]
WEIGHTS = Path(demo_data.__file__).parent / "weights"
pytestmark = pytest.mark.integration


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def sql(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line("sql", "-q", "--set", "dmp.capacity=64MiB", *arguments)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("", "there is no model folder"),
        ("config.json", "config.json"),
        ("model.safetensors", "safetensors"),
    ],
)
def test_model_folder_that_can_not_be_served(tmp_path: Path, missing: str, says: str) -> None:
    folder = tmp_path / "model"
    if missing:
        shutil.copytree(WEIGHTS, folder)
        (folder / missing).unlink()
    done = sql("--model", str(folder), "-c", "SELECT 1")
    assert done.returncode == 1
    assert says in done.stderr
    assert str(folder) in done.stderr


def test_architecture_nobody_serves(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(WEIGHTS, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    done = sql("--model", str(folder), "-c", "SELECT 1")
    assert done.returncode == 1
    assert "GPT2LMHeadModel" in done.stderr
    assert "LlamaForCausalLM" in done.stderr


def test_too_little_shared_memory_says_how_much_is_needed() -> None:
    done = sql("--set", "dmp.capacity=900GiB", "-c", "SELECT 1")
    assert done.returncode == 1
    assert "bytes" in done.stderr
    assert "dmp.capacity" in done.stderr


def test_a_size_that_is_none_is_told_how_to_write_one() -> None:
    done = command_line("up", "--set", "dmp.capacity=1 gigs")
    assert done.returncode == 1
    assert "dmp.capacity = '1 gigs' is not valid" in done.stderr
    assert "512MiB" in done.stderr


@pytest.mark.parametrize(
    ("dsn", "says"),
    [
        ("host=127.0.0.1 port=1 dbname=x", "front.postgres: connection failed"),
        ("BAD", "Write it as postgresql://"),
    ],
)
def test_a_postgresql_that_is_none_is_told_before_anything_is_started(
    tmp_path: Path, dsn: str, says: str
) -> None:
    done = command_line("up", "--postgres", dsn, "--set", f"cluster.run_dir={tmp_path}")
    assert done.returncode == 1
    assert says in done.stderr
    assert "starting" not in done.stdout + done.stderr


BAD_STATEMENTS = {
    "SELECT ai_generate('x', model => 'nope')": "42704",
    "SELECT ai_generate('x', options => '{\"temprature\": 1}')": "22023",
    "SELECT ai_generate()": "22023",
    "SELECT ai_sumarize('x')": "42883",
    "SELECT main.ai_generate('x')": "42883",
    "SELEC 1": "42601",
    "SELECT * FROM nope": "42P01",
    "SELECT 1/'x'::INT": "22P02",
    "SET tierkv.modle = 'x'": "42704",
    "INSERT INTO kept SELECT 2, ai_generate(repeat('word ', 5000))": "54000",
}


def test_statement_errors_carry_sqlstate_and_leave_the_session_usable() -> None:
    with tierkv.connect(dmp__capacity="64MiB", compute__threads=1) as connection:
        connection.execute("CREATE TABLE kept (id INTEGER, t VARCHAR)")
        connection.execute("INSERT INTO kept VALUES (1, 'a')")
        for statement, sqlstate in BAD_STATEMENTS.items():
            with pytest.raises(dbapi.Error) as caught:
                connection.execute(statement)
            assert caught.value.sqlstate == sqlstate, statement
            assert connection.execute("SELECT id FROM kept").fetchall() == [(1,)]


def test_a_prompt_beyond_the_context_is_null_and_a_warning_in_reads() -> None:
    with tierkv.connect(dmp__capacity="64MiB", compute__threads=1) as connection:
        cursor = connection.execute("SELECT ai_generate(repeat('word ', 5000)) AS a")
        assert cursor.fetchall() == [(None,)]
        (notice,) = cursor.notices
        assert notice.severity == "WARNING"
        assert "4096" in notice.message


def test_a_cluster_of_a_model_that_is_not_there_starts_nothing() -> None:
    done = command_line("up", "--model", "org/name")
    assert done.returncode == 1
    assert "hf download org/name" in done.stderr
    assert "starting" not in done.stderr


def test_an_environment_variable_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_FRONT_USERS", "{ann")
    done = command_line("config", "show")
    assert done.returncode == 1
    assert "TIERKV_FRONT_USERS" in done.stderr


def test_commands_of_the_prompt_stand_between_those_of_c() -> None:
    done = sql("--format", "csv", "-c", "SELECT 1 AS one", "-c", "\\df ai_count*", "-c", "\\l",
               "-c", "\\q", "-c", "SELECT 2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [
        "one", "1", "name,arguments,returns", 'ai_count_tokens,"input, [model]",integer',
        "name,file", "memory,in memory", "",
    ]  # fmt: skip
    done = sql("-c", "\\dx", "-c", "SELECT 2")
    assert done.returncode == 1
    assert "there is no command \\dx here" in done.stderr
    assert done.stdout == ""

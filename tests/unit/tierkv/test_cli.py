"""The command line as a newcomer meets it: help, errors in one line, config show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def _tierkv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_verb() -> None:
    done = _tierkv("--help")
    assert done.returncode == 0
    for verb in ("sql", "up", "serve", "status", "doctor", "demo", "config"):
        assert verb in done.stdout


def test_unknown_setting_ends_in_one_line_with_a_suggestion() -> None:
    done = _tierkv("config", "show", "--set", "front.pg_prot=1")
    assert done.returncode == 1
    assert "Did you mean front.pg_port" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_show_says_where_values_come_from() -> None:
    done = _tierkv("config", "show", "--set", "front.pg_port=6000")
    assert "front.pg_port" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("front.pg_port"))
    assert "6000" in line
    assert "(flag)" in line


def test_version() -> None:
    assert _tierkv("--version").stdout.strip()


def test_port_in_use_names_port_and_flag() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _tierkv("up", "--pg-port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--pg-port" in done.stderr


def test_a_refused_secret_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text('[front]\napi_keys = ["sk-hidden"]\n')
    done = _tierkv("config", "show", "--config", str(file))
    assert done.returncode == 1
    assert "front.api_keys" in done.stderr
    assert "sk-hidden" not in done.stderr


def test_a_file_that_is_no_text_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "q.sql"
    file.write_bytes(b"SELECT \xff\xfe")
    done = _tierkv("sql", "-f", str(file))
    assert done.returncode == 2
    assert "UTF-8" in done.stderr
    assert "Traceback" not in done.stderr

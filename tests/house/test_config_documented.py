"""Every setting stands in docs/operations.md, and the loader refuses what it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.config import dump_toml, list_entries, load_config
from tierkv.kvcore.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    entries = list_entries(load_config(environ={}))
    assert [entry.key for entry in entries if f"`{entry.key}`" not in text] == []
    assert all(entry.description for entry in entries)


def test_later_sources_win_and_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text('[front]\npg_port = 1\nhttp_port = 2\n[dmp]\ncapacity = "2GiB"\n')
    loaded = load_config(
        file, flags={"front.http_port": 4}, environ={"TIERKV_FRONT_HTTP_PORT": "3"}
    )
    front = loaded.settings.front
    assert (front.pg_port, front.http_port) == (1, 4)
    assert int(loaded.settings.dmp.capacity) == 2 << 30
    assert loaded.sources["front.pg_port"] == str(file)
    assert loaded.sources["front.http_port"] == "flag"
    assert loaded.sources["meta.port"] == "default"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[front]\npg_prot = 1\n", "Did you mean front.pg_port"),
        ("[fronts]\n", "Did you mean front"),
        ("[front]\npg_port = 'x'\n", "front.pg_port"),
        ("[front\n", "not valid TOML"),
    ],
)
def test_bad_files_are_refused_with_a_cure(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file, environ={})
    assert says in f"{refused.value.message}\n{refused.value.hint}"


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml", environ={})


def test_secrets_are_masked() -> None:
    entries = list_entries(load_config(flags={"cluster.token": "hunter2"}, environ={}))
    shown = next(entry for entry in entries if entry.key == "cluster.token")
    assert "hunter2" not in shown.value


def test_dumped_settings_load_again(tmp_path: Path) -> None:
    flags = {"front.users": {"ann": 'p"w'}, "dmp.capacity": "3GiB", "cluster.token": "t"}
    settings = load_config(flags=flags, environ={}).settings
    file = tmp_path / "cluster.toml"
    file.write_text(dump_toml(settings))
    assert load_config(file, environ={}).settings == settings

"""What an engine is told: names and values that can't be meant are refused when it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore.errors import ConfigError


def test_everything_is_read() -> None:
    given: dict[str, Any] = {
        "pool": "a:1, b:2",
        "token": "t",
        "secret": "x" * 16,
        "tenant": "acme",
        "transport": "tcp",
        "tls_ca": "ca.pem",
        "tls_name": "pool",
        "timeout_ms": 10,
        "threads": 64,
        "node_id": "vllm-1",
        "host": "gpu-7",
    }
    settings = PoolAccess.read(given)
    assert settings.pool == ("a:1", "b:2")
    assert (settings.token, settings.secret, settings.tenant) == ("t", "x" * 16, "acme")
    assert settings.tls is not None
    assert (settings.tls.ca, settings.tls.server_name) == ("ca.pem", "pool")
    assert (settings.timeout_ms, settings.threads, settings.host_id) == (10, 64, "gpu-7")


def test_a_list_of_addresses_is_as_good_as_commas() -> None:
    assert PoolAccess.read({"pool": ["a:1", "b:2"]}).pool == ("a:1", "b:2")


def test_empty_texts_mean_the_default() -> None:
    settings = PoolAccess.read({"meta": "m:1", "pool": "", "tenant": "", "transport": ""})
    assert (settings.pool, settings.tenant, settings.transport) == ((), "default", "auto")
    assert settings.tls is None and settings.host_id


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither pool nor meta"),
        ({"pol": "a:1"}, "unknown setting 'pol'. Did you mean pool?"),
        ({"pool": "a:1", "zzz": 1}, "unknown setting 'zzz'. Known settings: "),
        ({"pool": "a"}, "'a' is no pool address"),
        ({"pool": ["a:1", 2]}, "is not text"),
        ({"pool": "a:1", "threads": 0}, "threads = 0 is not a whole number from 1 to 64"),
        ({"pool": "a:1", "threads": True}, "threads = True is not a whole number"),
        ({"pool": "a:1", "timeout_ms": "100"}, "timeout_ms = '100' is not a whole number"),
        ({"pool": "a:1", "transport": "pigeon"}, "unknown transport 'pigeon'"),
        ({"pool": "a:1", "tenant": "a b"}, "tenant = 'a b' is not a valid name"),
        ({"pool": "a:1", "node_id": "\n"}, "node_id = '\\n' is not a valid name"),
        ({"pool": "a:1", "secret": "short"}, "secret must have 16 to 64 bytes"),
        ({"meta": "m:1", "secret": "x" * 16}, "secret and meta"),
        ({"meta": "m"}, "'m' is no pool address"),
        ({"pool": "a:1", "tls_name": "x"}, "need tls_ca"),
        ({"pool": "a:1", "token": "t", "token_file": "f"}, "token and token_file"),
        ({"pool": "a:1", "secret": "x" * 16, "secret_file": "f"}, "secret and secret_file"),
        (
            {"pool": "a:1", "token_file": "/no/such/file"},
            "token_file '/no/such/file' can't be read",
        ),
    ],
)
def test_what_can_t_be_meant_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        PoolAccess.read(given)


def test_settings_of_others_are_left_to_them() -> None:
    settings = PoolAccess.read({"pool": "a:1", "mine": [1]}, also=("mine",))
    assert settings.pool == ("a:1",)
    with pytest.raises(ConfigError, match="Did you mean mine"):
        PoolAccess.read({"pool": "a:1", "mien": 1}, also=("mine",), where="connector")


def test_a_token_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" hush \n")
    settings = PoolAccess.read({"pool": "a:1", "token_file": str(file)})
    assert settings.token == "hush" and "hush" not in repr(settings)
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="holds no token"):
        PoolAccess.read({"pool": "a:1", "token_file": str(file)})
    file.write_text("x" * 16)
    settings = PoolAccess.read({"pool": "a:1", "secret_file": str(file)})
    assert settings.secret_bytes == b"x" * 16 and "xxxx" not in repr(settings)
    with pytest.raises(ConfigError, match="secret and meta"):
        PoolAccess.read({"meta": "m:1", "secret_file": str(file)})
    with pytest.raises(ConfigError) as refused:
        PoolAccess.read({"pool": "a:1", "secret": 12345})
    assert "12345" not in refused.value.message

"""The lines that start engines: what a shell makes of them, and what our classes read in them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from tierkv.integrations.launch import (
    SGLANG_BACKEND,
    VLLM_CONNECTOR,
    EngineRole,
    Events,
    Launch,
    LaunchKind,
    LaunchWish,
    plan_launch,
    serve_command,
)
from tierkv.integrations.settings import PoolAccess
from tierkv.integrations.vllm.connector_settings import ConnectorSettings
from tierkv.kvcore.errors import ConfigError

POOL = {"pool": "127.0.0.1:7401", "tenant": "a:b"}


def wish(kind: str = "vllm", **changes: Any) -> LaunchWish:
    values: dict[str, Any] = {"model": "org/model", "pool": POOL} | changes
    return LaunchWish(LaunchKind(kind), **values)


def flag(launch: Launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1]


def parsed(launch: Launch, name: str) -> Mapping[str, Any]:
    value = json.loads(flag(launch, name))
    assert isinstance(value, dict)
    return value


def test_the_line_is_the_arguments_one_flag_on_a_line() -> None:
    model = "my 'model' $HOME `x`"
    launch = plan_launch(wish(model=model, events=Events.LOCAL))
    lines = launch.line().split(" \\\n")
    words = [word for line in lines for word in shlex.split(line)]
    assert words == [*launch.argv]
    assert all(line.startswith("  --") for line in lines[1:])


def test_vllms_package_for_cpus_is_started_as_a_module() -> None:
    argv = plan_launch(wish(as_module=True)).argv
    assert argv[:5] == (
        "python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model",
    )  # fmt: skip
    assert argv[5:] == plan_launch(wish()).argv[3:]


def test_json_for_a_cluster_has_no_spaces_without_end() -> None:
    assert "--structured-outputs-config" not in plan_launch(wish()).argv
    launch = plan_launch(wish(pool={"meta": "127.0.0.1:7400"}))
    told = parsed(launch, "--structured-outputs-config")
    assert told == {"backend": "guidance", "disable_any_whitespace": True}


def test_the_direct_connector_gets_its_settings_and_recomputes_what_fails() -> None:
    told = parsed(plan_launch(wish()), "--kv-transfer-config")
    module, _, name = VLLM_CONNECTOR.partition(":")
    assert (told["kv_connector"], told["kv_connector_module_path"]) == (name, module)
    assert told["kv_load_failure_policy"] == "recompute"
    extra = told["kv_connector_extra_config"]
    settings = PoolAccess.read(extra, also=ConnectorSettings.names())
    assert (settings.pool, settings.tenant) == (("127.0.0.1:7401",), "a:b")
    ConnectorSettings.read(extra, saves=True, loads=True)


@pytest.mark.parametrize(
    ("role", "kv_role", "serve"),
    [("both", "kv_both", "compute"), ("prefill", "kv_producer", "prefill"),
     ("decode", "kv_consumer", "decode")],
)  # fmt: skip
def test_roles_have_the_engines_names(role: str, kv_role: str, serve: str) -> None:
    asked = wish(role=EngineRole(role), pool={"meta": "10.0.0.1:7400"})
    launch = plan_launch(asked)
    assert parsed(launch, "--kv-transfer-config")["kv_role"] == kv_role
    assert serve_command(asked, launch, meta="10.0.0.1:7400")[2] == serve


def test_sglang_gets_a_backend_of_its_dynamic_kind() -> None:
    launch = plan_launch(wish("sglang", block_tokens=32, ranks=2))
    told = dict(parsed(launch, "--hicache-storage-backend-extra-config"))
    assert f"{told.pop('module_path')}:{told.pop('class_name')}" == SGLANG_BACKEND
    assert (told.pop("backend_name"), told.pop("interface_v1")) == ("tierkv", 1)
    assert PoolAccess.read(told).tenant == "a:b"
    assert flag(launch, "--hicache-storage-backend") == "dynamic"
    assert flag(launch, "--hicache-mem-layout") == "page_first"
    assert (flag(launch, "--page-size"), flag(launch, "--tensor-parallel-size")) == ("32", "2")


def test_local_events_are_heard_on_this_machine_only() -> None:
    vllm = plan_launch(wish(events=Events.LOCAL, events_folder="/run/x", port=8200))
    told = parsed(vllm, "--kv-events-config")
    # vLLM would connect to an address with a host, and listen nowhere.
    assert told["endpoint"] == "ipc:///run/x/tierkv-events-8200" == vllm.events_url
    assert told["replay_endpoint"] == vllm.replay_url != vllm.events_url
    assert told["enable_kv_cache_events"] is True
    sglang = plan_launch(wish("sglang", events=Events.LOCAL))
    told = parsed(sglang, "--kv-events-config")
    assert (told["endpoint"], told["bind"]) == ("tcp://127.0.0.1:5557", True)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_events_over_the_network_are_heard_by_default_settings(kind: str) -> None:
    launch = plan_launch(wish(kind, events=Events.NETWORK))
    told = parsed(launch, "--kv-events-config")
    assert (told["endpoint"], told["replay_endpoint"]) == ("tcp://*:5557", "tcp://*:5558")
    assert "--kv-events-config" not in plan_launch(wish(kind)).argv


def test_a_node_that_stands_for_it_hears_its_events() -> None:
    asked = wish(events=Events.LOCAL, pool={"meta": "m:1"})
    launch = plan_launch(asked)
    told = serve_command(asked, launch, meta="m:1")
    assert told[:7] == (
        "tierkv", "serve", "compute", "--engine", "vllm", "--url", "http://127.0.0.1:8100",
    )  # fmt: skip
    assert f"engine.events_url={launch.events_url}" in told
    assert f"engine.events_replay_url={launch.replay_url}" in told
    quiet = wish(pool={"meta": "m:1"})
    assert "engine.events_url=off" in serve_command(quiet, plan_launch(quiet), meta="m:1")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8100"),
        ("::1", "http://[::1]:8100"),
        ("gpu-7", "http://gpu-7:8100"),
    ],
)
def test_the_url_is_one_to_connect_to(host: str, url: str) -> None:
    assert plan_launch(wish(host=host)).url == url


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"kind": "sglang", "role": EngineRole.PREFILL}, "--disaggregation-mode"),
        ({"kind": "sglang", "role": EngineRole.DECODE}, "--disaggregation-mode"),
    ],
)
def test_a_wish_that_contradicts_itself_is_refused(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_launch(wish(**changes))
    assert hint in caught.value.hint

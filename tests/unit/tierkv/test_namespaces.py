"""``tierkv namespace`` against a real meta server, as somebody types it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from tierkv.cli import app
from tierkv.config import load_config
from tierkv.dbfront.statement.namespace_change import NamespaceChange
from tierkv.kvcore.errors import NoNodeError, UserError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.loop_thread import LoopThread
from tierkv.metaserver.client import Namespace
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.rpc.server import MetaServer
from tierkv.parts.served_models import namespace_policy


@pytest.fixture
def address() -> Iterator[str]:
    loop = LoopThread()
    server = MetaServer(MetaConfig(address="127.0.0.1:0"))
    try:
        yield loop.run(server.start())
    finally:
        loop.run(server.stop())
        loop.stop()


def typed(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["namespace", *arguments, "--set", f"cluster.meta_address={address}"]
    )


def shown(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    rows: list[dict[str, object]] = json.loads(result.output)
    return rows


def test_rates_weight_and_medium_are_set_and_listed(address: str) -> None:
    rates = ("--read-bandwidth", "200MiB/s", "--write-bandwidth", "1GiB", "--iops", "5000")
    more = ("--weight", "4", "--media", "memory", "--model", "large", "--format", "json")
    (made,) = shown(typed(address, "set", "red", *rates, *more))
    assert (made["read_bandwidth"], made["write_bandwidth"]) == ("200.0MiB/s", "1.0GiB/s")
    assert (made["iops"], made["weight"], made["media"]) == (5000, 4, "memory")
    assert made["model"] == "large"
    result = typed(address, "set", "red", "--weight", "0")
    assert "weight = '0' must be a number from 0.01" in str(result.exception)


def test_a_namespace_is_made_changed_and_listed(address: str) -> None:
    (made,) = shown(typed(address, "set", "default", "--blend", "on", "--format", "json"))
    assert made == {
        "name": "default",
        "tenants": "default",
        "cache": True,
        "kv_codec": "default",
        "blend": True,
        "recompute_ratio": 0.15,
        "selector": "hkvd",
        "gradual": True,
        "capacity": None,
        "disk_capacity": None,
        "ttl_s": None,
        "on_full": "evict",
        "eviction": None,
        "version": None,
        "media": None,
        "model": None,
        "read_bandwidth": None,
        "write_bandwidth": None,
        "iops": None,
        "weight": None,
    }
    (changed,) = shown(
        typed(
            address,
            *("set", "default", "--recompute-ratio", "0.5", "--selector", "query"),
            *("--kv-codec", "fp8", "--gradual", "off", "--cache", "off", "--format", "json"),
        )
    )
    assert changed == made | {
        "recompute_ratio": 0.5,
        "selector": "query",
        "kv_codec": "fp8",
        "gradual": False,
        "cache": False,
    }
    limits = ("--capacity", "1.5GiB", "--ttl", "15min", "--on-full", "refuse")
    (limited,) = shown(typed(address, "set", "default", *limits, "--format", "json"))
    assert limited == changed | {"capacity": "1.5GiB", "ttl_s": 900.0, "on_full": "refuse"}
    (kept,) = shown(typed(address, "set", "default", "--blend", "off", "--format", "json"))
    assert kept == limited | {"blend": False}
    shown(typed(address, "set", "team", "--tenant", "a", "--tenant", "b", "--format", "json"))
    listed = shown(typed(address, "list", "--format", "json"))
    assert [(row["name"], row["tenants"]) for row in listed] == [
        ("default", "default"),
        ("team", "a, b"),
    ]
    (one,) = shown(typed(address, "show", "team", "--format", "json"))
    assert one == listed[1]
    assert "team" in typed(address, "list").output
    assert typed(address, "drop", "team").exit_code == 0
    assert [row["name"] for row in shown(typed(address, "list", "--format", "json"))] == ["default"]


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (("show", "taem"), "no namespace 'taem'", "team"),
        (("set", "x", "--recompute-ratio", "0"), "recompute_ratio must be in", "0.15"),
        (("set", "x", "--selector", "hkdv"), "no selector", "hkvd"),
        (("set", "x", "--kv-codec", "fp9"), "no KV codec", "fp8"),
        (("set", "x", "--capacity", "lots"), "'lots' is no size", "4GiB"),
        (("set", "x", "--ttl", "soon"), "'soon' is no duration", "12h"),
        (("set", "x", "--ttl", "9999d"), "at most ten years", ""),
        (("drop", "taem"), "no namespace 'taem'", "team"),
        (("set", "no spaces"), "not a namespace name", ""),
        (("set", "y", "--tenant", "a"), "already belongs to namespace team", "Remove a"),
    ],
)
def test_what_can_not_be_is_said(
    address: str, arguments: tuple[str, ...], says: str, hint: str
) -> None:
    shown(typed(address, "set", "team", "--tenant", "a", "--format", "json"))
    error = typed(address, *arguments).exception
    assert isinstance(error, UserError)
    assert says in error.message
    assert hint in error.hint


def test_without_a_meta_server_it_says_how_to_look() -> None:
    error = typed("127.0.0.1:1", "list").exception
    assert isinstance(error, NoNodeError)
    assert "tierkv up" in error.hint


def test_a_change_leaves_everything_else() -> None:
    before = Namespace(
        "n", ("a",), False, ReusePolicy(KvCodec.INT4, True, 0.5, BlendSelector.QUERY, True)
    )
    assert NamespaceChange().applied_to(before) == before
    off = NamespaceChange(blend=False, kv_codec="default", tenants=()).applied_to(before)
    assert (off.tenants, off.policy.blend, off.policy.kv_codec) == ((), False, None)
    assert (off.policy.selector, off.cache_enabled) == (BlendSelector.QUERY, False)


def test_settings_give_the_policy_of_tenants_without_a_namespace() -> None:
    assert namespace_policy(load_config(environ={}).settings.namespace) == ReusePolicy()
    environ = {"TIERKV_NAMESPACE_BLEND": "on", "TIERKV_NAMESPACE_KV_CODEC": "int8"}
    flags = {"namespace.recompute_ratio": "0.5", "namespace.selector": "boundary"}
    settings = load_config(environ=environ, flags=flags).settings
    assert namespace_policy(settings.namespace) == ReusePolicy(
        KvCodec.INT8, blend=True, recompute_ratio=0.5, selector=BlendSelector.BOUNDARY
    )

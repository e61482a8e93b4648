from __future__ import annotations

import pytest

from tierkv.dmp.config import DmpConfig
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId, NodeId


def make(**settings: object) -> DmpConfig:
    return DmpConfig(**({"node_id": NodeId("dmp-a"), "host": HostId("h")} | settings))  # type: ignore[arg-type]


def test_the_segment_is_named_after_the_node() -> None:
    assert str(make().segment_file) == "/dev/shm/tierkv-dmp-a.seg"
    assert str(make(node_id="a/../b").segment_file) == "/dev/shm/tierkv-a_.._b.seg"
    assert str(make(segment_path="/x/y").segment_file) == "/x/y"


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_a_public_address_needs_a_token(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.token"):
        make(bind=bind)
    assert "secret" not in repr(make(bind=bind, token="secret"))


@pytest.mark.parametrize(
    "settings",
    [
        {"node_id": "two words"},
        {"extent_bytes": 1000},
        {"extent_bytes": (32 << 10) + 1},
        {"capacity_bytes": 1 << 20},
        {"port": 70_000},
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"dmp\."):
        make(**settings)


def test_the_capacity_is_cut_to_whole_extents() -> None:
    assert make(capacity_bytes=(100 << 20)).extent_count == 3

"""From the settings of the disk pool to the store below a node's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.config import list_entries, load_config
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, RangeShape
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.parts.parts import disk_tier
from tierkv.settings import DmpSettings

NODE, MIB = NodeId("dmp-0"), 1 << 20


def settings(tmp_path: Path, **flags: object) -> DmpSettings:
    values = {"dmp.disk_path": str(tmp_path / "disk"), "dmp.disk_capacity": "16MiB"}
    return load_config(
        flags=values | {f"dmp.{key}": value for key, value in flags.items()}, environ={}
    ).settings.dmp


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    assert disk_tier(settings(tmp_path, disk_path=""), NODE, extent_bytes=MIB) is None
    with pytest.raises(ConfigError, match="below a disk pool"):
        disk_tier(settings(tmp_path, disk_path="", archive_url="s3://b"), NODE, extent_bytes=MIB)


def test_the_largest_block_fits_a_file(tmp_path: Path) -> None:
    """Else it would be offered again and again, and nothing behind it would go down."""
    opener = disk_tier(settings(tmp_path), NODE, extent_bytes=4 * MIB)
    assert opener is not None
    store = opener()
    block = BlockSpec(BlockKey(bytes(16)), ROOT_PARENT, 64, ranges=RangeShape(MIB, 4))
    store.put(block, memoryview(bytes(4 * MIB)))
    assert store.find(block.key) == block
    store.close()


def test_too_small_a_disk_pool_is_refused_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"take 25190400 bytes") as caught:
        disk_tier(settings(tmp_path), NODE, extent_bytes=8 * MIB)
    assert "Raise dmp.disk_capacity" in (caught.value.hint or "")
    assert not (tmp_path / "disk").exists()


def test_options_of_the_archive_reach_it_and_are_secret(tmp_path: Path) -> None:
    flags = {"archive_url": "s3://bucket/x", "archive_options": {"bogus": "hidden"}}
    opener = disk_tier(settings(tmp_path, **flags), NODE, extent_bytes=MIB)
    assert opener is not None
    with pytest.raises(ConfigError, match="'bogus' is not valid") as caught:
        opener()
    assert "\n" not in caught.value.message, "what the library adds is left out"
    shown = {
        entry.key: entry.value
        for entry in list_entries(
            load_config(flags={f"dmp.{key}": value for key, value in flags.items()}, environ={})
        )
    }
    assert "hidden" not in shown["dmp.archive_options"]

"""What a front writes down of its nodes comes back, and only whole and of its own cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fix_scheduler import make_info
from tierkv.kvcore.node import NodeReport, NodeRole
from tierkv.metaserver.client import DirectoryNode
from tierkv.parts.record_follower import NodeFile

META = "127.0.0.1:7400"
NODES = tuple(
    DirectoryNode(make_info(name, role=role), NodeReport(), heartbeat_age_s=0.0, state="alive")
    for name, role in (("c1", NodeRole.COMPUTE), ("d1", NodeRole.DMP))
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state" / "front.nodes.json"
    NodeFile(path, meta_address=META).note(NODES, "tiny")
    return path


def test_nodes_and_default_model_come_back(path: Path) -> None:
    nodes, model = NodeFile(path, meta_address=META).load()
    assert [node.info for node in nodes] == [node.info for node in NODES]
    assert model == "tiny"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_cluster_does_not_get_them(path: Path) -> None:
    assert NodeFile(path, meta_address="127.0.0.1:7401").load() == ((), "")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"meta_address": "127.0.0.1:7400"}'])
def test_a_damaged_file_counts_as_empty(path: Path, text: str) -> None:
    path.write_text(text)
    assert NodeFile(path, meta_address=META).load() == ((), "")


def test_a_damaged_node_counts_as_none(path: Path) -> None:
    path.write_text(path.read_text().replace('"c1"', '""'))
    assert NodeFile(path, meta_address=META).load() == ((), "")


def test_a_folder_that_can_not_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = NodeFile(tmp_path / "file" / "nodes.json", meta_address=META)
    memory.note(NODES, "tiny")
    assert memory.load() == ((), "")

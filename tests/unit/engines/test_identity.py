"""Who shares with whom, and which releases are tested: people are told in what others differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tierkv.integrations.engine_report import Complaints, engine_report
from tierkv.integrations.identity import (
    FACTS_MARK,
    EngineIdentity,
    differences,
    layout_fields,
    revision_of,
    untested,
)
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvwire import convert
from tierkv.storage.modelfiles.model_folder import inspect_model_folder

LAYOUT = BlockLayout(2, 2, 16, KvDtype.FLOAT32, 128, order="vllm-hnd-1")
HERE = EngineIdentity("vllm", "0.32.0", "/models/tiny", "abc", LAYOUT)


def test_an_undivided_engine_has_the_layout_s_own_fingerprint() -> None:
    assert HERE.fingerprint() == LAYOUT.fingerprint()
    info = HERE.model_info()
    assert info is not None and info.identity == f"abc:{LAYOUT.fingerprint().hex()}"
    assert (info.name, info.folder) == ("tiny", "/models/tiny")


def test_whatever_makes_bytes_differ_makes_fingerprints_differ() -> None:
    others = [
        HERE,
        replace(HERE, layout=replace(LAYOUT, block_tokens=16)),
        replace(HERE, layout=replace(LAYOUT, order="vllm-nhd-1")),
        replace(HERE, layout=replace(LAYOUT, dtype=KvDtype.BFLOAT16)),
        replace(HERE, ranks=2),
        replace(HERE, ranks=4),
        replace(HERE, facts=(("kv dtype", "fp8"),)),
        replace(HERE, facts=(("kv dtype", "fp8_e5m2"),)),
        replace(HERE, facts=(("kv dtypef", "p8"),)),
        replace(HERE, layout=None),
        replace(HERE, layout=None, facts=(("bytes", "1024"),)),
    ]
    assert len({identity.fingerprint() for identity in others}) == len(others)


def test_what_is_only_told_makes_no_difference() -> None:
    same = replace(HERE, version="9", rank=0, model="/elsewhere/tiny", context_tokens=5)
    assert same.fingerprint() == HERE.fingerprint() and same.fields() == HERE.fields()
    two = replace(HERE, facts=(("a", "1"), ("b", "2")))
    assert two.fingerprint() == replace(two, facts=(("b", "2"), ("a", "1"))).fingerprint()


def test_facts_are_part_of_what_a_salt_is_made_for() -> None:
    plain, quantised = HERE.model_info(), replace(HERE, facts=(("q", "fp8"),)).model_info()
    other = replace(HERE, facts=(("q", "int8"),)).model_info()
    assert plain is not None and quantised is not None and other is not None
    assert quantised.revision.startswith(f"{plain.revision}{FACTS_MARK}")
    assert len({info.identity for info in (plain, quantised, other)}) == 3


def test_differences_are_named_with_both_values() -> None:
    there = replace(HERE, layout=replace(LAYOUT, block_tokens=16), ranks=2)
    assert differences(HERE.fields(), there.fields()) == (
        "tensor parallel 1 here, 2 there, block size 128 here, 16 there"
    )
    assert differences(HERE.fields(), HERE.fields()) == ""
    assert "byte order TierKV's own here" in differences(
        layout_fields(replace(LAYOUT, order="")), layout_fields(LAYOUT)
    )
    assert differences({"a": "1"}, {}) == "a 1 here, unknown there"


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("/models/tiny", "tiny"),
        ("org/Model-7B", "org/Model-7B"),
        ("/models/größe 模型", "gr__e___"),
        ("./x", "_/x"),
        ("", "_"),
        ("\ud800", "_"),
        ("a" * 300, "a" * 128),
    ],
)
def test_any_model_name_becomes_a_name_of_the_cluster(model: str, label: str) -> None:
    identity = replace(HERE, model=model)
    assert identity.label == label
    info = NodeInfo(
        NodeId("n"), Incarnation(1), NodeRole.ENGINE, HostId("h"), models=(identity.model_info(),)
    )
    assert convert.NODE_INFO.from_proto(convert.NODE_INFO.to_proto(info)).models[0].name == label


def test_an_engine_without_known_weights_or_layout_names_no_model() -> None:
    assert replace(HERE, revision="").model_info() is None
    assert replace(HERE, layout=None).model_info() is None


def test_the_revision_of_a_folder_is_the_compute_node_s() -> None:
    folder = Path(__file__).parents[3] / "compute/demo_model/weights"
    assert revision_of(str(folder)) == inspect_model_folder(folder).revision
    assert revision_of(str(folder), told="f" * 40) == inspect_model_folder(folder).revision


def test_a_branch_says_nothing_about_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert revision_of(str(tmp_path)) == ""
    assert revision_of(str(tmp_path), told="main") == ""
    assert revision_of(str(tmp_path), told="0a" * 20) == f"{tmp_path}@{'0a' * 20}"
    assert revision_of("no-such-org/no-such-model-here") == ""


def test_a_report_has_hits_complaints_and_who_it_is() -> None:
    complaints = Complaints()
    complaints.complain("pool_down", "no node answers")
    counts = {"hit_tokens": 7, "read_bytes": 10, "write_bytes": 20, "lookup_failed": 1}
    report = engine_report(HERE, counts, complaints, None)
    (tier,) = report.tiers
    assert (tier.tier, tier.hit_tokens, tier.read_bytes) == (Tier.L3, 7, 10)
    assert report.cache_errors == (("pool_down", 1),)
    assert report.notes == ("vllm 0.32.0, rank 0 of 1", "pool_down (1): no node answers")
    assert convert.NODE_REPORT.from_proto(convert.NODE_REPORT.to_proto(report)) == report


@pytest.mark.parametrize(
    ("engine", "version"),
    [("vllm", "0.32.0"), ("vllm", "0.32.1+cpu"), ("vllm", "0.32"), ("sglang", "0.5.23.post1")],
)
def test_tested_releases_are_not_spoken_of(engine: str, version: str) -> None:
    assert untested(engine, version) == ""


@pytest.mark.parametrize(
    ("engine", "version", "known"),
    [
        ("vllm", "0.3.2", "0.32"),
        ("vllm", "0.320.0", "0.32"),
        ("vllm", "0.33.0", "0.32"),
        ("vllm", "", "0.32"),
        ("sglang", "0.5.2", "0.5.23"),
        ("other", "1", "none"),
    ],
)
def test_others_are_named_with_those_that_are(engine: str, version: str, known: str) -> None:
    said = f"{engine} {version} was not tested with TierKV; tested: {known}"
    assert untested(engine, version) == said

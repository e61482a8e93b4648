"""``compute.kv_codec`` from the setting to the pool and back, over real DMP nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tierkv
from tests.fix_dmp import Rig, make_rig  # noqa: F401 - a fixture
from tests.fix_model import answer, make_request, running_node, write_calibration
from tierkv.compute.node import ComputeNode
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.block import namespace_key
from tierkv.kvcore.ids import HostId, NamespaceKey
from tierkv.kvcore.layout import KvCodec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
PROMPT = [i * 7 % 128 for i in range(70)]
LOSSY = [codec for codec in KvCodec if codec.is_lossy]


def name(node: ComputeNode) -> NamespaceKey:
    fingerprint = node.model.layout.fingerprint()
    return namespace_key(
        b"s" * 32,
        tenant="default",
        model_revision=node.model.revision,
        layout_fingerprint=fingerprint,
    )


@pytest.mark.parametrize(("host", "tier"), [("here", "l2"), ("elsewhere", "l3")])
async def test_over_shared_memory_and_tcp_each_codec_finds_its_own(
    make_rig: Callable[..., Rig],  # noqa: F811
    host: str,
    tier: str,
    tmp_path: Path,
) -> None:
    tables = write_calibration(tmp_path)
    rig = make_rig(capacity_bytes=16 << 20, extent_bytes=1 << 20)
    info = rig.node.reports.info(data_address=rig.server.address)
    for codec in KvCodec:
        answers = []
        for life in range(3):
            pool = connect_pool_node(info, host=HostId(host))
            try:
                async with running_node(
                    pool, host=host, kv_codec=codec, kv_calibration=tables, ttft_budget_s=100.0
                ) as node:
                    asked = make_request(PROMPT, namespace_key=name(node))
                    tokens, last = await answer(node, asked)
                    assert last.usage is not None and last.usage.kv_codec is codec
                    assert getattr(last.usage.hit_tokens, tier) == (64 if life else 0)
                    assert await node.flush() and node.report().cache_errors == ()
                    answers.append(tokens)
            finally:
                pool.close()
        assert answers[1] == answers[2]
        assert codec.is_lossy or answers[0] == answers[1]


def test_the_setting_reaches_the_model_and_is_shown() -> None:
    with tierkv.connect(
        dmp__capacity="64MiB", compute__threads=1, compute__kv_codec="int4"
    ) as connection:
        row = connection.execute(
            "SELECT kv_codec, block_bytes, stored_block_bytes FROM tierkv.models"
        ).fetchone()
        assert row is not None
        codec, block, stored = row
        assert codec == "int4" and block > 5 * stored > 0
        ask = "Customer: Jonas Ortiz. Product: blender.\nQuestion: What did the customer buy?"
        found = connection.execute("SELECT ai_generate(?)", [ask]).fetchone()
        assert found == ("blender",)


def test_entropy_coded_kv_of_the_shipped_model_answers_right() -> None:
    with tierkv.connect(
        dmp__capacity="64MiB", compute__threads=1, compute__kv_codec="entropy-medium"
    ) as connection:
        ask = "Customer: Jonas Ortiz. Product: blender.\nQuestion: What did the customer buy?"
        found = connection.execute("SELECT ai_generate(?)", [ask]).fetchone()
        assert found == ("blender",)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(tierkv.Error, match=r"compute\.kv_codec"):
        tierkv.connect(compute__kv_codec="zip")

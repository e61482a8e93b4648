"""What a call asks for and what its namespace allows, down to the request that nodes see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fix_scheduler import make_info
from tests.fix_text import Front, running_front, text_call, text_model, write_model_folder
from tierkv.dbfront.contracts import Message, PreparedCall
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import Blend, BlendSelector, ReusePolicy
from tierkv.metaserver.client import Namespace

ALLOWED = ReusePolicy(blend=True, recompute_ratio=0.3, selector=BlendSelector.QUERY, gradual=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


async def allow_blending(front: Front) -> None:
    await front.meta.put_namespace(Namespace("default", policy=ALLOWED))


async def prepared(front: Front, **changes: Any) -> PreparedCall:
    given: dict[str, Any] = {"messages": (Message("user", "Go."),), "documents": ("one", "two")}
    return await front.generation.prepare(text_call(**(given | changes)))


async def test_a_namespace_that_allows_it_blends_by_its_own_policy(folder: Path) -> None:
    async with running_front(folder) as front:
        await allow_blending(front)
        request = (await prepared(front)).request
        # <s><|user|> stand before the documents, each of which ends in a line end.
        assert request.blend == Blend(((2, 6), (6, 10)), 0.3, BlendSelector.QUERY, gradual=True)


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({"recompute_ratio": 0.1}, (0.3, BlendSelector.QUERY)),
        ({"recompute_ratio": 0.8}, (0.8, BlendSelector.QUERY)),
        ({"selector": BlendSelector.BOUNDARY, "blend": True}, (0.3, BlendSelector.BOUNDARY)),
    ],
)
async def test_a_call_may_ask_for_more_recomputation_and_another_selector(
    folder: Path, asked: dict[str, Any], used: tuple[float, BlendSelector]
) -> None:
    async with running_front(folder) as front:
        await allow_blending(front)
        call = await prepared(front, **asked)
        assert call.request.blend is not None
        assert (call.request.blend.recompute_ratio, call.request.blend.selector) == used
        assert call.blend_refusal == ""


@pytest.mark.parametrize(
    "exact", [{"blend": False}, {"cache": False}, {"documents": ()}, {"documents": (" ",)}]
)
async def test_what_is_exact_although_the_namespace_blends(
    folder: Path, exact: dict[str, Any]
) -> None:
    async with running_front(folder) as front:
        await allow_blending(front)
        call = await prepared(front, recompute_ratio=0.5, **exact)
        assert call.request.blend is None
        assert call.blend_refusal == ""


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, False),
        ({"blend": False}, False),
        ({"blend": True}, True),
        ({"recompute_ratio": 0.5}, True),
        ({"selector": BlendSelector.HKVD}, True),
    ],
)
async def test_only_who_asked_is_told_of_a_refusal(
    folder: Path, asked: dict[str, Any], told: bool
) -> None:
    async with running_front(folder) as front:
        call = await prepared(front, **asked)
        assert call.request.blend is None
        expected = "namespace default does not allow blending" if told else ""
        assert call.blend_refusal == expected


async def test_a_model_that_failed_its_gate_is_never_blended(folder: Path) -> None:
    model = text_model(folder, blend_refusal="tokens leak")
    async with running_front(folder, make_info("c1", models=(model,))) as front:
        await allow_blending(front)
        call = await prepared(front, blend=True)
        assert call.request.blend is None
        assert call.blend_refusal == "model tiny is not blended: tokens leak"


async def test_a_namespace_without_cache_does_not_blend(folder: Path) -> None:
    async with running_front(folder) as front:
        await front.meta.put_namespace(Namespace("default", cache_enabled=False, policy=ALLOWED))
        call = await prepared(front, blend=True)
        assert call.request.blend is None and not call.request.use_cache
        assert call.blend_refusal == "namespace default has its cache off"


async def test_ids_do_not_depend_on_blending_and_the_codec_is_the_namespaces(folder: Path) -> None:
    async with running_front(folder) as front:
        exact = (await prepared(front, tenant="a")).request
        policy = ReusePolicy(blend=True, kv_codec=KvCodec.FP8)
        await front.meta.put_namespace(Namespace("b", policy=policy))
        blended = (await prepared(front, tenant="b")).request
        off = (await prepared(front, tenant="b", blend=False)).request
        assert exact.token_ids == blended.token_ids == off.token_ids
        assert (exact.kv_codec, blended.kv_codec) == (None, KvCodec.FP8)
        assert blended.namespace_key == off.namespace_key


async def test_pieces_between_separators_are_chunks(folder: Path) -> None:
    async with running_front(folder) as front:
        await allow_blending(front)
        marked = (Message("user", "head#one\n#two\n#Go."),)
        cut = await prepared(front, messages=marked, documents=(), chunk_separator="#")
        assert cut.request.blend is not None
        assert cut.request.blend.chunks == ((6, 10), (10, 14))


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, float("nan")])
async def test_a_ratio_out_of_range_is_refused(folder: Path, ratio: float) -> None:
    async with running_front(folder) as front:
        with pytest.raises(UdfArgumentError, match="recompute_ratio"):
            await prepared(front, recompute_ratio=ratio)


async def test_documents_before_token_ids_are_refused(folder: Path) -> None:
    async with running_front(folder) as front:
        with pytest.raises(UdfArgumentError, match="token ids"):
            await prepared(front, messages=None, prompt_token_ids=(3, 4))

"""One answer out of several nodes' events has one usage."""

from __future__ import annotations

from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import (
    BlendSelector,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    HitTokens,
    Usage,
)
from tierkv.scheduler.requests.job import AnswerSoFar


def test_the_codec_of_a_handed_off_answer_is_told() -> None:
    answer = AnswerSoFar(GenerateRequest(RequestId("r"), "m", (1, 2, 3), NamespaceKey(b"n" * 32)))
    prefill = Usage(3, 1, HitTokens(l2=2), 1, KvCodec.FP8)
    answer.handed_off(GenerateEvent((7,), FinishReason.HANDOFF, prefill))
    last = answer.finish_early("node")
    assert last.usage is not None
    assert last.usage.kv_codec is KvCodec.FP8 and last.usage.hit_tokens == HitTokens(l2=2)


def test_the_codec_of_a_plain_answer_is_told() -> None:
    answer = AnswerSoFar(GenerateRequest(RequestId("r"), "m", (1, 2, 3), NamespaceKey(b"n" * 32)))
    usage = Usage(3, 1, kv_codec=KvCodec.INT4)
    last = answer.finish(GenerateEvent((), FinishReason.STOP, usage))
    assert last.usage is not None and last.usage.kv_codec is KvCodec.INT4


def test_what_was_blended_is_told() -> None:
    answer = AnswerSoFar(
        GenerateRequest(RequestId("r"), "m", tuple(range(9)), NamespaceKey(b"n" * 32))
    )
    usage = Usage(
        9, 1, HitTokens(l1=6), blended_tokens=6, recomputed_tokens=2, selector=BlendSelector.HKVD
    )
    assert answer.finish(GenerateEvent((), FinishReason.STOP, usage)).usage == usage

"""What a namespace's policy does to the calls of its tenant, in an embedded cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fix_text import text_call
from tierkv.config import load_config
from tierkv.dbfront.contracts import Message, TextAnswer
from tierkv.embedded import EmbeddedProcess, start_embedded
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.metaserver.client import Namespace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

DOCUMENT = "Customer: Mia Brandt. Product: kettle. City: Porto. The kettle came late. " * 4
QUESTION = (Message("user", "Question: Where does Mia Brandt live?"),)
SETTINGS = {
    "dmp.capacity": "64MiB",
    "compute.threads": "1",
    "compute.block_tokens": "16",
    "compute.load_policy": "always",
}


@pytest.fixture(scope="module")
def process() -> Iterator[EmbeddedProcess]:
    process = start_embedded(load_config(flags=SETTINGS, environ={}))
    yield process
    process.loop.run(process.cluster.stop())
    process.loop.stop()


async def ask(process: EmbeddedProcess, tenant: str, *documents: str) -> TextAnswer:
    generation = process.cluster.front.generation
    call = text_call(messages=QUESTION, documents=documents, tenant=tenant, max_tokens=8)
    answer = await generation.answer(await generation.prepare(call))
    await process.cluster.nodes.settle()
    return answer


def test_a_codec_is_that_of_the_tenants_namespace_and_never_mixed(
    process: EmbeddedProcess,
) -> None:
    async def told() -> list[tuple[KvCodec, int]]:
        cluster = process.cluster
        policy = ReusePolicy(kv_codec=KvCodec.INT8)
        await cluster.meta.put_namespace(Namespace("small", ("ann", "bob"), policy=policy))
        answers = []
        for tenant in ("ann", "carl", "bob", "carl"):
            usage = (await ask(process, tenant, DOCUMENT)).usage
            answers.append((usage.kv_codec, usage.hit_tokens.total))
            await cluster.nodes.computes[0].node.drop_cache()
        return answers

    first, second, third, fourth = process.loop.run(told())
    assert (first, second) == ((KvCodec.INT8, 0), (KvCodec.NONE, 0))
    assert third[0] is KvCodec.INT8 and third[1] > 0  # shares with ann what was encoded
    assert fourth[0] is KvCodec.NONE and fourth[1] > 0  # finds its own, unencoded


def test_a_tenant_that_may_not_blend_is_exact_beside_one_that_may(
    process: EmbeddedProcess,
) -> None:
    async def told() -> dict[str, TextAnswer]:
        policy = ReusePolicy(blend=True, recompute_ratio=0.2, selector=BlendSelector.BOUNDARY)
        await process.cluster.meta.put_namespace(Namespace("may", policy=policy))
        answers: dict[str, TextAnswer] = {}
        for number in range(20):
            for tenant in ("may", "may-not"):
                answers[tenant] = await ask(process, tenant, f"Note {number}.", DOCUMENT)
            if answers["may"].usage.blended_tokens:
                break
        return answers

    answers = process.loop.run(told())
    usage = answers["may"].usage
    assert usage.blended_tokens > 0 and usage.recomputed_tokens > 0
    assert usage.selector is BlendSelector.BOUNDARY
    exact = answers["may-not"].usage
    assert (exact.blended_tokens, exact.recomputed_tokens, exact.selector) == (0, 0, None)

"""The shipped model chooses the labels that it also says, and what it scores is what it says."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from tests.fix_model import running_node
from tests.fix_text import text_call
from tierkv.compute.client import LocalComputeClient
from tierkv.compute.demo_model.data import make_probes
from tierkv.dbfront.contracts import Message, TextAnswer
from tierkv.dbfront.generation.generation import Generation
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tools.demo_model.evaluate import Answerer
from tools.demo_model.tokenizer import FOLDER

LABELS = {
    "review_filter": ("yes", "no"),
    "fact_filter": ("no", "yes"),
    "sentiment": ("negative", "positive"),
    "topic": ("support", "quality", "price", "delivery"),
    "category": ("kitchen", "office", "garden", "sport", "music", "home"),
}


@asynccontextmanager
async def demo_front() -> AsyncIterator[Generation]:
    async with running_node(
        random_model=None, model_folder=str(FOLDER), block_tokens=16, l1_pages=300,
        max_batch_tokens=512,
    ) as node:  # fmt: skip
        dispatcher = Dispatcher(ClusterView(fixed=[LocalComputeClient(node)]))
        await dispatcher.start()
        try:
            yield Generation(dispatcher)
        finally:
            await dispatcher.stop()


async def ask(front: Generation, probe, **changes: object) -> TextAnswer:
    messages = tuple(Message(m["role"], m["content"]) for m in probe.messages)
    return await front.answer(await front.prepare(text_call(messages=messages, **changes)))


async def test_labels_are_what_the_model_says() -> None:
    async with demo_front() as front:
        for probe in make_probes(tuple(LABELS), 3, seed=17):
            said = await ask(front, probe, max_tokens=8)
            chosen = await ask(front, probe, labels=LABELS[probe.task])
            assert chosen.text == said.text
            assert sum(chosen.label_probabilities) == pytest.approx(1.0)
            assert chosen.usage.hit_tokens.total >= said.usage.prompt_tokens - 16
            assert chosen.usage.completion_tokens == 0


async def test_chances_and_embeddings_are_those_of_transformers() -> None:
    theirs = Answerer(FOLDER)
    async with demo_front() as front:
        for probe in make_probes(("review_filter", "sentiment"), 3, seed=18):
            text = theirs.tokenizer.apply_chat_template(
                probe.messages, tokenize=False, add_generation_prompt=True
            )
            ids = theirs.tokenizer.encode(text, add_special_tokens=False)
            labels = LABELS[probe.task]
            first = [theirs.tokenizer.encode(f" {x}", add_special_tokens=False) for x in labels]
            assert all(len(label) == 1 for label in first)
            with torch.inference_mode():
                out = theirs.model(torch.tensor([ids]), output_hidden_states=True)
            chances = out.logits[0, -1].float()[[label[0] for label in first]].softmax(-1)
            got = await ask(front, probe, labels=labels)
            assert got.label_probabilities == pytest.approx(chances.tolist(), abs=1e-4)
            hidden = out.hidden_states[-1][0, -1].float()  # After the last norm.
            embedded = (await ask(front, probe, embed=True)).embedding
            assert math.hypot(*embedded) == pytest.approx(1.0, rel=1e-5)
            torch.testing.assert_close(
                torch.tensor(embedded), hidden / hidden.norm(), rtol=1e-3, atol=1e-4
            )
